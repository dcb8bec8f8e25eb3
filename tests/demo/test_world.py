"""Scenes and texts follow from their seeds, can be read back, and become tokens and questions."""

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from demo.figures import Score, content_pieces
from demo.training.batches import Encoder
from demo.world import clips, texts
from demo.world import scenes as world
from demo.world.questions import write_questions
from demo.world.scenes import Scene
from demo.world.texts import Exchange
from hippo.lab.benchmark.video_questions import read_questions


def scene_of(seed: int, side: int = 140, least: int = 3) -> Scene:
    """A scene of that seed."""
    rng = np.random.default_rng(seed)
    return world.sample_scene(rng, height=side, width=side, duration_s=4.0, min_objects=least)


@pytest.mark.parametrize("seed", range(20))
def test_the_long_description_reads_back_as_exactly_the_facts(seed: int) -> None:
    scene = scene_of(seed, least=1)
    assert set(texts.parse(texts.detailed(scene))) == set(texts.facts(scene))


def test_the_shorter_styles_say_true_things_about_every_object() -> None:
    for seed in range(20):
        scene = scene_of(seed)
        facts = set(texts.facts(scene))
        for text in (texts.report(scene), texts.listing(scene)):
            said = texts.parse(text)
            assert set(said) <= facts
            assert {item.cell for item in scene.objects} == {statement.cell for statement in said}


def test_questions_are_answered_from_the_scene_alone() -> None:
    scene = scene_of(11, least=5)
    asked = texts.short_questions(scene, np.random.default_rng(0), 7)
    assert asked == texts.short_questions(scene, np.random.default_rng(0), 7)
    counts = [exchange.answer for exchange in asked if exchange.kind == "count"]
    assert counts == [f"There are {texts.NUMBERS[len(scene.objects)]} objects."]


def test_the_score_of_a_true_description_is_full_and_of_a_foreign_one_is_not() -> None:
    own, foreign = Score(), Score()
    for seed in range(30):
        facts = texts.facts(scene_of(seed))
        own.add_clip(texts.parse(texts.detailed(scene_of(seed))), facts)
        foreign.add_clip(texts.parse(texts.detailed(scene_of(seed + 100))), facts)
    assert all(tally.percent == 100.0 for tally in own.strict.values())
    assert own.recall.percent == 100.0
    assert foreign.strict["colour"].percent < 40.0


def description() -> str:
    """A long description."""
    rng = np.random.default_rng(5)
    scene = world.sample_scene(rng, height=168, width=168, duration_s=4.0, min_objects=5)
    return texts.detailed(scene)


def test_text_comes_back_unchanged(trained: PreTrainedTokenizerBase) -> None:
    for text in (description(), "Wörter, 漢字 und 12,5 %\n\n  two  spaces", "<|im_start|>user\n"):
        assert trained.decode(trained(text).input_ids) == text


def test_a_conversation_is_encoded_as_by_the_chat_template(
    trained: PreTrainedTokenizerBase, encoder: Encoder
) -> None:
    exchanges = [Exchange("", "List the objects.", "Top left."), Exchange("", "Hi", "Hello!")]
    for is_video_first in (True, False):
        parts = [{"type": "video"}, {"type": "text", "text": exchanges[0].question}]
        messages = [
            {"role": "system", "content": "Be precise."},
            {"role": "user", "content": parts if is_video_first else parts[::-1]},
            {"role": "assistant", "content": exchanges[0].answer},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello!"},
        ]
        text = str(trained.apply_chat_template(messages, tokenize=False))
        ids, said = encoder.conversation(
            exchanges, grid=(1, 1, 1), is_video_first=is_video_first, system="Be precise."
        )
        assert trained.decode(ids) == text
        assert trained(text).input_ids == ids
        spoken = [token for token, is_said in zip(ids, said, strict=True) if is_said]
        assert trained.decode(spoken) == "Top left.<|im_end|>Hello!<|im_end|>"


def test_content_tokens_spell_the_content_words(trained: PreTrainedTokenizerBase) -> None:
    text = description()
    ids = trained(text).input_ids
    pieces = [str(trained.decode([token])) for token in ids]
    kept = "".join(itertools.compress(pieces, content_pieces(pieces)))
    words = [text[start:end] for start, end in texts.content_spans(text)]
    assert kept.split() == words


TASK = Path(__file__).resolve().parents[2] / "examples" / "lmms_eval"


def test_each_clip_has_a_description_and_short_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_questions(tmp_path, num_clips=2)
    questions = read_questions(path)
    assert len({each.id for each in questions}) == 6
    assert {Path(each.video).name for each in questions} == {"mixed-000.mp4", "mixed-001.mp4"}
    described = questions[0]
    assert described.category == "detailed"
    assert described.answer == texts.detailed(clips.held_out("mixed", 0).scene)
    assert described.is_right(described.answer) and not described.is_right("Nothing.")

    spec = importlib.util.spec_from_file_location("lmms_task", TASK / "utils.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(task := importlib.util.module_from_spec(spec))
    monkeypatch.chdir(tmp_path)
    line = json.loads(path.read_text().splitlines()[0])
    assert task.doc_to_visual(line) == [described.video]
    assert task.process_results(line, [f" {line['answer']}\n"]) == {"right": 1.0}
    assert task.process_results(line, ["Nothing."]) == {"right": 0.0}
    text = (TASK / "clips.yaml").read_text()
    assert f"data_files: {path.name}" in text
    assert all(f"utils.{name}" in text for name in ("doc_to_visual", "process_results"))
