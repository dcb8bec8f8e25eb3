"""The parts of a service that need its model."""

from dataclasses import dataclass

from hippo.base.local_files import LocalFiles
from hippo.engine.engine import Engine
from hippo.engine.prompts import PromptReader
from hippo.engine.slots import SlotPool
from hippo.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a service that exist once its model is loaded."""

    info: ModelInfo
    engine: Engine
    slots: SlotPool
    prompts: PromptReader
    files: LocalFiles  # files that requests may name by path
