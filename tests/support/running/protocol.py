"""What services of another release rely on: ``python -m tests.support.running.protocol VERSION``
notes it.

Draft, target and gateway are upgraded one after the other, so a change of the protocol must be one
that both sides understand: additions are, anything else needs a new PROTOCOL_VERSION
(hippo/types.py), by which a mixed pair is refused.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from hippo.types import PROTOCOL_VERSION
from hippo.v1 import common_pb2, draft_pb2, target_pb2

RELEASED = Path(__file__).resolve().parents[3] / "protos" / "released.json"


def spoken() -> list[FileDescriptorProto]:
    """The protocol of this tree, as its stubs describe it."""
    files = []
    for module in (common_pb2, draft_pb2, target_pb2):
        files.append(FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(files[-1])
    return files


def facts(files: list[FileDescriptorProto]) -> dict[str, str]:
    """The meaning of every field, value and method, by its number or its name."""
    return dict(fact for file in files for fact in _facts(file))


def released() -> dict[str, Any]:
    """The last release: its version, the protocol's, and its facts."""
    content: dict[str, Any] = json.loads(RELEASED.read_text(encoding="utf-8"))
    return content


def _facts(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    for message in file.message_type:
        for field in message.field:
            is_choice = field.HasField("oneof_index") and not field.proto3_optional
            parts = [
                field.name,
                field.type_name or FieldDescriptorProto.Type.Name(field.type),
                FieldDescriptorProto.Label.Name(field.label),
                "optional" if field.proto3_optional else "",
                message.oneof_decl[field.oneof_index].name if is_choice else "",
            ]
            yield f"{message.name} = {field.number}", " ".join(filter(None, parts))
    for enum in file.enum_type:
        for value in enum.value:
            yield f"{enum.name} = {value.number}", value.name
    for service in file.service:
        for method in service.method:
            streams = "streams" if method.client_streaming and method.server_streaming else ""
            meaning = f"{method.input_type} {method.output_type} {streams}".strip()
            yield f"{service.name}.{method.name}", meaning


if __name__ == "__main__":
    note = {"release": sys.argv[1], "protocol_version": PROTOCOL_VERSION, "facts": facts(spoken())}
    RELEASED.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
