"""What the options of ``hippo bench`` come to, and what stops the questions of a file; ``hippo
simulate`` as a user calls it."""

import argparse
import json
from pathlib import Path

import pytest

from hippo.cli import main
from hippo.client.latency import TARGET_ONLY
from hippo.errors import HippoError, InvalidRequestError
from hippo.lab.benchmark.answer_log import AnswerLog
from hippo.lab.commands.bench import add_options, command_line, plan_of
from hippo.lab.commands.bench_run import Plan
from tests.support.running.plain_server import PlainServer, serving

TEXT = ("--no-video", "--prompt", "Hello?")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def plan(*arguments: str) -> Plan:
    return plan_of(parsed(*arguments))


def test_every_prompt_is_asked_of_every_video_with_a_seed_of_its_own(tmp_path: Path) -> None:
    video = tmp_path / "a.mp4"
    video.write_bytes(b"frames")
    found = plan(
        "--video", str(video), "https://example.com/b.mp4", "--prompt", "What?", "--prompt", "Who?",
        "--rounds", "2", "--seed", "5",
    )  # fmt: skip
    assert [question.name for question in found.questions] == ["a.mp4"] * 2 + ["b.mp4"] * 2
    assert [question.seed for question in found.asked] == [5, 6, 7, 8, 9, 10, 11, 12]
    content = found.questions[0].messages[0]["content"]
    assert [part["type"] for part in content] == ["video_url", "text"]


def test_the_bundled_clips_have_questions_of_their_own() -> None:
    found = plan()
    assert len(found.questions) >= 3
    assert all(question.name.endswith(".mp4") for question in found.questions)
    (same,) = {json.dumps(each.messages[0]["content"][1]) for each in plan("--prompt", "A?").asked}
    assert "A?" in same


def test_text_alone_is_asked_without_a_video() -> None:
    assert plan(*TEXT).questions[0].messages[0]["content"] == [{"type": "text", "text": "Hello?"}]


def test_policies_have_block_lengths() -> None:
    systems = plan("--policies", "vpsd:7,off,adaptive,serial:auto", *TEXT).policies
    assert systems is not None
    assert systems[3].name == "serial γ=auto"
    assert [system.speculative for system in systems] == [
        {"policy": "vpsd", "gamma": 7},
        {"policy": "off"},
        {"policy": "adaptive"},
        {"policy": "serial", "gamma": "auto"},
    ]
    assert systems[1].name == TARGET_ONLY


def test_a_load_lasts_some_seconds_or_requests() -> None:
    assert (plan("--concurrency", "1,2", *TEXT).seconds or 0) > 0
    found = plan("--concurrency", "4", "--requests", "9", *TEXT)
    assert (found.concurrency, found.requests, found.seconds) == ((4,), 9, None)


def test_a_key_is_not_written_down_with_the_command() -> None:
    given = parsed(*TEXT, "--api-key", "secret", "--max-tokens", "8")
    assert plan_of(given).server.api_key == "secret"
    assert command_line(given) == "hippo bench --no-video --prompt 'Hello?' --max-tokens 8"


def test_an_allowed_cache_is_one_without_salts() -> None:
    assert "cache_salt" in plan(*TEXT).form.optional
    assert "cache_salt" not in plan(*TEXT, "--allow-cache").form.optional


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost"], "no server's address"),
        (["--no-video"], "--no-video needs a --prompt"),
        (["--video", "none.mp4"], "none.mp4 cannot be read"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--concurrency", "1,x"], "expected numbers such as 1,2,4,8"),
        (["--concurrency", "0"], "expected numbers such as 1,2,4,8"),
        (["--concurrency", "1", "--seconds", "0"], "--seconds must be above 0"),
        (["--concurrency", "1", "--requests", "0"], "--requests must be at least 1"),
        (["--concurrency", "1", "--rounds", "2"], "--rounds has no effect with --concurrency"),
        (["--seconds", "5"], "--seconds needs --concurrency"),
        (["--requests", "5"], "--requests needs --concurrency"),
        (["--policies", "fast"], "unknown policy 'fast'"),
        (["--policies", "vpsd:best"], "a draft length is a number or auto, as in vpsd:7"),
        (["--policies", "off,off"], "a policy stands there twice"),
        (["--plot", "a.pdf"], r"ends in \.svg or \.png"),
        (["--plot", "none/a.svg"], "--plot: there is no folder none"),
        (["--questions", "q.jsonl"], "--questions needs --answers FILE"),
        (["--questions", "q.jsonl", "--answers", "a", "--prompt", "A?"], "--prompt has no effect"),
        (
            ["--questions", "q.jsonl", "--answers", "a", "--limit", "0"],
            "--limit must be at least 1",
        ),
        (["--questions", "q.jsonl", "--answers", "a"], "q.jsonl cannot be read"),
        (["--answers", "a.jsonl"], "--answers needs --questions"),
        (["--markdown", "none/a.md"], "--markdown needs --questions"),
        (["--out", "none/a.json"], "--out: there is no folder none"),
    ],
)
def test_options_without_sense_are_refused_before_anything_is_asked(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(HippoError, match=message):
        plan(*arguments)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Options for a file with one question."""
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"id": "1", "video": "https://e.com/a.mp4", "question": "What?"}))
    return ["bench", "--questions", str(path), "--answers", str(tmp_path / "a.jsonl"), "--url"]


def test_a_full_disk_is_no_fault_of_the_question(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(*_: object) -> None:
        raise InvalidRequestError("a.jsonl cannot be written: No space left on device")

    monkeypatch.setattr(AnswerLog, "add", add)
    with serving(PlainServer()) as plain:
        assert main([*given, plain.url]) == 1
    assert "error: a.jsonl cannot be written" in capsys.readouterr().err


def test_refused_questions_are_named_and_no_answer_is_an_error(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(PlainServer(failing=(1, 2), failing_status=400)) as plain:
        assert main([*given, plain.url]) == 1
    words = " ".join(capsys.readouterr().err.split())
    assert "no question was answered: the server answered 400" in words


def test_an_overloaded_server_stops_the_run(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(PlainServer(failing=(2,), failing_status=429)) as plain:
        assert main([*given, plain.url]) == 1
        assert "the server answered 429" in capsys.readouterr().err
        assert main([*given, plain.url]) == 0


QUICK = ["simulate", "--num-traces", "2", "--tokens", "60", "--policies", "serial:4,adaptive"]


def test_a_pair_is_predicted_and_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = tmp_path / "out.json"
    assert main([*QUICK, "--pair", "qwen-7b-72b-nf4", "--json", str(goal)]) == 0
    shown = capsys.readouterr().out
    assert "Qwen2.5-VL 7B / 72B" in shown and "40 layers on a helper" in shown
    assert "without any overhead" in " ".join(shown.split())
    found = json.loads(goal.read_text())
    assert [row["policy"] for row in found["policies"]] == ["serial γ=4", "adaptive"]
    serial, adaptive = (row["efficiency"] for row in found["policies"])
    assert all(row["helped_speedup"] > row["end_to_end_speedup"] for row in found["policies"])
    assert 0 < serial <= 1.02
    assert 0 < adaptive <= 1.1  # with other delays it chooses other paces, at times better ones


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--pair", "qwen-1b-2b"], "choose one of qwen-7b-72b"),
        (["--pair", "qwen-7b-72b", "--target-gpus", "1"], "take 2 or more"),
        (["--pair", "qwen-7b-72b", "--target-ms", "3"], "give one machine"),
        (["--target-ms", "3"], "go together"),
        (["--target-ms", "3", "--draft-ms", "1", "--gpu", "h100"], "is about a --pair"),
        (["--acceptance", "1.5"], "0 to 1"),
        (["--run-length", "0.5"], "1 or more"),
        (["--traces", "nowhere.jsonl"], "drawn answers"),
        (["--delay-ms", "-1"], "--delay-ms must be 0 to"),
        (["--target-gpus", "0"], "--target-gpus must be 1 to"),
        (["--target-ms", "20", "--draft-ms", "2", "--row-ms", "-1"], "--row-ms must be 0 to"),
    ],
)
def test_bad_input_ends_with_what_would_be_right(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, *arguments]) == 1
    assert part in " ".join(capsys.readouterr().err.split())
