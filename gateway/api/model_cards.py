"""Models of the answers about served models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class DraftCard(BaseModel):
    """The model of the draft service."""

    name: str
    num_parameters: int
    device: str
    dtype: str


class ServiceCard(BaseModel):
    """A draft or target service of the gateway."""

    service: Literal["target", "draft"]
    id: str = Field(description="By the order of the gateway's list; its address is not told.")
    is_up: bool
    problem: str | None
    num_running: int = Field(description="Running sequences of this gateway.")
    num_slots: int | None


class ModelFacts(BaseModel):
    """The model and the services behind a served name."""

    family: str
    num_parameters: int
    device: str
    dtype: str
    num_slots: int
    draft: DraftCard | None
    draft_problem: str | None = Field(description="Why there is no draft; null if there is one.")
    services: list[ServiceCard]


class ModelCard(BaseModel):
    """A served model."""

    id: str = Field(examples=["hippo"])
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "hippo"
    max_model_len: int = Field(
        description="Maximum number of tokens of prompt and answer together.", examples=[4096]
    )
    hippo: ModelFacts


class ExpectedFrames(BaseModel):
    """What a model sees of a video by default."""

    num_frames: int
    width: int = Field(description="Of a frame, after resizing.")
    height: int
    num_tokens: int = Field(description="Visual tokens, of all frames together; approximate.")


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
