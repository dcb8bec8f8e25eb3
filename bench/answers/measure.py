"""Runs every system on every clip, interleaved; gives one record for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.answers.client import user_turn, video_url
from bench.base.clips import ClipFile
from hippo.client import latency
from hippo.client.latency import Record, System
from hippo.client.requests import Question, RequestForm, probe
from hippo.client.server import Server

__all__ = ["Record", "form_for", "measure", "questions_about"]


def questions_about(clips: Sequence[ClipFile]) -> list[Question]:
    """Returns each clip's question, with the index as its seed."""
    return [
        Question(
            clip.path.name,
            [user_turn(video_url(clip.path), clip.question, is_video_first=clip.is_video_first)],
            seed=number,
        )
        for number, clip in enumerate(clips)
    ]


def form_for(server: Server, question: Question, form: RequestForm) -> RequestForm:
    """Returns the form that the gateway takes; see ``requests.probe``."""
    connection = server.connect()
    try:
        return probe(connection, question, form)
    finally:
        connection.close()


def measure(
    base_url: str,
    clips: Sequence[ClipFile],
    systems: Sequence[System],
    *,
    temperature: float = 0.0,
    num_repeats: int = 1,
    has_timeline: bool = False,
) -> Iterator[Record]:
    """Yields records clip by clip, as ``latency.measure`` does.

    ``has_timeline`` keeps every verdict and block in an answer's figures.
    """
    server, questions = Server(base_url), questions_about(clips)
    form = RequestForm(
        model="hippo",
        temperature=temperature,
        further={"return_timeline": has_timeline},
    )
    form = form_for(server, questions[0], form)
    yield from latency.measure(server, form, questions, systems, num_repeats=num_repeats)
