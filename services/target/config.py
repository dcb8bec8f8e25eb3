"""The target service's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from hippo.config import SettingsError, setting
from hippo.engine.settings import EngineSettings
from hippo.types import SpatialScore

ENV_PREFIX = "HIPPO_TARGET"

_MAX_DETERMINISTIC_ROWS = 32  # hippo.models.batch.MAX_GROUPED_ROWS, which needs torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(EngineSettings):
    """What a target has besides: a queue for its slots, and the scores of visual tokens."""

    port: int = setting(50052, help="port to listen on; 0: any free one")
    max_queue: int = setting(16, help="sequences that may wait for a slot")
    score_layers: int | None = setting(
        None,
        help="layers, from the first, whose attention scores visual tokens; default: half of them",
    )
    spatial_score: str = setting(
        "contrast",
        help="how a visual token is compared with its surroundings; variance is HIPPO's formula",
        choices=get_args(SpatialScore),
    )
    spread: float = setting(
        0.05,
        help="share of the tokens kept by holistic that is spread evenly over the rest; HIPPO: 0",
    )
    deterministic: bool = setting(
        False,
        help="every step in the same shape, target-only as well, so that an answer's bits do not "
        "depend on what was verified together, in bfloat16 either",
    )
    deterministic_rows: int = setting(8, help="with --deterministic: rows of every step")
    tensor_parallel: int = setting(1, help="devices that share the model's layers")
    devices: tuple[str, ...] = setting(
        (), help="one for each, such as cuda:0,cuda:1; default: --device and those after it"
    )
    cpu_cores: tuple[str, ...] = setting(
        (), help="with --tensor-parallel: a core for each device's process, as --cpu-core"
    )

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        self._check_ranks()
        if not 1 <= self.deterministic_rows <= _MAX_DETERMINISTIC_ROWS:
            raise SettingsError(
                f"--deterministic-rows is {self.deterministic_rows}; it must be 1 to "
                f"{_MAX_DETERMINISTIC_ROWS}"
            )
        if self.max_queue < 0:
            raise SettingsError(f"--max-queue is {self.max_queue}; it must not be below 0")
        if not 0.0 <= self.spread <= 1.0:
            raise SettingsError(f"--spread is {self.spread}; it must be 0 to 1")
        if self.score_layers is not None and self.score_layers < 1:
            raise SettingsError(f"--score-layers is {self.score_layers}; it must be at least 1")

    def _check_ranks(self) -> None:
        size = self.tensor_parallel
        if size < 1:
            raise SettingsError(f"--tensor-parallel is {size}; it must be at least 1")
        if size > 1 and self.deterministic:
            raise SettingsError("--deterministic is for one device; leave --tensor-parallel out")
        if size > 1 and self.cuda_graphs == "on":
            raise SettingsError("--cuda-graphs on is for one device; leave --tensor-parallel out")
        if size == 1 and (self.devices or self.cpu_cores):
            raise SettingsError("--devices and --cpu-cores are for --tensor-parallel above 1")
        if size > 1 and self.cpu_core is not None:
            raise SettingsError("with --tensor-parallel use --cpu-cores instead of --cpu-core")
        if self.devices and self.device != "cpu":
            raise SettingsError("--devices says where to run; leave --device out")
        for flag, values in (("--devices", self.devices), ("--cpu-cores", self.cpu_cores)):
            if values and len(values) != size:
                raise SettingsError(
                    f"{flag} {','.join(values)}: --tensor-parallel {size} needs {size} of them"
                )
        if any(not core.isdecimal() for core in self.cpu_cores):
            raise SettingsError(f"--cpu-cores {','.join(self.cpu_cores)}: expected numbers")
        if self.cpu_cores and (self.num_threads or 1) != 1:
            raise SettingsError("--cpu-cores pins one thread each; leave --num-threads out")

    @property
    def exact_rows(self) -> int | None:
        """See EngineSettings.exact_rows."""
        return self.deterministic_rows if self.deterministic else None

    @property
    def first_device(self) -> str:
        return self.rank_devices[0]

    @property
    def rank_devices(self) -> tuple[str, ...]:
        """A device for each rank of a tensor-parallel target."""
        if self.devices:
            return self.devices
        kind, _, first = self.device.partition(":")
        if kind == "cpu":
            return ("cpu",) * self.tensor_parallel
        start = int(first) if first.isdecimal() else 0
        return tuple(f"{kind}:{start + rank}" for rank in range(self.tensor_parallel))

    @property
    def rank_cores(self) -> tuple[int, ...]:
        """A core for each rank, or none."""
        return tuple(map(int, self.cpu_cores))
