"""Structured logs with request ids: each record is one JSON object or one readable line."""

import contextvars
import json
import logging
import re
import sys
import time

from hippo.base.tracing import current_span

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")

# What a client's text could write a line of its own with, or steer a terminal: control characters
# and the separators that some readers take for line breaks.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    ids = {"request_id": request_id_var.get(), "trace_id": current_span().trace_id}
    extras: dict[str, object] = {name: value for name, value in ids.items() if value}
    return extras | {k: v for k, v in vars(record).items() if k not in _STANDARD}


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        tail = "".join(f" {key}={value}" for key, value in _extras(record).items())
        told = f"{stamp} {record.levelname.lower():7} {self._service:7} {record.getMessage()}{tail}"
        line = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), told)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def setup_logging(service: str, *, level: str = "info", style: str = "text") -> None:
    """Logs to stderr in the ``style`` "text" or "json"; replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if style == "json" else _TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
