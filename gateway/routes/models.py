"""GET /v1/models: what is served."""

from __future__ import annotations

from fastapi import APIRouter

from gateway.openapi import answers
from gateway.responses import DraftCard, ModelCard, ModelFacts, ModelList, ServiceCard
from gateway.state import State
from hippo.types import ModelInfo

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", responses=answers(503))
async def list_models(state: State) -> ModelList:
    """Lists the served models; 503 while every target is down."""
    return ModelList(data=[_card(info, state) for info in state.backends.models])


@router.get("/models/{name:path}", responses=answers(404, 503))
async def get_model(name: str, state: State) -> ModelCard:
    """The served model of that name."""
    return _card(state.backends.model(name), state)


def _card(info: ModelInfo, state: State) -> ModelCard:
    pair = state.backends.pair(info.name)
    draft = pair.draft_model
    return ModelCard(
        id=info.name,
        max_model_len=info.max_context_length,
        hippo=ModelFacts(
            family=info.family,
            num_parameters=info.num_parameters,
            device=info.device,
            dtype=info.dtype,
            num_slots=info.num_slots,
            draft=None
            if draft is None
            else DraftCard(
                name=draft.name,
                num_parameters=draft.num_parameters,
                device=draft.device,
                dtype=draft.dtype,
            ),
            draft_problem=pair.draft_problem,
            services=[ServiceCard(**each) for each in state.backends.describe(info.name)],
        ),
    )
