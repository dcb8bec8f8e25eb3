"""Services of this tree and of the last release understand each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from hippo.types import PROTOCOL_VERSION
from tests.support.running.protocol import facts, released, spoken


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [f"{name}: {was}" for name, was in before.items() if after.get(name) != was]


def test_the_protocol_is_compatible_with_the_last_release() -> None:
    last = released()
    assert last["protocol_version"] <= PROTOCOL_VERSION
    if last["protocol_version"] == PROTOCOL_VERSION:
        found = _changed(last["facts"], facts(spoken()))
        assert found == [], "additions only, or a new PROTOCOL_VERSION"


def _commit(file: FileDescriptorProto, name: str) -> FieldDescriptorProto:
    (message,) = (each for each in file.message_type if each.name == "Commit")
    return next(field for field in message.field if field.name == name)


def _drop_value(file: FileDescriptorProto) -> None:
    del file.enum_type[0].value[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: setattr(_commit(file, "epoch"), "name", "run"), "Commit = 1"),
        (lambda file: setattr(_commit(file, "epoch"), "number", 9), "Commit = 1"),
        (lambda file: setattr(_commit(file, "epoch"), "type", 4), "Commit = 1"),
        (lambda file: setattr(_commit(file, "token_ids"), "label", 1), "Commit = 3"),
        (_drop_value, "MediaKind = 2"),
    ],
)
def test_a_breaking_change_is_found(
    change: Callable[[FileDescriptorProto], None], said: str
) -> None:
    files = spoken()
    change(files[0])

    (problem,) = _changed(facts(spoken()), facts(files))

    assert problem.startswith(said)
