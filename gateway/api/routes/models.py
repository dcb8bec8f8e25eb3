"""GET /v1/models: the served models; GET /v1/frames: what one of them sees of a video."""

import json
from dataclasses import fields
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from gateway.api.responses import (
    DraftCard,
    ExpectedFrames,
    ModelCard,
    ModelFacts,
    ModelList,
    ServiceCard,
)
from gateway.api.state import State
from gateway.common.errors import without_addresses
from gateway.pairs.targets import Draft, Target
from hippo.errors import ContextLengthError, InvalidRequestError, MediaError, NotFoundError
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.media.sampling import expected_frames, resolve_plan
from hippo.models.interface.context import visual_limit
from hippo.types import FramePlan, ModelInfo

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models")
async def list_models(state: State) -> ModelList:
    """Lists the served models; 503 while every target is down."""
    return ModelList(data=[_card(info, state) for info in state.backends.models])


@router.get("/models/{name:path}")
async def get_model(name: str, state: State) -> ModelCard:
    """Returns the served model of this name."""
    return _card(state.backends.model(name), state)


@router.get("/frames")
async def expect_frames(
    state: State,
    seconds: Annotated[float, Query(gt=0, le=1e6, allow_inf_nan=False)],
    width: Annotated[int, Query(ge=1, le=1 << 16)],
    height: Annotated[int, Query(ge=1, le=1 << 16)],
    model: str | None = None,
) -> ExpectedFrames:
    """Returns what the model sees of a video of this length and size, without options."""
    info = state.backends.model(model)
    if not info.frame_sampling:
        raise NotFoundError(
            f"the target service of {info.name} does not tell how it samples frames"
        )
    told = json.loads(info.frame_sampling)
    known = {field.name for field in fields(FrameLimits)}  # a later release may tell more
    limits = FrameLimits(**{name: told["limits"][name] for name in known & told["limits"].keys()})
    room = visual_limit(info.max_context_length, 0, state.settings.max_visual_tokens)
    decoding = DecodeLimits(max_frames=told["max_frames"])
    try:
        plan = resolve_plan(FramePlan(max_visual_tokens=room), decoding, limits)
        num_frames, size, num_tokens = expected_frames(seconds, height, width, plan, limits)
    except ContextLengthError:
        raise InvalidRequestError(
            f"{info.name} has no room for a video of {width} x {height} pixels", param="height"
        ) from None
    except MediaError as error:
        raise InvalidRequestError(error.message, param="height") from None
    return ExpectedFrames(
        num_frames=num_frames, width=size[1], height=size[0], num_tokens=num_tokens
    )


def _card(info: ModelInfo, state: State) -> ModelCard:
    backends = state.backends
    draft = next((draft.info for draft in backends.drafts if draft.info is not None), None)
    services = [
        _service("target", number, target)
        for number, target in enumerate(backends.targets)
        if target.info is None or target.info.name == info.name
    ]
    services.sort(key=lambda card: not card.is_up)
    services += [_service("draft", number, each) for number, each in enumerate(backends.drafts)]
    problem = backends.pair(info.name).target.draft_problem
    return ModelCard(
        id=info.name,
        max_model_len=info.max_context_length,
        hippo=ModelFacts(
            family=info.family,
            num_parameters=info.num_parameters,
            device=info.device,
            dtype=info.dtype,
            num_slots=info.num_slots,
            draft=None if draft is None else DraftCard.model_validate(draft, from_attributes=True),
            draft_problem=problem and without_addresses(problem),
            services=services,
        ),
    )


def _service(noun: Literal["target", "draft"], number: int, watch: Target | Draft) -> ServiceCard:
    return ServiceCard(
        service=noun,
        id=f"{noun}-{number}",
        is_up=watch.info is not None,
        problem=None if watch.info is not None else without_addresses(watch.problem),
        num_running=watch.num_running,
        num_slots=None if watch.info is None else watch.info.num_slots,
    )
