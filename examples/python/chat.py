"""Uploads a video once and asks about it in several turns of one conversation.

From the second turn on, the video and the earlier turns are cached by the server.

python chat.py VIDEO QUESTION [QUESTION ...]
"""

import argparse
import os
from pathlib import Path
from typing import Any

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("video", type=Path)
parser.add_argument("questions", nargs="+", metavar="question")
parser.add_argument(
    "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
)
parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
parser.add_argument("--model", default=os.environ.get("HIPPO_MODEL", "hippo"))
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
# `client.videos` of the openai library generates videos, so this uploads one by `client.post`.
video: Any = client.post(
    "/videos",
    cast_to=object,
    files={"file": (arguments.video.name, arguments.video.read_bytes())},
    options={"headers": {"Content-Type": "multipart/form-data"}},
)

messages: list[Any] = []
for question in arguments.questions:
    content: list[Any] = [{"type": "text", "text": question}]
    if not messages:
        content.insert(0, {"type": "video_url", "video_url": {"url": video["id"]}})
    messages.append({"role": "user", "content": content})
    answer = client.chat.completions.create(model=arguments.model, messages=messages, temperature=0)
    print(f"> {question}\n{answer.choices[0].message.content}")
    messages.append(answer.choices[0].message)

client.delete(f"/videos/{video['id']}", cast_to=object)
