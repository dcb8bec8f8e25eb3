"""The closed loop against a real HTTP server on a port of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.clips import Clip
from bench.load_client import read_answer, request_body, run_closed_loop, salted

DONE = b"data: [DONE]\n\n"


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {}, **choice}]}).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(delta={"content": piece})


def last(*token_ids: int) -> bytes:
    chunk = {"choices": [{"delta": {}, "token_ids": token_ids}], "hippo": {"num_forwards": 1}}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class Handler(BaseHTTPRequestHandler):
    """Answers with the number that the request's body is."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    num_open = 0
    most_open = 0

    def do_POST(self) -> None:
        number = int(self.rfile.read(int(self.headers["content-length"])))
        cls = type(self)
        with self.lock:
            cls.num_open += 1
            cls.most_open = max(cls.most_open, cls.num_open)
        if number < 0:
            self._send(503, b"all slots are taken")
        else:
            self._send(200, text("a") + text("b") + last(number, number) + DONE)
        with self.lock:
            cls.num_open -= 1

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in (body[:20], body[20:]):
            if part:
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_all_questions_are_asked_in_turn_until_enough_answers_have_ended() -> None:
    started, answered = [], []
    with serving() as one, serving() as other:
        run = run_closed_loop(
            [one, other],
            [b"0", b"1", b"2"],
            num_clients=2,
            num_answers=7,
            on_start=lambda: started.append(1),
            on_answer=lambda: answered.append(1),
        )
    assert len(run.answers) == len(answered) == 9
    assert len(run.counted) == 7
    assert len(started) == 1
    assert {answer.clip_index for answer in run.answers} == {0, 1, 2}
    assert all(answer.token_ids == (answer.clip_index,) * 2 for answer in run.answers)
    assert all(answer.ended_s >= answer.asked_s for answer in run.answers)
    assert Handler.most_open <= 2


def test_the_same_question_is_never_sent_with_the_same_salt(tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(b"not looked at")
    body = request_body(
        Clip(file, "What happens?"), speculative={}, max_tokens=8, temperature=0.0, seed=0
    )
    first, second = (json.loads(salted(body)) for _ in range(2))
    assert first.pop("cache_salt") != second.pop("cache_salt")
    assert first == second


def test_a_servers_refusal_ends_the_run_with_its_words() -> None:
    with serving() as url, pytest.raises(RuntimeError, match="503: all slots are taken"):
        run_closed_loop([url], [b"-1"], num_clients=3, num_answers=3)


def test_a_piece_has_the_time_of_the_bytes_that_complete_it() -> None:
    first, second = text("Hello"), text(" there") + last(1, 2, 3) + DONE
    parts = [(1.0, first[:9]), (2.0, first[9:]), (3.0, second)]
    answer = read_answer(parts, clip_index=4, asked_s=0.5)
    assert answer.piece_s == (2.0, 3.0)
    assert answer.token_ids == (1, 2, 3)
    assert (answer.clip_index, answer.figures) == (4, {"num_forwards": 1})


def test_an_error_in_the_stream_is_raised() -> None:
    broken = text("a") + b'data: {"error": {"message": "the draft is gone"}}\n\n'
    with pytest.raises(RuntimeError, match="the draft is gone"):
        read_answer([(1.0, broken)], clip_index=0, asked_s=0.0)


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(RuntimeError, match="without an answer"):
        read_answer([(1.0, text("a"))], clip_index=0, asked_s=0.0)
