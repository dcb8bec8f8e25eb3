"""Which files requests may name by path."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from hippo.base.local_files import LocalFiles
from hippo.errors import ForbiddenError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "media").mkdir()
    (tmp_path / "media/clip.mp4").write_bytes(b"clip")
    (tmp_path / "secret").write_bytes(b"secret")
    return tmp_path / "media"


def _check_forbidden(folder: Path, path: str) -> None:
    with pytest.raises(ForbiddenError):
        with LocalFiles([folder]).open_file(f"{folder}/{path}"):
            pass


@pytest.mark.parametrize(
    "path", ["{}/../secret", "{}/../none", "/proc/self/root", "/etc/passwd", "relative", "{}x/a"]
)
def test_the_file_system_is_not_asked_about_paths_outside(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles([folder])
    with monkeypatch.context() as patch:
        for name in ("lstat", "stat", "readlink", "open"):
            patch.setattr(os, name, Mock(side_effect=AssertionError("the file system is asked")))
        with pytest.raises(ForbiddenError, match="not under an allowed directory"):
            with files.open_file(path.format(folder)):
                pass


def test_a_link_that_leads_outside_is_refused_as_if_it_were_outside(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "dead").symlink_to(folder.parent / "none")
    for name in ("link", "dead"):
        _check_forbidden(folder, name)


def test_a_folder_that_becomes_a_link_while_a_file_is_opened_leads_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/secret").write_bytes(b"harmless")
    real_open = os.open

    def swapped(path: Path, flags: int) -> int:
        (folder / "sub").rename(folder / "old")
        (folder / "sub").symlink_to(folder.parent)
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", swapped)
    _check_forbidden(folder, "sub/secret")


def test_a_directory_may_be_named_by_a_link(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    with LocalFiles([folder.parent / "link"]).open_file(f"{folder.parent}/link/clip.mp4") as file:
        assert file.num_bytes == 4
        assert file.path == folder / "clip.mp4"
