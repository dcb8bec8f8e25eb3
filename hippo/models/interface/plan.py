"""The plan by which a model is loaded, made once from the settings.

Standard library only, so that a wrong flag is refused before torch is imported.
"""

from dataclasses import KW_ONLY, dataclass, replace

from hippo.base.config import SettingsError
from hippo.errors import ModelLoadError
from hippo.models.interface.context import pruned_cache_tokens

DTYPE_NAMES = ("float32", "bfloat16", "float16")

QUANTIZATION_NAMES = ("int8", "nf4")

# Up to this number of rows of a sequence in a forward, the query heads of a group are rows of one
# product.
MAX_GROUPED_ROWS = 32


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The model to load, its devices and its form. Raises SettingsError for conflicting values.

    ``model`` is a checkpoint's folder or its name on the Hugging Face hub. ``dtype`` is float32,
    bfloat16, float16 (on a CPU: weights in float16, arithmetic in float32) or auto: the
    checkpoint's own; on a CPU float32 where the processor multiplies that slowly, and with
    ``auto_is_half`` float16, bfloat16 or float32, the first that it multiplies fast
    (hippo.models.products.linear). ``quantization`` quantises a plain checkpoint's layers at load:
    int8 (by torchao) or nf4 (by bitsandbytes). ``num_slots`` None: as many as fit.
    ``max_context_length`` None: as long as fits and the checkpoint allows
    (hippo.models.interface.context).
    ``tensor_parallel`` processes (ranks) share the layers, on ``devices``, or on ``device`` and the
    following ones (all ranks on a CPU share it). ``cpu_cores`` pins each rank. The first device has
    room for caches of earlier media, of ``vision_cache_bytes`` and (on a CPU)
    ``media_cache_bytes`` (None: see hippo.catalog.sizes.cache_limit). ``budget_bytes`` limits the
    memory that a process uses on its device. ``cuda_graphs`` captures steps: auto (on one GPU), on
    or off. A slot caches ``cache_tokens`` tokens (None: the whole context, or what a pruned prompt
    needs if the service ``prunes``). With ``exact_rows`` every step has that many rows, or fewer if
    the device's kernels need it (ExactRunner.fit_rows), so that a token's logits do not depend on
    the other tokens fed. ``max_pixels`` is the most that the operator allows an image or a frame
    (0: the operator says nothing): memory is planned for it, and a model of one frame size refuses
    it. ``first_layers`` loads only so many of the layers (hippo.parallel.helper; None: all).
    """

    model: str
    _: KW_ONLY
    device: str = "cpu"
    tensor_parallel: int = 1
    devices: tuple[str, ...] = ()
    cpu_core: int | None = None
    cpu_cores: tuple[int, ...] = ()
    num_threads: int | None = None
    dtype: str = "auto"
    auto_is_half: bool = False
    quantization: str | None = None
    num_slots: int | None = 1
    max_context_length: int | None = None
    served_name: str | None = None
    vision_cache_bytes: int | None = 0
    media_cache_bytes: int | None = 0
    budget_bytes: int | None = None
    cuda_graphs: str = "off"
    cache_tokens: int | None = None
    prunes: bool = False
    exact_rows: int | None = None
    max_pixels: int = 0
    first_layers: int | None = None
    log_level: str = "info"  # for the followers' log records

    def __post_init__(self) -> None:
        if self.num_slots is not None and self.num_slots < 1:
            raise SettingsError(f"--slots is {self.num_slots}; it must be at least 1")
        if self.max_context_length is not None and self.max_context_length < 2:
            raise SettingsError(
                f"--max-context-length is {self.max_context_length}; it must be at least 2"
            )
        if self.cache_tokens is not None and self.cache_tokens < 2:
            raise SettingsError(f"--cache-tokens is {self.cache_tokens}; it must be at least 2")
        if self.dtype not in (*DTYPE_NAMES, "auto"):
            raise SettingsError(
                f"dtype {self.dtype!r} is unknown: use {', '.join(DTYPE_NAMES)} or auto"
            )
        if self.quantization is not None and self.quantization not in QUANTIZATION_NAMES:
            raise SettingsError(
                f"quantization {self.quantization!r} is unknown: use "
                f"{' or '.join(QUANTIZATION_NAMES)}, or leave it out"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise SettingsError(f"--num-threads is {self.num_threads}; it must be at least 1")
        if self.cpu_core is not None and (self.num_threads or 1) != 1:
            raise SettingsError("--cpu-core pins one thread; leave --num-threads out")
        self._check_ranks()
        self._check_steps()

    def _check_ranks(self) -> None:
        size = self.tensor_parallel
        if size > 1 and self.quantization is not None:
            raise SettingsError("--quantization is for one device; leave --tensor-parallel out")
        if size < 1:
            raise SettingsError(f"--tensor-parallel is {size}; it must be at least 1")
        if size == 1 and (self.devices or self.cpu_cores):
            raise SettingsError("--devices and --cpu-cores are for --tensor-parallel above 1")
        if size > 1 and self.cpu_core is not None:
            raise SettingsError("with --tensor-parallel use --cpu-cores instead of --cpu-core")
        if self.devices and self.device != "cpu":
            raise SettingsError("--devices says where to run; leave --device out")
        for flag, values in (("--devices", self.devices), ("--cpu-cores", self.cpu_cores)):
            if values and len(values) != size:
                raise SettingsError(
                    f"{flag} {','.join(map(str, values))}: --tensor-parallel {size} needs {size} "
                    "of them"
                )
        if self.cpu_cores and (self.num_threads or 1) != 1:
            raise SettingsError("--cpu-cores pins one thread each; leave --num-threads out")

    def _check_steps(self) -> None:
        if self.cuda_graphs not in ("auto", "on", "off"):
            raise SettingsError(f"cuda_graphs {self.cuda_graphs!r} is unknown: use auto, on or off")
        if self.cuda_graphs == "on" and not self.has_graphs:
            if self.tensor_parallel > 1:
                raise SettingsError(
                    "--cuda-graphs on is for one device; leave --tensor-parallel out"
                )
            raise SettingsError("--cuda-graphs on needs --device cuda; leave it out on a CPU")
        if self.exact_rows is None:
            return
        if not 1 <= self.exact_rows <= MAX_GROUPED_ROWS:
            raise SettingsError(
                f"--deterministic-rows is {self.exact_rows}; it must be 1 to {MAX_GROUPED_ROWS}"
            )
        if self.tensor_parallel > 1:
            raise SettingsError("--deterministic is for one device; leave --tensor-parallel out")

    def refuse_pixel_limits(self, name: str) -> None:
        """Raises ModelLoadError if the plan limits pixels, for a family whose frames have one
        size."""
        if self.max_pixels:
            raise ModelLoadError(
                f"{name} takes frames of one size, and images of sizes of its own: leave out "
                "--max-video-pixels and --max-image-pixels"
            )

    def slot_tokens(self, context_length: int) -> int:
        """Returns how many tokens a slot caches of a sequence of at most ``context_length``."""
        if self.cache_tokens is not None:
            return min(self.cache_tokens, context_length)
        return pruned_cache_tokens(context_length) if self.prunes else context_length

    @property
    def has_graphs(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        is_one_gpu = self.tensor_parallel == 1 and self.device.partition(":")[0] == "cuda"
        return is_one_gpu and self.cuda_graphs != "off"

    @property
    def rank_devices(self) -> tuple[str, ...]:
        """The device of each rank; the vision tower is on the first device."""
        if self.devices:
            return self.devices
        kind, _, first = self.device.partition(":")
        if self.tensor_parallel == 1:
            return (self.device,)
        if kind == "cpu":
            return ("cpu",) * self.tensor_parallel
        start = int(first) if first.isdecimal() else 0
        return tuple(f"{kind}:{start + rank}" for rank in range(self.tensor_parallel))

    def core_of(self, rank: int) -> int | None:
        """Returns the core to which a rank's process is pinned; None: it is not pinned."""
        return self.cpu_cores[rank] if self.cpu_cores else self.cpu_core

    def for_helper(self, *, device: str, cpu_core: int | None) -> "LoadPlan":
        """Returns the plan of a prefill helper, whose ``first_layers`` are still to be set."""
        return replace(
            self,
            device=device,
            cpu_core=cpu_core,
            num_threads=self.num_threads if cpu_core is None else None,
            num_slots=1,
            vision_cache_bytes=0,
            media_cache_bytes=0,
            cuda_graphs="off",
        )

    def for_followers(self, folder: str, devices: tuple[str, ...]) -> "LoadPlan":
        """Returns the followers' plan, for a checkpoint that is in ``folder``.

        Followers reserve no memory: earlier media are kept on the first device.
        """
        return replace(
            self,
            model=folder,
            device="cpu",
            devices=devices,
            vision_cache_bytes=0,
            media_cache_bytes=0,
        )
