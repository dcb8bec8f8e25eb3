"""GET /v1/models: what is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.state import State
from hippo.types import ModelInfo

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models")
async def list_models(state: State) -> dict[str, Any]:
    """Lists the served models; 503 while every target is down."""
    return {"object": "list", "data": [_card(info, state) for info in state.backends.models]}


@router.get("/models/{name:path}")
async def get_model(name: str, state: State) -> dict[str, Any]:
    """The served model of that name."""
    return _card(state.backends.model(name), state)


def _card(info: ModelInfo, state: State) -> dict[str, Any]:
    pair = state.backends.pair(info.name)
    draft = pair.draft_model
    return {
        "id": info.name,
        "object": "model",
        "created": 0,
        "owned_by": "hippo",
        "max_model_len": info.max_context_length,
        "hippo": {
            "family": info.family,
            "num_parameters": info.num_parameters,
            "device": info.device,
            "dtype": info.dtype,
            "num_slots": info.num_slots,
            "draft": None
            if draft is None
            else {
                "name": draft.name,
                "num_parameters": draft.num_parameters,
                "device": draft.device,
                "dtype": draft.dtype,
            },
            "draft_problem": pair.draft_problem,
            "services": state.backends.describe(info.name),
        },
    }
