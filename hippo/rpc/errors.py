"""Maps the error classes to gRPC statuses and back.

The status code gives the kind of failure. Trailing metadata names the exact class and the invalid
field, so that a client in another process raises the same error as the service.
"""

import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import grpc

from hippo import errors
from hippo.base.tasks import ClearingFrames
from hippo.errors import HippoError

_TYPE_KEY = "hippo-error-type"
_PARAM_KEY = "hippo-error-param"
_TOO_LARGE = "message larger than max"

_ERRORS: dict[str, type[HippoError]] = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, HippoError)
}
# For a status without our metadata: of the errors with one code, the first that is defined.
_BY_CODE: dict[grpc.StatusCode, type[HippoError]] = {
    **{grpc.StatusCode[cls.grpc_code]: cls for cls in reversed(_ERRORS.values())},
    grpc.StatusCode.UNAUTHENTICATED: errors.ForbiddenError,
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
}

_log = logging.getLogger(__name__)

ServicerT = TypeVar("ServicerT")
AnswerT = TypeVar("AnswerT")
Context = grpc.aio.ServicerContext[Any, Any]


def status_of(error: HippoError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Returns the code, details and trailing metadata of ``error``."""
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
    metadata = [(_TYPE_KEY, name)]
    if error.param and error.param.isascii() and error.param.isprintable():
        metadata.append((_PARAM_KEY, error.param))
    return grpc.StatusCode[error.grpc_code], error.message, tuple(metadata)


def error_from_status(
    code: grpc.StatusCode | None,
    details: str | None,
    metadata: Iterable[Any] | None,
    *,
    peer: str,
) -> HippoError:
    """Returns the error of a status; without our metadata, its message names ``peer``."""
    values = dict(metadata or ())
    if named := _ERRORS.get(values.get(_TYPE_KEY, "")):
        return named(details or code_name(code), param=values.get(_PARAM_KEY))
    kind = _BY_CODE.get(code, HippoError) if code is not None else HippoError
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in (details or ""):
        kind = errors.InvalidRequestError  # gRPC uses the code of a full queue here
    return kind(f"{peer}: {code_name(code)}: {details or 'no details'}")


def code_name(code: grpc.StatusCode | None) -> str:
    return "UNKNOWN" if code is None else code.name


def answering_errors(
    method: Callable[[ServicerT, Any, Context], Coroutine[Any, Any, AnswerT]],
) -> Callable[[ServicerT, Any, Context], Coroutine[Any, Any, AnswerT]]:
    """Turns the exceptions of a servicer's method into the call's status.

    A HippoError becomes its own status. Any other exception is a bug: it is logged with its
    traceback, and the client gets INTERNAL without internal details.
    """

    @wraps(method)
    async def answer(servicer: ServicerT, request: Any, context: Context) -> AnswerT:
        try:
            with ClearingFrames():
                return await method(servicer, request, context)
        except HippoError as error:
            status = status_of(error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            if context.done():
                return cast(AnswerT, None)  # the client has left
            _log.exception("a request failed unexpectedly")
            status = status_of(HippoError("internal error; the service's log has the details"))
        # Not inside ``except``: gRPC keeps abort's exception, whose context would be the error.
        await context.abort(*status)
        raise AssertionError("abort raises")

    return answer
