"""``hippo inspect`` on a bundled clip with the bundled target."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from hippo.cli import main
from hippo.cli.stack import BUNDLED_PAIR
from hippo.lab.commands import picture

CLIPS = BUNDLED_PAIR.parent / "clips"


def test_a_picture_has_a_row_a_strategy_and_a_row_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []
    for extra in ([], ["--scores", "--question-first"]):
        out = tmp_path / f"kept{len(extra)}.png"
        arguments = ["inspect", str(CLIPS / "tray.mp4"), "--out", str(out), "--ratio", "0.75"]
        assert main([*arguments, "--strategies", "holistic,uv,blind", *extra]) == 0
        assert str(out) in capsys.readouterr().out.replace("\n", "")
        with Image.open(out) as drawn:
            assert drawn.mode == "RGB"
            sizes.append(drawn.size)
            colours = drawn.getcolors(maxcolors=1 << 24)
            assert colours is not None and len(colours) > 1000
    (width, height), (same_width, taller) = sizes
    assert same_width == width
    assert (taller - height) / (height - 100) == pytest.approx(3 / 4, abs=0.1)


def test_the_size_in_which_a_model_sees_frames_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(
        picture, "_label", lambda pen, top, title, notes: written.extend((title, *notes))
    )
    row = picture.PictureRow("kept", (), torch.ones(1, 2, 2, dtype=torch.bool))
    frames = torch.zeros(1, 384, 380, 3, dtype=torch.uint8)
    picture.draw(title="", subtitle="", frames=frames, seconds=[0.0], rows=[row])
    assert written[:3] == ["the clip", "2 x 2 tokens a frame,", "seen at 380 x 384 pixels"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.mp4"], "no-such.mp4 cannot be read"),
        (["{clip}", "--strategies", "best"], "'best' is none of none, uniform"),
        (["{clip}", "--strategies", ","], "at least one"),
        (["{clip}", "--ratio", "1.5"], "must be 0 to 0.99"),
        (["{clip}", "--columns", "0"], "at least 1"),
        (["{clip}", "--out", "kept.jpg"], "must end in .png"),
        (["{clip}", "--out", "/no/such/folder/kept.png"], "there is no folder"),
        (["{clip}", "--score-layers", "21"], "the model has 20"),
        (["{clip}", "--strategies", "uv", "--score-layers", "20"], "uv scores by at most 19"),
        (["{clip}", "--model", "/no/such/model"], "no"),
        (["{config}"], "not a video"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    places = {"clip": str(CLIPS / "tray.mp4"), "config": str(BUNDLED_PAIR / "target/config.json")}
    given = [argument.format(**places) for argument in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "kept.png")]
    assert main(["inspect", *given]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error.replace("\n", " ")
