"""Settings of the gateway: flags, or the environment with the prefix HIPPO_GATEWAY."""

import re
from dataclasses import dataclass
from typing import Literal

import httpx

from gateway.common.keys import Limits
from hippo.base.config import ProcessSettings, SettingsError, check_ranges, flag, setting
from hippo.base.local_files import check_directories
from hippo.base.validation import MAX_TEMPERATURE
from hippo.errors import InvalidRequestError
from hippo.rpc.options import DEFAULT_SILENCE_SECONDS, TlsFiles
from hippo.speculation.policies import DEFAULT_GAMMA, MAX_DRAFT_TOKENS, POLICY_NAMES
from hippo.types import MIN_VISUAL_TOKENS, PRUNING_RATIO, PruningStrategy

ENV_PREFIX = "HIPPO_GATEWAY"
PRUNING_STRATEGIES = tuple(strategy.value for strategy in PruningStrategy)


@dataclass(frozen=True, slots=True)
class GatewaySettings(ProcessSettings):
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
        5.0, help="seconds between two look-ups of each dns+ name of services", above=0
    )
    services_tls: bool = setting(False, help="connect to draft and target by TLS")
    services_tls_ca: str = setting(
        "", help="PEM file of the CA that signed their certificates; empty: the system's CAs"
    )
    services_tls_cert: str = setting("", help="PEM file of the gateway's certificate (mutual TLS)")
    services_tls_key: str = setting("", help="PEM file of that certificate's private key")
    port: int = setting(8000, help="port to listen on; 0 takes a free one", least=0, most=65535)
    cpu_core: int | None = setting(None, help="pin the process to this core")

    policy: str = setting("adaptive", help="default policy", choices=POLICY_NAMES)
    gamma: int | Literal["auto"] = setting(
        DEFAULT_GAMMA,
        help="default draft length of serial and vpsd; auto: the measured time of a target step "
        "over the time of a draft step",
        least=1,
    )
    max_draft_tokens: int = setting(
        MAX_DRAFT_TOKENS, help="most draft tokens verified in one forward", least=1
    )
    pruning_strategy: str = setting(
        "holistic",
        help="default choice of the draft's visual tokens",
        choices=PRUNING_STRATEGIES,
    )
    pruning_ratio: float = setting(
        PRUNING_RATIO,
        help="default share of visual tokens that the draft does not see",
        least=0,
        most=0.99,
    )
    pruning_min_visual_tokens: int = setting(
        MIN_VISUAL_TOKENS,
        help="prompts with fewer visual tokens are not pruned, unless the request sets pruning",
        least=0,
    )
    allowed_pruning_strategies: tuple[str, ...] = setting(
        PRUNING_STRATEGIES, help="pruning strategies that requests may choose, the default included"
    )
    draft_stall_s: float = setting(
        5.0, help="a request drops a draft whose tokens are overdue for this many seconds", above=0
    )
    services_silence_s: float = setting(
        DEFAULT_SILENCE_SECONDS,
        help="a service without a reply to pings for this many seconds counts as lost",
        above=0,
    )
    calibration_share: float = setting(
        0.01,
        help="share of the requests without a policy that run target-only to measure the speedup "
        "baseline; 0: none",
        least=0,
        most=1,
    )

    api_keys: tuple[str, ...] = setting(
        (),
        help="name=key of each client, separated by commas; empty: no key is needed. All users of "
        "a machine see command lines: use the environment or --api-keys-file",
    )
    api_keys_file: str = setting(
        "", help="TOML file of further keys with individual limits (docs/api.md)"
    )
    key_requests_per_minute: int = setting(
        0, help="requests per minute per key; 0: no limit", least=0
    )
    key_concurrent_requests: int = setting(
        0, help="concurrent requests per key; 0: no limit", least=0
    )
    key_visual_tokens_per_minute: int = setting(
        0, help="visual tokens per minute per key; 0: no limit", least=0
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
        help="host names in the URLs of this server, in addition to localhost, addresses and names "
        "without a dot (*.example.com: its subdomains; *: all); empty: none, or all if there are "
        "API keys",
    )
    max_connections: int = setting(
        1024, help="most connections of clients; one address may have half of them", least=1
    )
    page: bool = setting(
        True, help="serve a web page at / that asks, and shows what both devices did"
    )
    page_samples: str = setting(
        "", help="directory of sample videos that the page offers; empty: none"
    )

    default_max_tokens: int = setting(512, help="max_tokens of requests that set none", least=1)
    default_temperature: float = setting(
        1.0,
        help="temperature of requests that set none: 0 (greedy) to 2",
        least=0,
        most=MAX_TEMPERATURE,
    )
    default_top_p: float = setting(
        1.0, help="top_p of requests that set none: above 0, to 1", above=0, most=1
    )
    max_choices: int = setting(8, help="most choices (n) of one request", least=1)
    request_timeout_s: float = setting(
        600.0, help="most seconds for one request; 0: no limit", least=0
    )
    shutdown_grace_s: float = setting(
        30.0, help="seconds for running answers after SIGTERM", least=0
    )
    max_body_bytes: int = setting(
        128 << 20,
        help="largest request body, in bytes, where a data: URL takes 4/3 of its file; uploads are "
        "limited by --max-media-bytes instead",
        least=1,
    )
    stream_keepalive_s: float = setting(
        15.0, help="send a comment in a stream after this many silent seconds; 0: never", least=0
    )

    max_visual_tokens: int | None = setting(
        None,
        help="most visual tokens of a request's videos together; default: three quarters of the "
        "target's context",
        least=1,
    )
    max_media_bytes: int = setting(4 << 30, help="largest video or image file, in bytes", least=1)
    max_message_mib: int = setting(
        256,
        help="most MiB of media in a gRPC message, the services' --max-message-mib; bounds the "
        "media of a request that the gateway holds in memory: data: URLs, fetched URLs, and files "
        "that the services cannot open by path",
        least=1,
    )
    max_held_mib: int | None = setting(
        None,
        help="most MiB of bodies and media that all requests hold in memory, at most half of "
        "them for one key (without keys: for one address); for a moment a request takes four "
        "times its body; default: twice the largest body and the most media of one request "
        "(--max-body-bytes, --max-message-mib)",
        least=1,
    )
    media_timeout_s: float = setting(30.0, help="most seconds to fetch one media URL", above=0)
    allowed_local_media_path: tuple[str, ...] = setting(
        (),
        help="directories, separated by commas, of media paths that requests may name; empty: no "
        "paths",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (), help="domains of media URLs (*.example.com: its subdomains); empty: no URLs"
    )
    max_upload_bytes: int = setting(
        16 << 30, help="total bytes of stored uploads (POST /v1/videos); 0: no uploads", least=0
    )
    max_uploads: int = setting(
        1000, help="most stored uploads; one key may have half of them, and of the bytes", least=1
    )
    upload_ttl_s: float = setting(3600.0, help="seconds that an uploaded video is kept", above=0)
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
        check_ranges(self)
        strategies, option = self.allowed_pruning_strategies, "--allowed-pruning-strategies"
        known = f"some of {', '.join(PRUNING_STRATEGIES)}"
        default = f"the default {self.pruning_strategy} (--pruning-strategy) among them"
        self._require(set(strategies) <= set(PRUNING_STRATEGIES), option, known)
        self._require(self.pruning_strategy in strategies, option, default)
        for name in self.allowed_hosts:
            is_name = re.fullmatch(r"\*|(\*\.)?[^\s/:*]+", name)
            self._require(is_name, "--allowed-hosts", "names such as hippo.example.com")
        for name in self.allowed_media_domains:
            host = name.rstrip(".").removeprefix("*.")
            is_host = _is_host(host) and not host.startswith(".")
            self._require(is_host, "--allowed-media-domains", "names such as media.example.com")
        for addresses, option in ((self.target, "--target"), (self.draft, "--draft")):
            for address in addresses:
                is_address = re.fullmatch(r".+:\d+", address)
                self._require(is_address, option, f"host:port, not {address!r}")
            self._require(len(set(addresses)) == len(addresses), option, "each address once")
        self._require(self.target, "--target", "host:port")
        if (tls := self.tls) is not None:
            try:
                tls.channel_credentials()
            except InvalidRequestError as error:
                raise SettingsError(f"--services-tls: {error.message}") from None
        has_keys = self.api_keys or self.api_keys_file
        for name in Limits.model_fields:
            is_fine = has_keys or not getattr(self, f"key_{name}")
            expected = "API keys beside it (--api-keys, --api-keys-file)"
            self._require(is_fine, flag(f"key_{name}"), expected)
        for origin in self.cors_origins:
            is_origin = re.fullmatch(r"\*|https?://[^/\s]+", origin)
            self._require(is_origin, "--cors-origins", "origins such as https://app.example")
        for name in ("upload_dir", "page_samples"):
            check_directories(filter(None, [getattr(self, name)]), flag(name))
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
        files = (self.services_tls_cert, self.services_tls_key, self.services_tls_ca)
        if self.services_tls:
            return TlsFiles(*files)
        self._require(not any(files), "--services-tls-*", "--services-tls with them")
        return None

    @staticmethod
    def _require(holds: object, option: str, expected: str) -> None:
        if not holds:
            raise SettingsError(f"{option}: expected {expected}")


def _is_host(name: str) -> bool:
    """Whether a name can be the host of a URL, in ASCII or not."""
    try:
        return bool(httpx.URL(host=name).host)
    except httpx.InvalidURL:
        return False
