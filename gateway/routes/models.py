"""GET /v1/models: the served models."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from gateway.model_cards import DraftCard, ModelCard, ModelFacts, ModelList, ServiceCard
from gateway.openapi import answers
from gateway.state import State
from gateway.targets import Draft, Target
from hippo.types import ModelInfo

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", responses=answers(503))
async def list_models(state: State) -> ModelList:
    """Lists the served models; 503 while every target is down."""
    return ModelList(data=[_card(info, state) for info in state.backends.models])


@router.get("/models/{name:path}", responses=answers(404, 503))
async def get_model(name: str, state: State) -> ModelCard:
    """Returns the served model of this name."""
    return _card(state.backends.model(name), state)


def _card(info: ModelInfo, state: State) -> ModelCard:
    backends = state.backends
    draft = next((draft.info for draft in backends.drafts if draft.info is not None), None)
    serving = [each for each in backends.targets if each.info and each.info.name == info.name]
    down = [each for each in backends.targets if each.info is None]
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
            draft_problem=backends.pair(info.name).target.draft_problem,
            services=[
                *(_service("target", each) for each in (*serving, *down)),
                *(_service("draft", each) for each in backends.drafts),
            ],
        ),
    )


def _service(noun: Literal["target", "draft"], watch: Target | Draft) -> ServiceCard:
    return ServiceCard(
        service=noun,
        address=watch.address,
        is_up=watch.info is not None,
        problem=None if watch.info is not None else watch.problem,
        num_running=watch.num_running,
        num_slots=None if watch.info is None else watch.info.num_slots,
    )
