#!/usr/bin/env bash
# Asks about a video with nothing but curl, and prints the events of the stream as they come.
#   ask.sh VIDEO [QUESTION]
set -euo pipefail
base_url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
api_key=${OPENAI_API_KEY:-none}
model=${HIPPO_MODEL:-hippo}
video=${1:?usage: ask.sh VIDEO [QUESTION]}
question=$(printf %s "${2:-Describe the video.}" | sed 's/[\\"]/\\&/g')

# The body goes through a pipe: a video is too long for a command line.
{
  printf '{"model": "%s", "stream": true, "temperature": 0, "messages": [{"role": "user",' "$model"
  printf ' "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,'
  base64 <"$video" | tr -d '\n'
  printf '"}}, {"type": "text", "text": "%s"}]}]}' "$question"
} | curl --silent --show-error --fail-with-body --no-buffer "$base_url/chat/completions" \
  --header "Authorization: Bearer $api_key" --header "Content-Type: application/json" \
  --data-binary @-
