"""Compares the protocol with that of the last release: ``python -m protos.compat``.

Draft, target and gateway are upgraded one after the other, so a change must be one that both
sides of an old and a new release understand: additions are, anything else is a breaking change
and needs a new PROTOCOL_VERSION (hippo/types.py), which refuses a mixed pair by name.

``python -m protos.compat --release VERSION`` makes today's protocol that of the last release.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from hippo.types import PROTOCOL_VERSION
from hippo.v1 import common_pb2, draft_pb2, target_pb2

RELEASED = Path(__file__).with_name("released.json")


@dataclass(frozen=True, slots=True)
class Protocol:
    """The protocol of one release."""

    release: str
    version: int
    files: FileDescriptorSet


def current() -> Protocol:
    """What this tree speaks, as its stubs say."""
    files = FileDescriptorSet()
    for module in (common_pb2, draft_pb2, target_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return Protocol("this tree", PROTOCOL_VERSION, files)


def read_released(path: Path = RELEASED) -> Protocol:
    """What the last release speaks."""
    content = json.loads(path.read_text(encoding="utf-8"))
    files = json_format.ParseDict({"file": content["files"]}, FileDescriptorSet())
    return Protocol(content["release"], content["protocol_version"], files)


def write_released(protocol: Protocol, path: Path = RELEASED) -> None:
    """Makes ``protocol`` that of the last release."""
    content = {
        "release": protocol.release,
        "protocol_version": protocol.version,
        "files": json_format.MessageToDict(protocol.files)["file"],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def problems(released: Protocol, now: Protocol) -> list[str]:
    """Why a mixed pair would misunderstand each other; empty if it would not."""
    if now.version < released.version:
        return [f"PROTOCOL_VERSION is {now.version}, that of {released.release} {released.version}"]
    if now.version > released.version:
        return []  # a mixed pair is refused by its version
    return breaking_changes(released.files, now.files)


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """What is gone or means something else."""
    before, after = _Named(old.file), _Named(new.file)
    return [
        *_messages(before.messages, after.messages),
        *_enums(before.enums, after.enums),
        *_services(before.services, after.services),
    ]


class _Named:
    """Messages, enums and services of files by their full names."""

    def __init__(self, files: Iterable[FileDescriptorProto]) -> None:
        self.messages: dict[str, DescriptorProto] = {}
        self.enums: dict[str, EnumDescriptorProto] = {}
        self.services: dict[str, ServiceDescriptorProto] = {}
        for file in files:
            self.enums |= {f"{file.package}.{enum.name}": enum for enum in file.enum_type}
            self.services |= {f"{file.package}.{one.name}": one for one in file.service}
            self._add(file.package, file.message_type)

    def _add(self, prefix: str, messages: Iterable[DescriptorProto]) -> None:
        for message in messages:
            name = f"{prefix}.{message.name}"
            self.messages[name] = message
            self.enums |= {f"{name}.{enum.name}": enum for enum in message.enum_type}
            self._add(name, message.nested_type)


def _messages(
    before: dict[str, DescriptorProto], after: dict[str, DescriptorProto]
) -> Iterator[str]:
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            yield f"message {name} is gone"
            continue
        fields = {field.number: field for field in new.field}
        for field in old.field:
            other = fields.get(field.number)
            if other is None:
                yield f"field {name}.{field.name} = {field.number} is gone"
            elif (was := _meaning(field, old)) != (is_now := _meaning(other, new)):
                changed = [key for key in was if was[key] != is_now[key]]
                told = ", ".join(f"{key} {was[key]!r} to {is_now[key]!r}" for key in changed)
                yield f"field {name}.{field.name} = {field.number} changed: {told}"


def _meaning(field: FieldDescriptorProto, message: DescriptorProto) -> dict[str, Any]:
    in_oneof = field.HasField("oneof_index") and not field.proto3_optional
    return {
        "name": field.name,
        "type": field.type_name or FieldDescriptorProto.Type.Name(field.type),
        "label": FieldDescriptorProto.Label.Name(field.label),
        "optional": field.proto3_optional,
        "oneof": message.oneof_decl[field.oneof_index].name if in_oneof else "",
    }


def _enums(
    before: dict[str, EnumDescriptorProto], after: dict[str, EnumDescriptorProto]
) -> Iterator[str]:
    for name, old in before.items():
        if name not in after:
            yield f"enum {name} is gone"
            continue
        values = {value.number: value.name for value in after[name].value}
        for value in old.value:
            if values.get(value.number) != value.name:
                yield f"value {name}.{value.name} = {value.number} is gone or has another name"


def _services(
    before: dict[str, ServiceDescriptorProto], after: dict[str, ServiceDescriptorProto]
) -> Iterator[str]:
    for name, old in before.items():
        if name not in after:
            yield f"service {name} is gone"
            continue
        methods = {method.name: method for method in after[name].method}
        for method in old.method:
            other = methods.get(method.name)
            if other is None:
                yield f"method {name}.{method.name} is gone"
            elif other != method:
                yield f"method {name}.{method.name} takes or gives something else"


def main(argv: list[str]) -> int:
    """1 when there are breaking changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", metavar="VERSION", help="this tree is released as VERSION")
    arguments = parser.parse_args(argv)
    released, now = read_released(), current()
    found = problems(released, now)
    for problem in found:
        sys.stdout.write(f"{problem}\n")
    if found:
        return 1
    if arguments.release:
        write_released(Protocol(arguments.release, now.version, now.files))
    sys.stdout.write(f"the protocol is compatible with {released.release}'s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
