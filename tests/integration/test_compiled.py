"""A pair with compiled steps gives the target-only output, token for token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hippo.config import SettingsError
from hippo.models.loading import load_model
from hippo.types import SamplingParams
from services.draft.config import DraftSettings
from services.target.config import TargetSettings
from tests.integration.test_service_checkpoints import NoiseDecoder
from tests.support.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

pytestmark = pytest.mark.timeout(400)  # a compiler may run in the first test

SAMPLED = SamplingParams(temperature=0.9, seed=5)


async def test_every_policy_gives_the_target_only_output_and_that_of_a_pair_without(
    draft_checkpoint: Path, target_checkpoint: Path, compile_folder: Path
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_slots": 3, "max_context_length": 512}
    decoder = NoiseDecoder()
    requests = [
        toy_request("a short one", sampling=SAMPLED, max_tokens=120, end_token_ids=()),
        toy_request("and a longer question", max_tokens=160, end_token_ids=()),
    ]
    async with serving_target(load_model(str(target_checkpoint), **options), decoder) as (_, plain):
        alone = [(await target_only(plain, request)).token_ids for request in requests]
    options["compile_folder"] = compile_folder
    async with (
        serving_target(load_model(str(target_checkpoint), **options), decoder) as (_, target),
        serving_draft(load_model(str(draft_checkpoint), **options), decoder) as (_, draft),
    ):
        for policy in POLICIES:
            one_by_one = [await relay(draft, target, request, policy) for request in requests]
            assert [answer.token_ids for answer in one_by_one] == alone, policy
            together = await asyncio.gather(
                *(relay(draft, target, request, policy) for request in requests)
            )
            assert [answer.token_ids for answer in together] == alone, policy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": "on", "device": "cuda"}, "--compile on is for a CPU"),
        ({"compile": "on", "deterministic": True}, "exclude each other"),
        ({"compile": "on", "tensor_parallel": 2}, "leave --tensor-parallel out"),
        ({"compile": "off", "compile_cache": "x"}, "--compile-cache is for --compile auto"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        TargetSettings(model="m", **changes)


def test_compiled_layers_are_kept_where_it_is_said_or_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DraftSettings(model="m").compile_folder == tmp_path / "hippo"
    chosen = DraftSettings(model="m", compile_cache=str(tmp_path / "here"))
    assert chosen.compile_folder == tmp_path / "here"


@pytest.mark.parametrize(
    "changes",
    [{"compile": "off"}, {"device": "cuda"}, {"deterministic": True}, {"devices": ("cuda:0",) * 2}],
)
def test_what_cannot_be_compiled_is_not_unless_it_must(changes: dict[str, Any]) -> None:
    if "devices" in changes:
        changes = {**changes, "tensor_parallel": 2}
    settings = TargetSettings(model="m", **changes)
    assert settings.compile_folder is None and not settings.must_compile


def test_without_a_home_folder_nothing_is_compiled_unless_a_folder_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert DraftSettings(model="m").compile_folder is None
    with pytest.raises(SettingsError, match="--compile on needs --compile-cache"):
        DraftSettings(model="m", compile="on")
    chosen = DraftSettings(model="m", compile="on", compile_cache=str(tmp_path))
    assert chosen.compile_folder == tmp_path


@pytest.mark.parametrize(
    ("choice", "waits"), [("auto", False), ("wait", True), ("on", True), ("off", False)]
)
def test_who_says_so_waits_for_what_is_compiled(tmp_path: Path, choice: str, waits: bool) -> None:
    kept: dict[str, Any] = {} if choice == "off" else {"compile_cache": str(tmp_path)}
    settings = TargetSettings(model="m", compile=choice, **kept)
    assert settings.waits_for_code == waits
    assert settings.must_compile == (choice == "on")
    assert (settings.compile_folder is None) == (choice == "off")
