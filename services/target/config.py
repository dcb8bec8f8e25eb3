"""The target service's settings."""

from dataclasses import dataclass

from hippo.base.config import SettingsError, setting
from hippo.models.interface.plan import LoadPlan
from hippo.service.settings import QUEUED_MESSAGES, EngineSettings
from hippo.types import SpatialScore

ENV_PREFIX = "HIPPO_TARGET"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(EngineSettings):
    """Adds settings for the queue, visual token scores, determinism and tensor parallelism."""

    port: int = setting(50052, help="port to listen on; 0: any free one", least=0, most=65535)
    max_queue: int = setting(
        64,
        help="sequences that may wait for a slot; fewer if their media in bytes take more than "
        f"{QUEUED_MESSAGES} messages of --max-message-mib",
        least=0,
    )
    score_layers: int | None = setting(
        None,
        help="number of first layers whose attention scores visual tokens; default: half of all",
        least=1,
    )
    spatial_score: str = setting(
        "contrast",
        help="spatial score of a visual token; variance is the formula of the HIPPO paper",
        choices=tuple(SpatialScore),
    )
    spread: float = setting(
        0.05,
        help="share of holistic's kept tokens that is spread evenly; the HIPPO paper: 0",
        least=0,
        most=1,
    )
    deterministic: bool = setting(
        False,
        help="run every step in one shape, also target-only, so that the bits of an answer do not "
        "depend on batching or drafting, in any dtype",
    )
    deterministic_rows: int = setting(
        8, help="with --deterministic: rows per step; fewer where the device's kernels need it"
    )
    tensor_parallel: int = setting(1, help="devices that share the model's layers")
    devices: tuple[str, ...] = setting(
        (), help="with --tensor-parallel: the devices, as cuda:0,cuda:1; default: from --device on"
    )
    cpu_cores: tuple[str, ...] = setting(
        (), help="with --tensor-parallel: one core for each rank's process"
    )

    prefill_helper_layers: int | None = setting(
        0,
        help="first layers of the model that a prefill helper, a process on "
        "--prefill-helper-device, runs of long prompts while this one runs the others; auto: half "
        "of the layers, at least those that score visual tokens, if they fit; 0: no helper",
        least=0,
    )
    prefill_helper_device: str = setting(
        "", help="device of the prefill helper, usually the draft's; default: --device"
    )
    prefill_helper_core: int | None = setting(
        None, help="pin the prefill helper to this CPU core", least=0
    )

    def __post_init__(self) -> None:
        if any(not core.isdecimal() for core in self.cpu_cores):
            raise SettingsError(f"--cpu-cores {','.join(self.cpu_cores)}: expected numbers")
        EngineSettings.__post_init__(self)
        if self.has_helper and (self.tensor_parallel > 1 or self.deterministic):
            other = "--tensor-parallel" if self.tensor_parallel > 1 else "--deterministic"
            raise SettingsError(
                f"--prefill-helper-layers and {other} do not go together: leave one of them out"
            )
        if self.has_helper:
            _ = self.helper_plan  # raises SettingsError

    @property
    def has_helper(self) -> bool:
        """Whether a prefill helper is started."""
        return self.prefill_helper_layers != 0

    @property
    def helper_plan(self) -> LoadPlan:
        """How the prefill helper loads the model's first layers."""
        return self.load_plan.for_helper(
            device=self.prefill_helper_device or self.device, cpu_core=self.prefill_helper_core
        )

    @property
    def load_plan(self) -> LoadPlan:
        """How to load the model onto the devices."""
        return self._load_plan(
            tensor_parallel=self.tensor_parallel,
            devices=self.devices,
            cpu_cores=tuple(map(int, self.cpu_cores)),
            exact_rows=self.deterministic_rows if self.deterministic else None,
        )

    @property
    def first_device(self) -> str:
        """The device of the vision tower."""
        return self.devices[0] if self.devices else self.device
