"""The tree of all errors that callers see, with their gRPC codes and HTTP statuses."""

from typing import ClassVar


class HippoError(Exception):
    """The root, with a message for users, the name of a gRPC code and an HTTP status."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    type_name: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the wrong request field, as named by the client


class InvalidRequestError(HippoError):
    """The request is malformed or a value is out of range."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    type_name = "invalid_request_error"


class MediaError(InvalidRequestError):
    """Media is unreadable or exceeds a limit."""


class MediaPathError(MediaError):
    """A service cannot open a file by its path; it may take the file's bytes."""


class ContextLengthError(InvalidRequestError):
    """Prompt and completion together exceed the context length."""


class NotFoundError(HippoError):
    """An unknown model or resource."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    type_name = "not_found_error"


class ForbiddenError(HippoError):
    """A URL or path outside what the operator allows."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403
    type_name = "permission_error"


class OverloadedError(HippoError):
    """No free slot and no room in the queue; ``retry_after_s`` seconds later there may be."""

    retry_after_s = 5.0
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    type_name = "rate_limit_error"


class IncompatiblePairError(HippoError):
    """Draft and target, or two protocol versions, do not fit together."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 409
    type_name = "incompatible_pair_error"


class UnavailableError(HippoError):
    """A service is down, still loading, or draining."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    type_name = "unavailable_error"


class DeadlineError(HippoError):
    """The work took longer than allowed."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    type_name = "timeout_error"


class ModelLoadError(HippoError):
    """A checkpoint is missing, gated, damaged, or does not fit the device."""

    grpc_code = "FAILED_PRECONDITION"
