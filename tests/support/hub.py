"""A Hugging Face hub on this machine with one good repository and several bad ones."""

from __future__ import annotations

import hashlib
import http.server
import json
from pathlib import Path

COMMIT = "0" * 39 + "1"
REFUSALS = {
    "org/gated": (403, "GatedRepo"),
    "org/missing": (404, "RepoNotFound"),
    "org/private": (403, ""),
    "org/broken": (418, ""),
}


class HubServer(http.server.ThreadingHTTPServer):
    """Serves ``folder`` as the repository org/model, and REFUSALS."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}

    @property
    def url(self) -> str:
        """Its HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        for name, (status, code) in REFUSALS.items():
            if name in path:
                self._answer(status, b"{}", {"X-Error-Code": code} if code else {})
                return
        if path.startswith("/api/models/org/model/tree/"):
            self._answer(200, json.dumps(self._tree()).encode(), {})
        elif path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name} for name in self.server.files]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
            self._answer(200, json.dumps(info).encode(), {})
        else:
            body = self.server.files.get(path.rpartition("/")[2])
            if body is None:
                self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(body)}"'}
            self._answer(200, body, headers)

    do_HEAD = do_GET

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}
            for name, body in self.server.files.items()
        ]

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


def _digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
