"""Which of gRPC's own log lines a server passes on."""

import logging

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from hippo.rpc.server import RpcServer


@pytest.mark.parametrize(
    ("message", "num_errors"),
    [
        ('Failed "execute_batch": (<cygrpc.SendStatusFromServerOperation object at 0x7f>,)', 0),
        ("Failed grpc_call_start_batch: TOO_MANY_OPERATIONS", 1),
    ],
    ids=["a client that left before its status", "any other"],
)
async def test_an_error_of_grpcs_is_passed_on_unless_the_client_left(
    message: str, num_errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    RpcServer("hippo.v1.Any")
    RpcServer("hippo.v1.Other")
    error = cygrpc.ExecuteBatchError(message)
    logging.getLogger("grpc._cython.cygrpc").error("in core by servicer method", exc_info=error)
    assert sum(record.levelno >= logging.ERROR for record in caplog.records) == num_errors
