"""An error that crosses a process boundary is the same error on the other side."""

import grpc
import pytest

from hippo import errors
from hippo.base.config import SettingsError
from hippo.errors import HippoError
from hippo.rpc.errors import error_from_status, status_of

ALL = [
    cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, HippoError)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_the_wire(kind: type[HippoError]) -> None:
    code, details, metadata = status_of(kind("what and why", param="frame_plan.fps"))

    back = error_from_status(code, details, metadata, peer="draft service at x:1")

    assert type(back) is kind
    assert code.name == kind.grpc_code
    assert (back.message, back.param) == ("what and why", "frame_plan.fps")


def test_an_error_outside_the_tree_arrives_as_its_nearest_ancestor() -> None:
    code, details, metadata = status_of(SettingsError("bad flag"))

    back = error_from_status(code, details, metadata, peer="peer")

    assert type(back) is errors.InvalidRequestError


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.UNKNOWN, HippoError),
        (None, HippoError),
    ],
)
def test_a_status_of_grpcs_own_names_the_peer(
    code: grpc.StatusCode | None, kind: type[HippoError]
) -> None:
    back = error_from_status(code, "connection refused", None, peer="draft service at x:1")

    assert type(back) is kind
    assert "draft service at x:1" in back.message
    assert "connection refused" in back.message
