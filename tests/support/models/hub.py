"""A Hugging Face hub on this machine with good repositories and several bad ones."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

COMMIT = "0" * 39 + "1"
REFUSALS = {
    "org/gated": (403, "GatedRepo"),
    "org/missing": (404, "RepoNotFound"),
    "org/private": (403, ""),
    "org/broken": (418, ""),
}


class HubServer(http.server.ThreadingHTTPServer):
    """Serves each folder as the repository of its name, and REFUSALS."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {
            name: {path.name: path.read_bytes() for path in folder.iterdir()}
            for name, folder in folders.items()
        }

    @property
    def url(self) -> str:
        """Its HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving_hub(folders: Mapping[str, Path]) -> Iterator[str]:
    """Gives the address of a hub with these repositories."""
    with HubServer(folders) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        for name, (status, code) in REFUSALS.items():
            if name in path:
                self._answer(status, b"{}", {"X-Error-Code": code} if code else {})
                return
        name = next((name for name in self.server.repositories if f"/{name}" in path), "")
        files = self.server.repositories.get(name, {})
        if path.startswith(f"/api/models/{name}/tree/"):
            self._answer(200, json.dumps(_tree(files)).encode(), {})
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": file} for file in files]
            info = {"id": name, "sha": COMMIT, "siblings": siblings}
            self._answer(200, json.dumps(info).encode(), {})
        else:
            body = files.get(path.rpartition("/")[2])
            if body is None:
                self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(body)}"'}
            self._answer(200, body, headers)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what went wrong."""


def _tree(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}
        for name, body in files.items()
    ]


def _digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
