"""OpenTelemetry spans of one process; without an OTLP endpoint nothing is imported or recorded.

OpenTelemetry's own environment variables configure the export (docs/operations.md lists those that
hippo knows). The current span is a context variable: a task that a request starts has the request's
span, and ``Span.headers`` carries it to another process.
"""

import contextlib
import contextvars
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hippo.base.config import SettingsError
from hippo.errors import HippoError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_LAST_EXPORT_S = 3.0

_provider: Any = None  # opentelemetry.sdk.trace.TracerProvider, while spans are exported
_tracer: Any = None


class Span:
    """A part of a request's time, with attributes; a span without ``recorded`` does nothing.

    Attributes whose value is None are left out. Times are of ``time.perf_counter_ns``.
    """

    def __init__(self, recorded: Any = None) -> None:
        self._recorded = recorded
        self._offset_ns = time.time_ns() - time.perf_counter_ns()  # from the epoch

    @property
    def is_recording(self) -> bool:
        """Whether the span is exported; False without tracing, and in a trace that is not
        sampled."""
        return self._recorded is not None and bool(self._recorded.is_recording())

    @property
    def trace_id(self) -> str:
        """The id of the trace as 32 hexadecimal digits; empty if the span is not exported."""
        if not self.is_recording:
            return ""
        return f"{self._recorded.get_span_context().trace_id:032x}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """HTTP headers or gRPC metadata that make a span of another process a child of this one."""
        carrier: dict[str, str] = {}
        if self._recorded is not None:
            from opentelemetry import propagate

            propagate.inject(carrier, context=self._context())
        return tuple(carrier.items())

    def set(self, attributes: Mapping[str, Any], *, name: str | None = None) -> None:
        """Sets attributes, and the span's name if ``name`` is given."""
        if self._recorded is not None:
            self._recorded.set_attributes(_given(attributes))
            if name is not None:
                self._recorded.update_name(name)

    def add_event(self, name: str, **attributes: Any) -> None:
        """Adds an event that happens now; the attributes' names get the prefix ``hippo.``."""
        if self._recorded is not None:
            named = {f"hippo.{key}": value for key, value in attributes.items()}
            self._recorded.add_event(name, _given(named))

    def fail(self, error: BaseException) -> None:
        """Records why the work failed; an error of the request itself is no failure of the span.

        The text of an unexpected error is for the log alone, as it may quote a prompt.
        """
        if self._recorded is None:
            return
        from opentelemetry.trace import StatusCode

        self._recorded.set_attribute("error.type", type(error).__name__)
        if not isinstance(error, HippoError):
            self._recorded.set_status(StatusCode.ERROR)
        elif error.http_status >= 500:
            self._recorded.set_status(StatusCode.ERROR, error.message)

    def add_child(
        self, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, Any] | None = None
    ) -> None:
        if self.is_recording:
            child = _tracer.start_span(
                name,
                context=self._context(),
                start_time=began_ns + self._offset_ns,
                attributes=_given(attributes or {}),
            )
            child.end(max(began_ns, ended_ns) + self._offset_ns)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the span; ``error`` is what ended the work early: an exception is recorded, and a
        cancellation as ``hippo.outcome``."""
        if isinstance(error, Exception):
            self.fail(error)
        elif error is not None:
            self.set({"hippo.outcome": "cancelled"})
        if self._recorded is not None:
            self._recorded.end()

    def _context(self) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return Context() if self._recorded is None else set_span_in_context(self._recorded)

    def start_child(self, name: str, *, kind: str, attributes: Mapping[str, Any]) -> "Span":
        """Returns a child that the caller ends; ``kind`` as for ``span``."""
        return NO_SPAN if self._recorded is None else _start(name, kind, attributes, self)


NO_SPAN = Span()

_current: contextvars.ContextVar[Span] = contextvars.ContextVar("span", default=NO_SPAN)


def current_span() -> Span:
    """Returns the innermost ``span`` of the running task."""
    return _current.get()


@contextlib.contextmanager
def span(
    name: str,
    *,
    kind: str = "internal",
    attributes: Mapping[str, Any] | None = None,
    parent: Mapping[str, str] | None = None,
) -> Iterator[Span]:
    """Records the ``with`` block as the current span, and how an exception ended it.

    ``kind`` is "internal", "server" or "client". The span is a child of the one that the headers
    ``parent`` carry, which are in lower case, or else of the current span.
    """
    if _tracer is None:
        yield NO_SPAN
        return
    made = _start(name, kind, attributes or {}, current_span() if parent is None else parent)
    token = _current.set(made)
    try:
        yield made
    except BaseException as error:
        made.end(error)
        raise
    else:
        made.end()
    finally:
        _current.reset(token)


def _start(
    name: str, kind: str, attributes: Mapping[str, Any], parent: Span | Mapping[str, str]
) -> Span:
    from opentelemetry import propagate
    from opentelemetry.trace import SpanKind

    context = parent._context() if isinstance(parent, Span) else propagate.extract(parent)
    return Span(
        _tracer.start_span(
            name, context=context, kind=SpanKind[kind.upper()], attributes=_given(attributes)
        )
    )


def _given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def start_tracing(process: str, environment: Mapping[str, str] = os.environ) -> None:
    """Exports the spans of ``process`` ("gateway") from now on, if an OTLP endpoint is set.

    Raises SettingsError if OpenTelemetry is not installed, or for a variable that cannot work.
    """
    global _provider, _tracer
    endpoint = next((name for name in _ENDPOINTS if environment.get(name)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None or is_off or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return
    if not (url := environment[endpoint]).startswith(("http://", "https://")):
        raise SettingsError(f"{endpoint}={url!r}: expected a URL such as http://collector:4318")
    protocol = next((name for name in _PROTOCOLS if environment.get(name)), None)
    if protocol is not None and (given := environment[protocol]) != _PROTOCOL:
        raise SettingsError(
            f"{protocol}={given!r}: expected {_PROTOCOL}, which a collector takes at port 4318"
        )
    try:
        # Reads OTEL_PROPAGATORS; later, each request would fail.
        from opentelemetry import propagate  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"{endpoint} is set, but {error.name} is not installed: pip install "
            "'hippo-serve[traces]', or unset the variable"
        ) from None
    except ValueError as error:
        raise SettingsError(f"OTEL_PROPAGATORS: {error}") from None
    # The host's name is the pod's name. The environment's attributes have precedence.
    own = {"service.name": f"hippo-{process}", "host.name": socket.gethostname()}
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    try:
        processor = BatchSpanProcessor(OTLPSpanExporter())
    except ValueError as error:
        raise SettingsError(f"OTEL_BSP_*: {error}") from None
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("hippo")


def stop_tracing() -> None:
    """Exports the spans that have ended, for at most a few seconds, and stops; without
    ``start_tracing`` it has no effect."""
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        # A collector that is away must not delay the end of the process.
        stopping = threading.Thread(target=provider.shutdown, daemon=True)
        stopping.start()
        stopping.join(_LAST_EXPORT_S)
