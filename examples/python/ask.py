"""Asks about a video, sent inside the request; with --stream the answer is streamed.

python ask.py VIDEO [QUESTION] [--stream]
"""

import argparse
import base64
import mimetypes
import os
from pathlib import Path
from typing import Any

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("video", type=Path)
parser.add_argument("question", nargs="?", default="Describe the video.")
parser.add_argument("--stream", action="store_true")
parser.add_argument(
    "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
)
parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
parser.add_argument("--model", default=os.environ.get("HIPPO_MODEL", "hippo"))
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
media_type = mimetypes.guess_type(arguments.video)[0] or "video/mp4"
data = base64.b64encode(arguments.video.read_bytes()).decode()
messages: list[Any] = [
    {
        "role": "user",
        "content": [
            # The openai library has no type for a part with a video.
            {"type": "video_url", "video_url": {"url": f"data:{media_type};base64,{data}"}},
            {"type": "text", "text": arguments.question},
        ],
    }
]

if arguments.stream:
    chunks = client.chat.completions.create(
        model=arguments.model, messages=messages, temperature=0, stream=True
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
else:
    answer = client.chat.completions.create(model=arguments.model, messages=messages, temperature=0)
    print(answer.choices[0].message.content)
