#!/usr/bin/env bash
# Uploads a video once, asks several questions about it by its id, and deletes it.
#   upload.sh VIDEO QUESTION...
set -euo pipefail
base_url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
api_key=${OPENAI_API_KEY:-none}
model=${HIPPO_MODEL:-hippo}
video=${1:?usage: upload.sh VIDEO QUESTION...}
shift
request() {
  curl --silent --show-error --fail-with-body --header "Authorization: Bearer $api_key" "$@"
}

card=$(request --form "file=@$video" "$base_url/videos")
id=$(printf %s "$card" | sed 's/.*"id": *"\([^"]*\)".*/\1/')
for question in "$@"; do
  text=$(printf %s "$question" | sed 's/[\\"]/\\&/g')
  request "$base_url/chat/completions" --header "Content-Type: application/json" --data-binary @- <<END
{
  "model": "$model",
  "temperature": 0,
  "messages": [
    {
      "role": "user",
      "content": [
        {"type": "video_url", "video_url": {"url": "$id"}},
        {"type": "text", "text": "$text"}
      ]
    }
  ]
}
END
  echo
done
request --request DELETE "$base_url/videos/$id"
echo
