"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.errors import ModelNotFoundError
from gateway.state import State
from hippo.types import ModelInfo

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models")
async def list_models(state: State) -> dict[str, Any]:
    """Lists the served model; 503 while the target is down."""
    return {"object": "list", "data": [_card(state.backends.model, state)]}


@router.get("/models/{name:path}")
async def get_model(name: str, state: State) -> dict[str, Any]:
    """The served model, if ``name`` is its name."""
    info = check_model_name(name, state.backends.model)
    return _card(info, state)


def check_model_name(name: str, info: ModelInfo) -> ModelInfo:
    """``info`` if it goes by ``name``; raises ModelNotFoundError."""
    if name != info.name:
        raise ModelNotFoundError(
            f"there is no model {name!r} here; {info.name!r} is served", param="model"
        )
    return info


def _card(info: ModelInfo, state: State) -> dict[str, Any]:
    draft = state.backends.draft_model
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
            "draft_problem": state.backends.draft_problem,
        },
    }
