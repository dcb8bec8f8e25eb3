"""Asks about a video through LangChain's class for OpenAI-compatible servers.

python ask.py VIDEO [QUESTION]
"""

import argparse
import base64
import os
from pathlib import Path

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("video", type=Path)
parser.add_argument("question", nargs="?", default="Describe the video.")
parser.add_argument(
    "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
)
parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
parser.add_argument("--model", default=os.environ.get("HIPPO_MODEL", "hippo"))
arguments = parser.parse_args()

model = ChatOpenAI(
    model=arguments.model,
    base_url=arguments.base_url,
    api_key=SecretStr(arguments.api_key),
    temperature=0,
)
data = base64.b64encode(arguments.video.read_bytes()).decode()
question = HumanMessage(
    [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
        {"type": "text", "text": arguments.question},
    ]
)
for chunk in model.stream([question]):
    print(chunk.text, end="", flush=True)
print()
