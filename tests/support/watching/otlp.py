"""An OTLP receiver in this process, over HTTP, and the spans that it was sent."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as a collector sees it."""

    service: str
    host: str
    name: str
    kind: int  # 1: internal, 2: server, 3: client
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    is_error: bool
    problem: str  # the text of the error
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]  # by name


@dataclass(frozen=True, slots=True)
class Receiver:
    """The collector's address, and all spans so far."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Takes spans on a free port of the loopback interface."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.spans.extend(_read(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *args: object) -> None:
            """Tests have no use for an access log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        process = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    service=process["service.name"],
                    host=process["host.name"],
                    name=span.name,
                    kind=span.kind,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    began_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                    is_error=span.status.code == 2,
                    problem=span.status.message,
                    attributes=_attributes(span.attributes),
                    events={event.name: _attributes(event.attributes) for event in span.events},
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue | AnyValue) -> Any:
    value = pair.value if isinstance(pair, KeyValue) else pair
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)
