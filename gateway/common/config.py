"""Settings of the gateway: flags, or the environment with the prefix HIPPO_GATEWAY."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hippo.base.config import SettingsError, setting
from hippo.base.local_files import check_directories
from hippo.base.validation import validate_sampling
from hippo.errors import InvalidRequestError
from hippo.rpc.options import DEFAULT_SILENCE_SECONDS, TlsFiles
from hippo.speculation.policies import DEFAULT_GAMMA, MAX_DRAFT_TOKENS, POLICY_NAMES
from hippo.types import MIN_VISUAL_TOKENS, PRUNING_RATIO, PruningStrategy, SamplingParams

ENV_PREFIX = "HIPPO_GATEWAY"
_KEY_LIMITS = (
    "key_requests_per_minute",
    "key_concurrent_requests",
    "key_visual_tokens_per_minute",
)
PRUNING_STRATEGIES = tuple(strategy.value for strategy in PruningStrategy)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The operator's settings; each field's ``help`` explains it."""

    target: tuple[str, ...] = setting(
        help="host:port of the target service; several, separated by commas, share the requests; "
        "dns+name:port: one at each address of the name"
    )
    draft: tuple[str, ...] = setting(
        (),
        help="host:port of the draft service, or several; each serves all compatible targets; "
        "dns+name:port as for --target; empty: target-only",
    )
    lookup_period_s: float = setting(
        5.0, help="seconds between two look-ups of each dns+ name of services"
    )
    services_tls: bool = setting(False, help="connect to draft and target by TLS")
    services_tls_ca: str = setting(
        "", help="PEM file of the CA that signed their certificates; empty: the system's CAs"
    )
    services_tls_cert: str = setting("", help="PEM file of the gateway's certificate (mutual TLS)")
    services_tls_key: str = setting("", help="PEM file of that certificate's private key")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="port to listen on; 0 takes a free one")
    port_file: str | None = setting(None, help="file to write the bound port to")
    cpu_core: int | None = setting(None, help="pin the process to this core")
    log_level: str = setting(
        "info", help="lowest level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_style: str = setting("text", help="form of the log lines", choices=("text", "json"))

    policy: str = setting("adaptive", help="default policy", choices=POLICY_NAMES)
    gamma: int | Literal["auto"] = setting(
        DEFAULT_GAMMA,
        help="default draft length of serial and vpsd; auto: the measured time of a target step "
        "over that of a draft step",
    )
    max_draft_tokens: int = setting(
        MAX_DRAFT_TOKENS, help="most draft tokens verified in one forward"
    )
    pruning_strategy: str = setting(
        "holistic",
        help="default choice of the draft's visual tokens",
        choices=PRUNING_STRATEGIES,
    )
    pruning_ratio: float = setting(
        PRUNING_RATIO, help="default share of visual tokens that the draft does not see"
    )
    pruning_min_visual_tokens: int = setting(
        MIN_VISUAL_TOKENS,
        help="prompts with fewer visual tokens are not pruned, unless the request sets pruning",
    )
    allowed_pruning_strategies: tuple[str, ...] = setting(
        PRUNING_STRATEGIES, help="pruning strategies that requests may choose, the default included"
    )
    draft_stall_s: float = setting(
        5.0, help="a request drops a draft whose tokens are overdue for this many seconds"
    )
    services_silence_s: float = setting(
        DEFAULT_SILENCE_SECONDS,
        help="a service without a reply to pings for this many seconds counts as lost",
    )
    calibration_share: float = setting(
        0.01,
        help="share of the requests without a policy that run target-only to measure the speedup "
        "baseline; 0: none",
    )

    api_keys: tuple[str, ...] = setting(
        (),
        help="name=key of each client, separated by commas; empty: no key is needed. All users of "
        "a machine see command lines: use the environment or --api-keys-file",
    )
    api_keys_file: str = setting(
        "", help="TOML file of further keys with individual limits (docs/api.md)"
    )
    key_requests_per_minute: int = setting(0, help="requests per minute per key; 0: no limit")
    key_concurrent_requests: int = setting(0, help="concurrent requests per key; 0: no limit")
    key_visual_tokens_per_minute: int = setting(
        0, help="visual tokens per minute per key; 0: no limit"
    )
    share_caches: bool = setting(
        False,
        help="keys share cached prompts and media: faster where they ask about the same, but from "
        "num_cached_tokens and times a key can learn what another one has asked",
    )
    cors_origins: tuple[str, ...] = setting(
        (), help="origins that may send browser requests (https://app.example); empty: none"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        help="host names in the URLs of this server, beside localhost, addresses and names without "
        "a dot (*.example.com: its subdomains; *: all); empty: none, or all if there are API keys",
    )
    max_connections: int = setting(
        1024, help="most connections of clients; one address may have half of them"
    )
    page: bool = setting(
        True, help="serve a web page at / that asks, and shows what both devices did"
    )
    page_samples: str = setting(
        "", help="directory of sample videos that the page offers; empty: none"
    )

    default_max_tokens: int = setting(512, help="max_tokens of requests that set none")
    default_temperature: float = setting(
        1.0, help="temperature of requests that set none: 0 (greedy) to 2"
    )
    default_top_p: float = setting(1.0, help="top_p of requests that set none: above 0, to 1")
    max_choices: int = setting(8, help="most choices (n) of one request")
    request_timeout_s: float = setting(600.0, help="most seconds for one request; 0: no limit")
    shutdown_grace_s: float = setting(30.0, help="seconds for running answers after SIGTERM")
    max_body_bytes: int = setting(
        128 << 20,
        help="largest request body, in bytes, where a data: URL takes 4/3 of its file; uploads are "
        "limited by --max-media-bytes instead",
    )
    stream_keepalive_s: float = setting(
        15.0, help="send a comment in a stream after this many silent seconds; 0: never"
    )

    max_visual_tokens: int | None = setting(
        None,
        help="most visual tokens of a request's videos together; default: three quarters of the "
        "target's context",
    )
    max_media_bytes: int = setting(4 << 30, help="largest video or image file, in bytes")
    max_message_mib: int = setting(
        256,
        help="most MiB of media in a gRPC message, the services' --max-message-mib; bounds the "
        "media of a request that the gateway holds in memory: data: URLs, fetched URLs, and files "
        "that the services cannot open by path",
    )
    max_held_mib: int | None = setting(
        None,
        help="most MiB of bodies and media that all requests hold in memory, half of them those of "
        "one key (without keys: of one address); for a moment a request takes four times its body; "
        "default: twice the largest body and the most media of one request (--max-body-bytes, "
        "--max-message-mib)",
    )
    media_timeout_s: float = setting(30.0, help="most seconds to fetch one media URL")
    allowed_local_media_path: tuple[str, ...] = setting(
        (),
        help="directories, separated by commas, of media paths that requests may name; empty: no "
        "paths",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (), help="domains of media URLs (*.example.com: its subdomains); empty: no URLs"
    )
    max_upload_bytes: int = setting(
        16 << 30, help="total bytes of stored uploads (POST /v1/videos); 0: no uploads"
    )
    max_uploads: int = setting(
        1000, help="most stored uploads; one key may have half of them, and of the bytes"
    )
    upload_ttl_s: float = setting(3600.0, help="seconds that an uploaded video is kept")
    upload_dir: str = setting(
        "",
        help="directory for uploaded videos; empty: the system's for temporary files. Services "
        "with it in their --allowed-local-media-path open uploads there",
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
            "max_draft_tokens", "default_max_tokens", "max_body_bytes",
            "max_message_mib", "max_media_bytes", "media_timeout_s", "draft_stall_s",
            "upload_ttl_s", "services_silence_s", "max_choices", "lookup_period_s",
            "max_connections", "max_uploads",
        ):  # fmt: skip
            self._require(getattr(self, name) > 0, "--" + name.replace("_", "-"), "above 0")
        self._require(self.gamma == "auto" or self.gamma > 0, "--gamma", "auto, or above 0")
        for name in ("temperature", "top_p"):
            try:
                validate_sampling(SamplingParams(**{name: getattr(self, f"default_{name}")}))
            except InvalidRequestError as error:
                flag = "--default-" + name.replace("_", "-")
                raise SettingsError(f"{flag}: {error.message}") from None
        is_limit = self.max_visual_tokens is None or self.max_visual_tokens > 0
        self._require(is_limit, "--max-visual-tokens", "1 or more")
        is_limit = self.max_held_mib is None or self.max_held_mib > 0
        self._require(is_limit, "--max-held-mib", "1 or more")
        for name in self.allowed_hosts:
            is_name = name == "*" or re.fullmatch(r"(\*\.)?[^\s/:*]+", name)
            self._require(bool(is_name), "--allowed-hosts", "names such as hippo.example.com")
        self._require(0.0 <= self.calibration_share <= 1.0, "--calibration-share", "0 to 1")
        for name in (
            "request_timeout_s", "shutdown_grace_s", "pruning_min_visual_tokens",
            "stream_keepalive_s", "max_upload_bytes", *_KEY_LIMITS,
        ):  # fmt: skip
            self._require(getattr(self, name) >= 0, "--" + name.replace("_", "-"), "0 or more")
        for addresses, flag in ((self.target, "--target"), (self.draft, "--draft")):
            for address in addresses:
                host, _, port = address.rpartition(":")
                is_address = bool(host) and port.isdecimal()
                self._require(is_address, flag, f"host:port, not {address!r}")
            self._require(len(set(addresses)) == len(addresses), flag, "each address once")
        self._require(bool(self.target), "--target", "host:port")
        self._check_tls()
        has_keys = self.api_keys or self.api_keys_file
        for name in _KEY_LIMITS:
            flag = "--" + name.replace("_", "-")
            self._require(bool(has_keys or not getattr(self, name)), flag, "API keys beside it")
        for origin in self.cors_origins:
            is_origin = origin == "*" or re.fullmatch(r"https?://[^/\s]+", origin)
            self._require(bool(is_origin), "--cors-origins", "origins such as https://app.example")
        check_directories([self.upload_dir] if self.upload_dir else [], "--upload-dir")
        check_directories([self.page_samples] if self.page_samples else [], "--page-samples")
        check_directories(self.allowed_local_media_path, "--allowed-local-media-path")

    @property
    def max_message_bytes(self) -> int:
        return self.max_message_mib << 20

    @property
    def max_held_bytes(self) -> int:
        if self.max_held_mib is not None:
            return self.max_held_mib << 20
        return 2 * (self.max_body_bytes + self.max_message_bytes)

    @property
    def tls(self) -> TlsFiles | None:
        """TLS files for connections to the services; None: connections without TLS."""
        if not self.services_tls:
            return None
        return TlsFiles(
            cert=self.services_tls_cert, key=self.services_tls_key, ca=self.services_tls_ca
        )

    def _check_tls(self) -> None:
        files = (self.services_tls_ca, self.services_tls_cert, self.services_tls_key)
        self._require(self.services_tls or not any(files), "--services-tls-*", "--services-tls")
        if self.tls is not None:
            try:
                self.tls.channel_credentials()
            except InvalidRequestError as error:
                raise SettingsError(f"--services-tls: {error.message}") from None

    @staticmethod
    def _require(holds: bool, flag: str, expected: str) -> None:
        if not holds:
            raise SettingsError(f"{flag}: expected {expected}")
