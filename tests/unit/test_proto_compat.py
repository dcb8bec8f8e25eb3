"""Services of this tree and of the last release understand each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from protos import compat


def test_the_protocol_is_compatible_with_the_last_release() -> None:
    found = compat.problems(compat.read_released(), compat.current())
    assert found == [], "additions only, or a new PROTOCOL_VERSION"


def test_a_release_is_read_as_it_was_written(tmp_path: Path) -> None:
    now = compat.current()
    compat.write_released(now, tmp_path / "released.json")
    assert compat.read_released(tmp_path / "released.json") == now


def _message(files: FileDescriptorSet, name: str) -> DescriptorProto:
    return next(m for file in files.file for m in file.message_type if m.name == name)


def _field(files: FileDescriptorSet, message: str, name: str) -> FieldDescriptorProto:
    return next(field for field in _message(files, message).field if field.name == name)


def _drop_message(files: FileDescriptorSet) -> None:
    file = next(f for f in files.file if any(m.name == "Commit" for m in f.message_type))
    file.message_type.remove(_message(files, "Commit"))


def _drop_field(files: FileDescriptorSet) -> None:
    _message(files, "Commit").field.remove(_field(files, "Commit", "epoch"))


def _rename_field(files: FileDescriptorSet) -> None:
    _field(files, "Commit", "epoch").name = "run"


def _retype_field(files: FileDescriptorSet) -> None:
    _field(files, "Commit", "epoch").type = FieldDescriptorProto.TYPE_UINT64


def _make_single(files: FileDescriptorSet) -> None:
    _field(files, "Commit", "token_ids").label = FieldDescriptorProto.LABEL_OPTIONAL


def _leave_oneof(files: FileDescriptorSet) -> None:
    _field(files, "DraftRequest", "commit").ClearField("oneof_index")


def _drop_value(files: FileDescriptorSet) -> None:
    enum = next(e for file in files.file for e in file.enum_type if e.name == "PruningStrategy")
    del enum.value[-1]


def _stream_less(files: FileDescriptorSet) -> None:
    service = next(s for file in files.file for s in file.service if s.name == "DraftService")
    next(m for m in service.method if m.name == "Draft").server_streaming = False


def _drop_method(files: FileDescriptorSet) -> None:
    service = next(s for file in files.file for s in file.service if s.name == "DraftService")
    service.method.remove(next(m for m in service.method if m.name == "GetModel"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop_message, "message hippo.v1.Commit is gone"),
        (_drop_field, "field hippo.v1.Commit.epoch = 1 is gone"),
        (_rename_field, "hippo.v1.Commit.epoch = 1 changed: name 'epoch' to 'run'"),
        (_retype_field, "changed: type 'TYPE_UINT32' to 'TYPE_UINT64'"),
        (_make_single, "changed: label 'LABEL_REPEATED' to 'LABEL_OPTIONAL'"),
        (_leave_oneof, "changed: oneof 'message' to ''"),
        (_drop_value, "value hippo.v1.PruningStrategy."),
        (_stream_less, "method hippo.v1.DraftService.Draft takes or gives something else"),
        (_drop_method, "method hippo.v1.DraftService.GetModel is gone"),
    ],
)
def test_a_breaking_change_is_named(change: Callable[[FileDescriptorSet], None], said: str) -> None:
    before, after = compat.current(), compat.current()
    change(after.files)
    (problem, *more) = compat.problems(before, after)
    assert said in problem
    assert more == []


def test_an_addition_is_none() -> None:
    before, after = compat.current(), compat.current()
    _drop_field(before.files)
    _drop_message(before.files)
    _drop_method(before.files)
    assert compat.problems(before, after) == []


def test_a_new_protocol_version_may_break_and_an_older_one_may_not_come_back() -> None:
    now = compat.current()
    changed = compat.current()
    _drop_field(changed.files)
    newer = compat.Protocol("next", now.version + 1, changed.files)
    assert compat.problems(now, newer) == []
    (problem,) = compat.problems(newer, now)
    assert "PROTOCOL_VERSION" in problem
