"""``hippo bench`` against the pair and any other server; ``bench.gpu`` without a GPU."""

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.answers.runs import STACK_LOG
from bench.gpu import __main__ as gpu
from hippo.cli.stack import BUNDLED_CLIPS
from tests.e2e.support import Running, hippo, wait_until
from tests.support.running.plain_server import PlainServer, serving

TEXT = ("--no-video", "--prompt", "Hello?")


bench = functools.partial(hippo, "bench")


def found(*arguments: str, **environment: str) -> dict[str, Any]:
    done = bench(*arguments, "--out", "-", **environment)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_gateway_is_measured_side_by_side(running: Running, clip: Path, tmp_path: Path) -> None:
    plot, out = tmp_path / "a.svg", tmp_path / "a.json"
    done = bench(
        "--url", running.url, "--video", str(clip), "--prompt", "What happens?",
        "--max-tokens", "16", "--policies", "optimistic,vpsd:3", "--rounds", "2",
        "--plot", str(plot), "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"written to {out}" in done.stdout and "end to end" in done.stdout
    assert "<svg" in plot.read_text()
    document = json.loads(out.read_text())
    assert document["is_hippo"] is True and document["model"] == "hippo"
    rows = {row["system"]: row for row in document["latency"]["summary"]}
    assert set(rows) == {"target-only", "optimistic", "vpsd γ=3"}
    assert (rows["target-only"]["num_answers"], rows["optimistic"]["num_answers"]) == (4, 2)
    assert all(row["num_equal"] == row["num_answers"] for row in rows.values())
    assert all(row["decode_speedup"]["mean"] > 0 for row in rows.values())
    assert rows["vpsd γ=3"]["mean_tokens_per_forward"] >= 1
    records = document["latency"]["records"]
    assert {record["figures"]["policy"] for record in records} == {"off", "optimistic", "vpsd"}


def test_a_gateway_under_load_gives_the_answers_it_gives_alone(
    running: Running, clip: Path
) -> None:
    document = found(
        "--url", running.url, "--video", str(clip), "--prompt", "What?", "--prompt", "Who?",
        "--max-tokens", "8", "--concurrency", "1,3", "--requests", "4",
        "--temperature", "0.8", "--seed", "11",
    )  # fmt: skip
    lines = document["load"]
    assert [(line["num_clients"], line["system"]) for line in lines] == [
        (1, "target-only"), (1, "adaptive"), (3, "target-only"), (3, "adaptive"),
    ]  # fmt: skip
    for line in lines:
        assert line["num_errors"] == 0
        assert line["num_equal"] == line["num_answers"] == 4
        assert line["tokens_per_s"] > 0
        assert line["ttft_ms"]["p50"] <= line["ttft_ms"]["p99"]
    wait_until(lambda: running.slots_used() == 0)  # the services learn of an end after the client


def test_more_clients_than_the_queue_takes_are_errors_beside_the_answers(
    running: Running, clip: Path
) -> None:
    (line,) = found(
        "--url", running.url, "--video", str(clip), "--max-tokens", "4", "--policies", "off",
        "--concurrency", "8", "--seconds", "3",
    )["load"]  # fmt: skip
    assert line["num_answers"] > 0 and line["num_errors"] > 0
    assert all("the server answered 429" in message for message in line["errors"])


def test_any_other_server_is_timed_alone(tmp_path: Path) -> None:
    plot = tmp_path / "a.png"
    with serving(PlainServer(models=("small", "big"), unknown=("cache_salt",))) as plain:
        done = bench("--url", plain.url, *TEXT, "--rounds", "3", "--plot", str(plot))
        document = found("--url", plain.url, *TEXT, "--model", "big")
    assert done.returncode == 0, done.stderr
    assert "small of 2 models" in done.stdout
    assert "time to first token, ms" in done.stdout and "speedup" not in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    form = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options", "seed"}
    assert all(form <= body.keys() <= form | {"cache_salt"} for body in plain.bodies)
    assert document["is_hippo"] is False and document["fields"] == ["stream_options", "seed"]
    (row,) = document["latency"]["summary"]
    assert (row["system"], row["tokens_per_answer"], row["counted_by"]) == ("big", 6, ["usage"])


def test_any_other_server_is_put_under_load() -> None:
    with serving(PlainServer(pause_s=0.002, failing=(6,), has_usage=False)) as plain:
        done = bench("--url", plain.url, *TEXT, "--concurrency", "1,4", "--requests", "8")
        (line,) = found("--url", plain.url, *TEXT, "--concurrency", "2", "--seconds", "0.3")["load"]
    assert done.returncode == 0, done.stderr
    assert "1 x the server answered 503: all slots are taken" in done.stdout
    assert "its pieces of text were counted" in done.stdout
    assert (line["system"], line["num_equal"]) == ("plain", None)
    assert line["seconds"] >= 0.3 and line["counted_by"] == ["pieces"]


def test_a_key_is_taken_from_the_environment_and_not_written_down(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    with serving(PlainServer(api_key="s3cret")) as plain:
        refused = bench("--url", plain.url, *TEXT, HIPPO_API_KEY="")
        wrong = bench("--url", plain.url, *TEXT, "--api-key", "wr0ng")
        done = bench("--url", plain.url, *TEXT, "--out", str(out), HIPPO_API_KEY="s3cret")
    assert refused.returncode == wrong.returncode == 1
    assert "401: Incorrect API key provided" in refused.stderr
    assert "give a key in HIPPO_API_KEY" in refused.stderr
    assert "another key" in wrong.stderr and "wr0ng" not in wrong.stderr
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in out.read_text() + done.stdout + done.stderr


def test_what_cannot_be_measured_is_said_plainly() -> None:
    with (
        serving(PlainServer()) as plain,
        serving(PlainServer(models=())) as empty,
        serving(PlainServer(is_cut_off=True)) as cut_off,
    ):
        cases = {
            "serves no model": (empty.url,),
            "it serves plain": (plain.url, "--model", "none"),
            "--policies is for a hippo gateway": (plain.url, "--policies", "off"),
            "the answer broke off": (cut_off.url,),
        }
        for message, arguments in cases.items():
            done = bench(*TEXT, "--url", *arguments)
            assert done.returncode == 1, message
            assert message in " ".join(done.stderr.split()), done.stderr
            assert "Traceback" not in done.stderr


def test_an_interrupt_ends_a_load_at_once() -> None:
    with (
        serving(PlainServer(pause_s=0.01)) as plain,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "hippo.cli", "bench", "--url", plain.url, *TEXT),
                *("--concurrency", "2", "--seconds", "600"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        wait_until(lambda: len(plain.bodies) > 5 or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    assert b"Traceback" not in output


def written_questions(folder: Path, **videos: str) -> Path:
    """Questions about the bundled clips with their answers, by file; or about ``videos``."""
    path = folder / "questions.jsonl"
    facts = json.loads((BUNDLED_CLIPS / "facts.json").read_text())[:3]
    lines = [
        {**fact, "id": fact["file"], "video": fact["file"], "category": str(fact["height"])}
        for fact in facts
    ]
    lines += [
        {"id": name, "video": url, "question": "What?", "options": ["One and two.", "Three."],
         "answer": "A"}
        for name, url in videos.items()
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_questions_of_a_file_have_equal_scores_and_go_on_after_a_stop(
    running: Running, tmp_path: Path
) -> None:
    answers, page, plot = (tmp_path / name for name in ("a.jsonl", "a.md", "a.svg"))
    arguments = (
        "--url", running.url, "--questions", str(written_questions(tmp_path)), "--videos",
        str(BUNDLED_CLIPS), "--answers", str(answers), "--policies", "adaptive,vpsd:3",
        "--max-tokens", "16",
    )  # fmt: skip
    first = found(*arguments, "--limit", "1")["questions"]
    assert {row["num_answers"] for row in first["summary"]} == {1}
    kept = answers.read_bytes()
    answers.write_bytes(kept + b'{"id": "handful.mp4", "sys')  # as a stop leaves it
    done = bench(*arguments, "--markdown", str(page), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert f"3 answers were in {answers} already" in done.stdout
    assert answers.read_bytes().startswith(kept)
    document = found(*arguments)["questions"]
    assert len(answers.read_text().splitlines()) == 1 + 9
    rows = document["summary"][-3:]
    assert [row["system"] for row in rows] == ["target-only", "adaptive", "vpsd γ=3"]
    assert all(row["num_equal"] == row["num_answers"] == row["num_scored"] == 3 for row in rows)
    assert len({row["num_right"] for row in rows}) == 1
    assert all(row["num_unlike"] == 0 for row in document["summary"])
    assert all(row["mean_tokens_per_forward"] >= 1 <= row["mean_run_length"] for row in rows[1:])
    assert all(record["is_equal"] and record["decode_speedup"] for record in document["records"])
    texts = {record["text"] for record in document["records"]}
    assert len(texts) == 3 and "" not in texts
    assert "| all questions | adaptive | 3 |" in page.read_text() and "<svg" in plot.read_text()


def test_questions_of_a_file_are_asked_of_any_server(tmp_path: Path) -> None:
    path = written_questions(tmp_path, url="https://example.com/a.mp4")
    arguments = ("--questions", str(path), "--videos", str(BUNDLED_CLIPS), "--answers")
    # Request 0 is the probe, 1 the warm-up with the first question, 2 the first question.
    with serving(PlainServer(failing=(1, 2), failing_status=400)) as plain:
        answers = str(tmp_path / "a.jsonl")
        document = found("--url", plain.url, *arguments, answers)["questions"]
        done = bench("--url", plain.url, *arguments, answers)
        other = bench("--url", plain.url, *arguments, answers, "--max-tokens", "7")
    assert document["failed"] == {"tray.mp4": "the server answered 400: all slots are taken"}
    (*_, row) = document["summary"]
    assert (row["system"], row["num_answers"]) == ("plain", 3)
    assert (row["num_right"], row["num_scored"]) == (1, 3)
    assert done.returncode == 0 and "3 answers were in" in done.stdout  # the first is asked again
    assert "all questions" in done.stdout and "25.0%" in done.stdout
    assert plain.bodies[0]["messages"][0]["content"] == [{"type": "text", "text": "Hello."}]
    assert other.returncode == 1 and "holds answers measured with max_tokens 256" in other.stderr


_SMALL = ["--small", "--device", "cpu"]


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    """Restores the number of torch's threads, which the command sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _sections(out: Path) -> dict[str, Any]:
    sections: dict[str, Any] = json.loads((out / "gpu.json").read_text())["sections"]
    return sections


def test_a_part_that_is_cut_off_says_so_and_what_was_measured_stays(tmp_path: Path) -> None:
    options = [*_SMALL, "--part", "steps", "--out", str(tmp_path / "out"), "--work", str(tmp_path)]
    assert gpu.main(options) == 0
    measured = _sections(tmp_path / "out")["steps"]
    (steps,) = measured["tables"]
    assert {row["model"] for row in steps["figures"]} == {"Qwen2.5-VL-7B", "Qwen2.5-VL-3B"}
    assert all(row["floor_ms"] > 0 for row in steps["figures"] if row["rows"])
    report = tmp_path / "out" / "gpu.json"
    told = json.loads(report.read_text())
    told["sections"] = {"serve": measured}  # as if another part had been measured
    report.write_text(json.dumps(told))
    assert gpu.main([*options, "--seconds", "0"]) == 1
    cut = _sections(tmp_path / "out")
    assert "out of time before" in cut["steps"]["notes"][-1]
    assert cut["serve"] == measured


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_small_form_measures_every_part(tmp_path: Path) -> None:
    parts = ("steps", "serve")
    chosen = [flag for part in parts for flag in ("--part", part)]
    out = tmp_path / "out"
    assert gpu.main([*_SMALL, *chosen, "--out", str(out), "--work", str(tmp_path)]) == 0, (
        STACK_LOG.read_text()[-3000:]
    )
    sections = _sections(out)
    assert set(sections) == set(parts)
    assert all("complete after" in section["notes"][-1] for section in sections.values())
    answers, memory = sections["serve"]["tables"]
    assert all(row["is_equal"] for row in answers["figures"])
    assert {row["share"] for row in answers["figures"]} == {0.85, 0.93}
    assert {row["where"] for row in memory["figures"]} >= {"target", "draft", "gateway"}
    assert not list(tmp_path.glob("hippo-gpu-*"))
    assert "| target |" in (out / "gpu.md").read_text()


def test_a_gpu_that_is_not_here_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device is here" in capsys.readouterr().out
