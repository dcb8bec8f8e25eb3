"""The repository grows by decision only (CONTRIBUTING.md, "Size")."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Lower a limit when you delete; a feature that is worth its lines pays for them elsewhere.
LIMITS = {"serves": 35_016, "lab": 15_199, "tests": 39_200}
SLACK = 200  # lines that a limit may lie above the count

MOST_LINES = 350
MOST_FILES = 16
MOST_WORDS = 30_000  # of docs; bars and rules of tables are no words


def _files(*folders: str) -> list[Path]:
    """Returns the hand-written files of code below the folders."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if "v1" not in path.parts]


def _num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _parts() -> dict[str, list[Path]]:
    lab = _files("hippo/lab", "bench", "demo")
    serves = [path for path in _files("hippo", "gateway", "services") if path not in set(lab)]
    return {"serves": serves, "lab": lab, "tests": _files("tests")}


@pytest.mark.parametrize("part", LIMITS)
def test_each_part_stays_within_its_lines(part: str) -> None:
    num_lines = sum(map(_num_lines, _parts()[part]))
    assert num_lines <= LIMITS[part]
    assert LIMITS[part] - SLACK <= num_lines, f"lower the limit of {part!r} to {num_lines}"


def test_the_docs_are_short() -> None:
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    words = [word for page in pages for word in page.split() if any(map(str.isalnum, word))]
    assert len(words) <= MOST_WORDS


def test_each_file_fits_in_the_head() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {_num_lines(path)}"
        for paths in _parts().values()
        for path in paths
        if _num_lines(path) > MOST_LINES
    ]
    assert long == []


def test_each_folder_holds_few_files_of_code() -> None:
    files = [path for paths in _parts().values() for path in paths]
    folders = {path.parent for path in files}
    full = [
        str(folder.relative_to(ROOT))
        for folder in sorted(folders)
        if sum(path.parent == folder for path in files) > MOST_FILES
    ]
    assert full == []
