"""``hippo caption``: asks one question about every video of a folder; a JSON line for each."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from hippo.cli.caption_run import CaptionRun
from hippo.client.requests import RequestForm
from hippo.client.server import KEY_VARIABLE, Server
from hippo.errors import InvalidRequestError
from hippo.speculation.policies import POLICY_NAMES

HELP = "ask about every video of a folder"
DESCRIPTION = """\
Asks one question about every video and image in a folder and its subfolders, several at once, and
appends a JSON line for each to a file. A file that cannot be answered gets a line with the reason.
The same command goes on where an earlier one stopped.
"""
EXAMPLES = """\
examples:
  hippo caption videos --prompt "Describe the video." --out captions.jsonl
  hippo caption videos --prompt-file prompt.txt --schema scene.json --out scenes.jsonl
  hippo caption videos --prompt "Describe the video." --out captions.jsonl --retry-errors
  hippo caption /data/videos --prompt "What happens?" --out captions.jsonl --by-path
  hippo caption videos --prompt "What happens?" --out captions.jsonl --url http://vllm:8000

A line of an answer has `path` (below the folder), `answer`, `parsed` (with --schema), `usage`,
`finish_reason`, `seconds` and `request`, a hash of the question and its options. A line of an error
has `path`, `error`, `seconds` and `request`. If a path has several lines, the last line counts.
The exit code is 1 if a file has no answer at the end. Ctrl-C stops; no line is lost.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="searched with its subfolders")
    add("--out", type=Path, required=True, metavar="FILE", help="JSONL; lines are appended")
    prompt = parser.add_mutually_exclusive_group(required=True).add_argument
    prompt("--prompt", help="the question")
    prompt("--prompt-file", type=Path, metavar="FILE", help="a text file with the question")
    add("--schema", type=Path, metavar="FILE", help="a JSON schema, which every answer follows")
    add("--concurrency", type=int, default=4, help="requests at once (default: %(default)s)")
    add("--max-tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--seed", type=int, default=0, help="of every request (default: %(default)s)")
    add("--policy", choices=POLICY_NAMES, help="of a hippo gateway (default: the gateway's)")
    add(
        "--by-path",
        action="store_true",
        help="send file:// URLs, for a server that may open the folder's files itself; else the "
        "files are sent",
    )
    add("--retry-errors", action="store_true", help="ask again about files with an error")
    add("--url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    add("--model", help="default: the first one that the server serves")


def run(arguments: argparse.Namespace) -> int:
    """Asks about every file that has no line yet; returns the exit code."""
    for name, least in (("concurrency", 1), ("max_tokens", 1), ("temperature", 0), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least {least}")
    if not arguments.folder.is_dir():
        raise InvalidRequestError(f"there is no folder {arguments.folder}")
    if not arguments.out.parent.is_dir():
        raise InvalidRequestError(f"--out: there is no folder {arguments.out.parent}")
    further: dict[str, Any] = {}
    if arguments.schema is not None:
        schema = {"name": arguments.schema.stem, "schema": _schema(arguments.schema)}
        further["response_format"] = {"type": "json_schema", "json_schema": schema}
    if arguments.policy is not None:
        further["speculative"] = {"policy": arguments.policy}
    server = Server(arguments.url, api_key=os.environ.get(KEY_VARIABLE) or None)
    given = arguments.prompt
    prompt = (_read(arguments.prompt_file) if given is None else given).strip()
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    return CaptionRun(
        folder=arguments.folder,
        out=arguments.out,
        prompt=prompt,
        seed=arguments.seed,
        server=server,
        form=RequestForm(
            model=arguments.model or server.models()[0],
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            optional=("stream_options", "seed"),
            further=further,
        ),
        num_clients=arguments.concurrency,
        is_by_path=arguments.by_path,
        retries_errors=arguments.retry_errors,
        console=Console(soft_wrap=True, highlight=False, markup=False),
        progress=Console(stderr=True),
    ).run()


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(_read(path))
    except ValueError as error:
        raise InvalidRequestError(f"--schema: {path} is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"--schema: {path} holds no JSON object")
    return schema


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequestError(f"{path} cannot be read: {reason}") from None
