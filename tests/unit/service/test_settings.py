"""What the operator says about reuse."""

import pytest

from hippo.base.config import SettingsError, load_settings
from hippo.service.settings import EngineSettings
from services.draft.config import DraftSettings
from services.target.config import TargetSettings


def target(*argv: str, **env: str) -> TargetSettings:
    return load_settings(
        TargetSettings,
        ("--model", "m", *argv),
        env,
        env_prefix="HIPPO_TARGET",
        prog="target",
        description="",
    )


@pytest.mark.parametrize(
    ("argv", "env", "keeps_prefixes"),
    [
        ((), {}, True),
        (("--prefix-cache",), {}, True),
        (("--prefix-cache", "false"), {}, False),
        (("--no-prefix-cache",), {}, False),
        (("--deterministic",), {}, False),  # bits count
        ((), {"HIPPO_TARGET_PREFIX_CACHE": "false"}, False),
        (("--prefix-cache",), {"HIPPO_TARGET_PREFIX_CACHE": "false"}, True),  # flags go before
    ],
)
def test_prefixes_are_kept_unless_the_operator_says_no(
    argv: tuple[str, ...], env: dict[str, str], keeps_prefixes: bool
) -> None:
    assert target(*argv, **env).keeps_prefixes is keeps_prefixes


def test_the_vision_cache_is_given_in_megabytes() -> None:
    assert target().vision_cache_bytes is None
    assert target("--vision-cache-mb", "auto").vision_cache_bytes is None
    assert target("--vision-cache-mb", "0").vision_cache_bytes == 0
    assert target("--vision-cache-mb", "7").vision_cache_bytes == 7_000_000
    with pytest.raises(SettingsError, match="--vision-cache-mb is -1"):
        target("--vision-cache-mb", "-1")


def test_decoded_media_are_kept_in_megabytes_and_reckoned_where_they_lie() -> None:
    def on_device(settings: EngineSettings) -> int | None:
        return settings.load_plan.media_cache_bytes

    assert on_device(EngineSettings(model="m")) is None
    assert on_device(EngineSettings(model="m", media_cache_mb=3)) == 3_000_000
    assert on_device(EngineSettings(model="m", device="cuda")) == 0
    assert EngineSettings(model="m", device="cuda", media_cache_mb=3).media_cache_bytes == 3_000_000
    ranks = TargetSettings(model="m", tensor_parallel=2, devices=("cuda:0", "cuda:1"))
    assert on_device(ranks) == 0
    assert on_device(TargetSettings(model="m", tensor_parallel=2)) is None
    with pytest.raises(SettingsError, match="--media-cache-mb is -1"):
        EngineSettings(model="m", media_cache_mb=-1)


def test_a_draft_caches_what_a_pruned_prompt_needs_and_a_target_the_whole_context() -> None:
    def draft(cache_tokens: int | None = None) -> int:
        settings = DraftSettings(model="m", cache_tokens=cache_tokens)
        return settings.load_plan.slot_tokens(8192)

    assert target().load_plan.slot_tokens(8192) == 8192
    assert draft() == 2048 + 615
    assert draft(5000) == 5000
    with pytest.raises(SettingsError, match="--cache-tokens is 0; it must be at least 2"):
        draft(0)
