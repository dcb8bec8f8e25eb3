"""A Hugging Face hub on this machine with good repositories and several bad ones."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

COMMIT = "0" * 39 + "1"
REFUSALS = {
    "org/gated": (403, "GatedRepo"),
    "org/missing": (404, "RepoNotFound"),
    "org/private": (403, ""),
    "org/broken": (418, ""),
}


@contextmanager
def serving_hub(folders: Mapping[str, Path]) -> Iterator[str]:
    """Gives the address (HF_ENDPOINT) of a hub with each folder as the repository of its name, and
    with REFUSALS."""
    repositories = {
        name: {path.name: path.read_bytes() for path in folder.iterdir()}
        for name, folder in folders.items()
    }
    handler = partial(_Handler, repositories)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def run_with_hub(
    hub: str, cache: Path, script: str, *names: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script of Python about the names, to its good end."""
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        env={"HF_ENDPOINT": hub, "HF_HOME": str(cache), "PATH": "", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]], *connection: Any) -> None:
        self._repositories = repositories
        super().__init__(*connection)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        for name, (status, code) in REFUSALS.items():
            if name in path:
                self._answer(status, {}, **({"X-Error-Code": code} if code else {}))
                return
        name = next((name for name in self._repositories if f"/{name}" in path), "")
        files = self._repositories.get(name, {})
        if path.startswith(f"/api/models/{name}/tree/"):
            tree = [
                {"type": "file", "path": file, "size": len(body), "oid": _digest(body)}
                for file, body in files.items()
            ]
            self._answer(200, tree)
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": file} for file in files]
            self._answer(200, {"id": name, "sha": COMMIT, "siblings": siblings})
        elif (body := files.get(path.rpartition("/")[2])) is not None:
            self._answer(200, body, **{"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(body)}"'})
        else:
            self._answer(404, {}, **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what went wrong."""


def _digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
