"""The settings that both services share."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hippo.base.config import ProcessSettings, SettingsError, check_ranges, setting
from hippo.base.local_files import check_directories
from hippo.catalog.sizes import CACHE_BYTES, GIB, IMAGE_TOKENS, MOST_AUTO_SLOTS, USED_SHARE
from hippo.media.limits import NUM_WORKERS, DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.media.sampling import MAX_FPS
from hippo.models.interface.plan import DTYPE_NAMES, QUANTIZATION_NAMES, LoadPlan
from hippo.rpc.options import TlsFiles

if TYPE_CHECKING:
    from hippo.video.shared import SharedFrames

QUEUED_MESSAGES = 16
"""The media of all sequences in the queue together take at most the bytes of so many of the largest
messages, which is 4 GiB by default; media that a service opens by path take none."""

_MIB = 1024 * 1024
_MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(ProcessSettings):
    """The model, its device, and the limits of a request."""

    model: str = setting(help="checkpoint folder, or name on the Hugging Face hub")
    served_name: str | None = setting(None, help="name to serve the model under")
    device: str = setting("cpu", help="cpu, cuda or cuda:N")
    dtype: str = setting(
        "auto",
        help="auto: the checkpoint's dtype, on a CPU float32 if the processor multiplies that "
        "slowly; a draft on a CPU: the first of float16, bfloat16 and float32 that is fast, as its "
        "dtype affects only the speed",
        choices=("auto", *DTYPE_NAMES),
    )
    quantization: str = setting(
        "none",
        help="quantise the layers of a plain checkpoint while it is loaded, to 8 bits (int8, by "
        "torchao) or 4 bits (nf4, by bitsandbytes); none: as the checkpoint is",
        choices=("none", *QUANTIZATION_NAMES),
    )
    cpu_core: int | None = setting(None, help="pin the process to this core, with one thread")
    num_threads: int | None = setting(None, help="CPU threads of one operation; default: torch's")
    slots: int | None = setting(
        None,
        help="concurrent sequences; auto: as many as fit in memory beside the weights, at most "
        f"{MOST_AUTO_SLOTS} (default: auto)",
        least=1,
    )
    memory_gib: float | None = setting(
        None,
        help="limit of the service's device memory, in GiB; default: the weights and "
        f"{USED_SHARE:.0%} (CPU: 50%) of the memory that is then free",
        above=0,
    )
    max_context_length: int | None = setting(
        None,
        help="most tokens of prompt and answer together; default: as many as the checkpoint allows "
        "and fit in memory beside the weights",
    )
    vision_cache_mb: int | None = setting(
        None,
        help="megabytes of device memory for vision features of earlier media; 0: off; auto: "
        f"{CACHE_BYTES // _MB}, or more if one longest prompt needs more (default: auto)",
        least=0,
    )
    media_cache_mb: int | None = setting(
        None,
        help="megabytes of host memory for frames of earlier media; 0: off; auto: "
        f"{CACHE_BYTES // _MB}, or more if one longest prompt needs more (default: auto)",
        least=0,
    )
    shared_frames_dir: str = setting(
        "",
        help="folder in shared memory (/dev/shm/...) by which draft and target on one machine "
        "decode a video once; empty: off",
    )
    shared_frames_mb: int = setting(1024, help="most megabytes in --shared-frames-dir", least=1)
    prefix_cache: bool = setting(
        True, help="reuse keys and values of earlier prompts with the same first tokens"
    )
    cuda_graphs: str = setting(
        "auto",
        help="capture small steps as CUDA graphs; auto: on one GPU, in bfloat16 or float16",
        choices=("auto", "on", "off"),
    )
    metrics_port: int | None = setting(None, help="port for Prometheus metrics, on --host")
    drain_seconds: float = setting(
        30.0, help="seconds for running sequences after SIGTERM", least=0
    )
    max_message_mib: int = setting(
        256,
        help="most MiB of media in a gRPC message: of those that are not opened by path",
        least=1,
    )
    allowed_local_media_path: tuple[str, ...] = setting(
        (),
        help="directories, separated by commas, whose files the gateway may name by path instead "
        "of sending their bytes; empty: none",
    )
    video_fps: float = setting(
        0.0,
        help="frames sampled per second if a request does not say; 0: the model's default",
        least=0,
        most=MAX_FPS,
    )
    video_as_shown: bool = setting(
        False,
        help="show the model videos as players do: high dynamic range (PQ, HLG) in standard range, "
        "anamorphic pixels square, one field of interlaced frames; else, as the model families' "
        "own pipelines do, as they are stored",
    )
    max_frames: int = setting(768, help="most sampled frames of one video", least=2)
    max_video_pixels: int = setting(
        0, help="most pixels of a sampled frame after resizing; 0: the model's limit", least=0
    )
    max_image_pixels: int = setting(
        0,
        help="most pixels of an image after resizing; memory is planned for them; 0: the model's "
        f"limit, and at most {IMAGE_TOKENS:,} tokens",
        least=0,
    )
    max_frame_pixels: int = setting(7680 * 4320, help="most pixels of one frame as stored", least=1)
    max_video_seconds: float = setting(4 * 3600.0, help="longest video, in seconds", above=0)
    max_video_streams: int = setting(32, help="most tracks of a video file, of any kind", least=1)
    max_stored_frames: int = setting(
        1_000_000, help="most frames in a video file, sampled or not", least=1
    )
    max_stored_fps: float = setting(1000.0, help="highest frame rate of a video file", above=0)
    decode_seconds: float = setting(120.0, help="most seconds of decoding one media item", above=0)
    decode_mib: int = setting(
        2048,
        help="most memory for decoding one media item, and for all frames of a request, in MiB",
        least=64,
    )
    decode_workers: int = setting(
        NUM_WORKERS,
        help="processes that decode, each an item at a time and within --decode-mib; of several, "
        "one takes only items of about a second or less, and of three no client has two others",
        least=1,
    )
    reflection: bool = setting(
        False, help="describe the gRPC interface to whoever asks (for grpcurl)"
    )
    tls_cert: str = setting("", help="PEM file of the certificate; with --tls-key: serve TLS")
    tls_key: str = setting("", help="PEM file of the private key")
    tls_ca: str = setting("", help="PEM file of the CA that must have signed client certificates")

    def __post_init__(self) -> None:
        """Raises SettingsError for invalid values."""
        check_ranges(self)
        if self.shared_frames_dir and not hasattr(os, "O_TMPFILE"):
            raise SettingsError("--shared-frames-dir needs Linux")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_ca and not self.tls_cert):
            raise SettingsError(
                "a service with TLS needs both --tls-cert and --tls-key; --tls-ca is optional and "
                "needs both, too"
            )
        check_directories(self.allowed_local_media_path, "--allowed-local-media-path")
        _ = self.load_plan  # raises SettingsError

    @property
    def load_plan(self) -> LoadPlan:
        """How to load the model; raises SettingsError for settings that contradict each other."""
        return self._load_plan()

    def _load_plan(
        self,
        *,
        auto_is_half: bool = False,
        tensor_parallel: int = 1,
        devices: tuple[str, ...] = (),
        cpu_cores: tuple[int, ...] = (),
        exact_rows: int | None = None,
    ) -> LoadPlan:
        """Returns the plan of these settings and of the settings that only one service has."""
        return LoadPlan(
            self.model,
            device=self.device,
            tensor_parallel=tensor_parallel,
            devices=devices,
            cpu_core=self.cpu_core,
            cpu_cores=cpu_cores,
            num_threads=self.num_threads,
            dtype=self.dtype,
            auto_is_half=auto_is_half,
            quantization=None if self.quantization == "none" else self.quantization,
            num_slots=self.slots,
            max_context_length=self.max_context_length,
            served_name=self.served_name,
            vision_cache_bytes=self.vision_cache_bytes,
            media_cache_bytes=self.media_cache_bytes if self.first_device == "cpu" else 0,
            budget_bytes=None if self.memory_gib is None else int(self.memory_gib * GIB),
            cuda_graphs=self.cuda_graphs,
            exact_rows=exact_rows,
            max_pixels=max(self.max_image_pixels, self.max_video_pixels),
            log_level=self.log_level,
        )

    @property
    def tls(self) -> TlsFiles | None:
        """The PEM files; None without TLS."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca) if self.tls_cert else None

    @property
    def max_message_bytes(self) -> int:
        return self.max_message_mib * _MIB

    @property
    def keeps_prefixes(self) -> bool:
        """Whether prefixes are reused: not with ``exact_rows``, as reuse changes the last bits."""
        return self.prefix_cache and self.load_plan.exact_rows is None

    @property
    def vision_cache_bytes(self) -> int | None:
        """Limit of the vision cache; None: see hippo.catalog.sizes.cache_limit."""
        return None if self.vision_cache_mb is None else self.vision_cache_mb * _MB

    @property
    def media_cache_bytes(self) -> int | None:
        """Limit of the media cache; None: see hippo.catalog.sizes.cache_limit."""
        return None if self.media_cache_mb is None else self.media_cache_mb * _MB

    @property
    def first_device(self) -> str:
        """The device of the vision tower."""
        return self.device

    def shared_frames(self) -> "SharedFrames | None":
        """Returns the frames shared with another service; raises SettingsError for a folder that
        cannot be made."""
        if not self.shared_frames_dir:
            return None
        # Imported here, because --help and a wrong flag need not wait for torch.
        from hippo.video.shared import SharedFrames

        try:
            return SharedFrames(Path(self.shared_frames_dir), self.shared_frames_mb * _MB)
        except OSError as error:
            raise SettingsError(
                f"--shared-frames-dir {self.shared_frames_dir} cannot be used: {error.strerror}"
            ) from None

    def frame_limits(self, model: FrameLimits) -> FrameLimits:
        """Returns the model's limits with the operator's in their place."""
        if self.video_fps:
            model = replace(model, fps=self.video_fps, num_frames=0)
        if self.max_video_pixels:
            least = min(model.video_pixels[0], self.max_video_pixels)
            model = replace(model, video_pixels=(least, self.max_video_pixels))
        if self.max_image_pixels:
            least = min(model.image_pixels[0], self.max_image_pixels)
            model = replace(model, image_pixels=(least, self.max_image_pixels))
        return replace(model, as_shown=self.video_as_shown)

    def decode_limits(self) -> DecodeLimits:
        """Returns the limits of decoding."""
        return DecodeLimits(
            max_frames=self.max_frames,
            max_pixels=self.max_frame_pixels,
            max_duration_s=self.max_video_seconds,
            max_streams=self.max_video_streams,
            max_stored_frames=self.max_stored_frames,
            max_stored_fps=self.max_stored_fps,
            max_bytes=self.max_message_bytes,
            timeout_s=self.decode_seconds,
            max_memory_bytes=self.decode_mib * _MIB,
        )
