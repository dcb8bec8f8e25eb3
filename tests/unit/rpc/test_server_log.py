"""Which of gRPC's own log lines a server passes on."""

from __future__ import annotations

import logging

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from hippo.rpc.server import RpcServer


async def logged(message: str, caplog: pytest.LogCaptureFixture) -> int:
    """Number of error lines in the log when a servicer's call ends with such an error of gRPC's."""
    RpcServer("hippo.v1.Any")
    RpcServer("hippo.v1.Other")
    error = cygrpc.ExecuteBatchError(message)
    logging.getLogger("grpc._cython.cygrpc").error("in core by servicer method", exc_info=error)
    return sum(record.levelno >= logging.ERROR for record in caplog.records)


async def test_a_client_that_left_before_its_status_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    message = 'Failed "execute_batch": (<cygrpc.SendStatusFromServerOperation object at 0x7f>,)'
    assert await logged(message, caplog) == 0


async def test_any_other_error_of_grpcs_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    assert await logged("Failed grpc_call_start_batch: TOO_MANY_OPERATIONS", caplog) == 1
