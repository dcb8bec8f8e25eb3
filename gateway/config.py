"""Settings of the gateway: flags, or the environment with the prefix HIPPO_GATEWAY."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hippo.config import SettingsError, setting
from hippo.speculation.policies import POLICY_NAMES
from hippo.types import PruningStrategy

ENV_PREFIX = "HIPPO_GATEWAY"
PRUNING_STRATEGIES = tuple(strategy.value for strategy in PruningStrategy)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What an operator can choose."""

    target: str = setting(help="address of the target service, host:port")
    draft: str = setting("", help="address of the draft service, host:port; empty: target-only")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="port to listen on; 0 takes a free one")
    port_file: str | None = setting(None, help="file to write the bound port to")
    cpu_core: int | None = setting(None, help="pin the process to this core")
    log_level: str = setting(
        "info", help="least level logged", choices=("debug", "info", "warning", "error")
    )
    log_style: str = setting("text", help="form of the log lines", choices=("text", "json"))

    policy: str = setting("adaptive", help="speculation policy by default", choices=POLICY_NAMES)
    gamma: int = setting(5, help="block length of serial and vpsd by default")
    max_draft_tokens: int = setting(16, help="most draft tokens verified in one forward")
    pruning_strategy: str = setting(
        "holistic",
        help="how the draft's visual tokens are chosen by default",
        choices=PRUNING_STRATEGIES,
    )
    pruning_ratio: float = setting(0.9, help="share of visual tokens the draft does not see")
    pruning_min_visual_tokens: int = setting(
        512, help="prompts with fewer visual tokens are not pruned, unless the request says how"
    )
    allowed_pruning_strategies: tuple[str, ...] = setting(
        PRUNING_STRATEGIES, help="pruning strategies that requests may choose, the default included"
    )
    draft_stall_s: float = setting(
        5.0, help="a draft that owes tokens for this long is given up for the request"
    )
    calibration_share: float = setting(
        0.01,
        help="share of requests run target-only to measure the baseline of the speedup, of those "
        "that name no policy; 0: none",
    )

    default_max_tokens: int = setting(512, help="completion limit of requests that set none")
    request_timeout_s: float = setting(600.0, help="longest time for one request; 0: no limit")
    shutdown_grace_s: float = setting(30.0, help="how long SIGTERM waits for running answers")
    max_body_bytes: int = setting(128 << 20, help="largest request body")

    max_media_items: int = setting(8, help="most videos and images in one request")
    max_media_bytes: int = setting(64 << 20, help="largest video or image file")
    media_timeout_s: float = setting(30.0, help="longest time to fetch one media URL")
    allowed_media_dirs: tuple[str, ...] = setting(
        (), help="directories that media paths may lie under; none: paths are refused"
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (), help="domains that media URLs may name (*.example.com: its subdomains)"
    )
    allow_http_media: bool = setting(False, help="media URLs may be http as well as https")
    allow_private_media_addresses: bool = setting(
        False, help="media URLs may resolve to loopback and private addresses"
    )

    def __post_init__(self) -> None:
        """Raises SettingsError for values that cannot work."""
        self._require(0 <= self.port <= 65535, "--port", "0 to 65535")
        self._require(0.0 <= self.pruning_ratio <= 0.99, "--pruning-ratio", "0 to 0.99")
        self._require(
            set(self.allowed_pruning_strategies) <= set(PRUNING_STRATEGIES),
            "--allowed-pruning-strategies",
            f"some of {', '.join(PRUNING_STRATEGIES)}",
        )
        self._require(
            self.pruning_strategy in self.allowed_pruning_strategies,
            "--allowed-pruning-strategies",
            f"the default {self.pruning_strategy} (--pruning-strategy) among them",
        )
        for name in (
            "gamma", "max_draft_tokens", "default_max_tokens", "max_body_bytes",
            "max_media_items", "max_media_bytes", "media_timeout_s", "draft_stall_s",
        ):  # fmt: skip
            self._require(getattr(self, name) > 0, "--" + name.replace("_", "-"), "above 0")
        self._require(0.0 <= self.calibration_share <= 1.0, "--calibration-share", "0 to 1")
        for name in ("request_timeout_s", "shutdown_grace_s", "pruning_min_visual_tokens"):
            self._require(getattr(self, name) >= 0, "--" + name.replace("_", "-"), "0 or more")
        for address, flag in ((self.target, "--target"), (self.draft, "--draft")):
            self._require(not address or ":" in address, flag, "host:port")
        self._require(bool(self.target), "--target", "host:port")
        for directory in self.allowed_media_dirs:
            if not Path(directory).is_dir():
                raise SettingsError(f"--allowed-media-dirs: {directory} is not a directory")

    @staticmethod
    def _require(holds: bool, flag: str, expected: str) -> None:
        if not holds:
            raise SettingsError(f"{flag}: expected {expected}")
