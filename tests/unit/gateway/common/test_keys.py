"""API keys and their limits."""

import hashlib
from pathlib import Path

import pytest

from gateway.common.keys import Allowance, Limits, RateLimitedError, load_keyring
from hippo.base.config import SettingsError
from hippo.errors import InvalidRequestError
from tests.support.running.gateways import Clock

ALICE, BOB = "alice-has-this-secret", "bob-has-another-secret"


def _file(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _limited(**limits: int) -> tuple[Allowance, Clock]:
    clock = Clock()
    return Allowance("alice", Limits(**limits), clock_s=clock), clock


def _ask(allowance: Allowance) -> None:
    with allowance.admit():
        pass


def test_keys_are_told_apart() -> None:
    keyring = load_keyring((f"alice={ALICE}", f"bob={BOB}"), "", Limits())
    assert not keyring.is_open
    found = [keyring.find(key) for key in (ALICE, BOB, "", ALICE[:-1], ALICE + "x", "alice", "é")]
    assert [None if each is None else each.name for each in found] == ["alice", "bob", *[None] * 5]


def test_a_file_may_hold_hashes_and_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    text = f'[alice]\nkey = "{ALICE}"\n[bob]\nsha256 = "{digest}"\nconcurrent_requests = 1\n'
    keyring = load_keyring((), _file(tmp_path, text), Limits(concurrent_requests=2))
    alice, bob = keyring.find(ALICE), keyring.find(BOB)
    assert alice is not None and bob is not None
    with bob.admit(), pytest.raises(RateLimitedError):
        _ask(bob)
    with alice.admit(), alice.admit(), pytest.raises(RateLimitedError):
        _ask(alice)


@pytest.mark.parametrize(
    ("keys", "text", "expected"),
    [
        ((ALICE,), "", "not of the form name=key"),
        (("alice=short",), "", "5 characters; at least 16"),
        ((f"a b={ALICE}",), "", "'a b'"),
        ((f"alice={ALICE}", f"alice={BOB}"), "", "given twice"),
        ((f"alice={ALICE}", f"bob={ALICE}"), "", "are the same"),
        ((f"alice={ALICE}",), f'[alice]\nkey = "{BOB}"', "given twice"),
        ((), 'alice = "x"', "expected tables"),
        ((), "[alice]", "needs either key or sha256"),
        ((), f'[alice]\nkey = "{ALICE}"\nsha256 = "{"0" * 64}"', "either key or sha256"),
        ((), '[alice]\nsha256 = "00"', "sha256: String should match"),
        ((), "[alice]\nkey = 5", "key: Input should be a valid string"),
        ((), f'[alice]\nkey = "{ALICE}"\nlimit = 5', "(there are key, sha256, requests_per_minute"),
        ((), f'[alice]\nkey = "{ALICE}"\nrequests_per_minute = -1', "greater than or equal to 0"),
        ((), f'[alice]\nkey = "{ALICE}"\nrequests_per_minute = true', "a valid integer"),
        ((), "[alice", "is not TOML"),
        ((), "/does/not/exist", "No such file"),
    ],
)
def test_bad_keys_are_refused_without_showing_them(
    tmp_path: Path, keys: tuple[str, ...], text: str, expected: str
) -> None:
    path = text if text.startswith("/") else text and _file(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_keyring(keys, path, Limits())
    assert expected in caught.value.message
    assert ALICE not in caught.value.message and BOB not in caught.value.message


def test_requests_a_minute_are_spread_over_it() -> None:
    allowance, clock = _limited(requests_per_minute=6)
    for num_allowed, pause_s in ((6, 10.0), (1, 1000.0), (6, 0.0)):  # a minute's are saved up
        for _ in range(num_allowed):
            _ask(allowance)
        with pytest.raises(RateLimitedError) as caught:
            _ask(allowance)
        assert caught.value.retry_after_s == pytest.approx(10.0)
        clock.now_s += pause_s


def test_a_request_that_failed_makes_room_again() -> None:
    allowance, _ = _limited(concurrent_requests=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="it"), allowance.admit():
            raise ValueError("it")


def test_every_choice_counts_as_a_request_that_runs_and_all_as_one_that_is_made() -> None:
    allowance, clock = _limited(requests_per_minute=2, concurrent_requests=3)
    with allowance.admit() as first, allowance.admit() as second:
        first.add_choices(2)
        with pytest.raises(RateLimitedError):
            second.add_choices(2)
        with pytest.raises(RateLimitedError):
            _ask(allowance)
        first.release()
        second.add_choices(3)
    clock.now_s += 60.0
    for _ in range(2):
        with allowance.admit() as admission:
            admission.add_choices(3)
    with pytest.raises(InvalidRequestError, match="n is 4; key 'alice' may have 3") as caught:
        admission.add_choices(4)
    assert caught.value.param == "n"


def test_a_refused_request_counts_for_nothing() -> None:
    allowance, clock = _limited(requests_per_minute=1, concurrent_requests=1)
    with allowance.admit():
        clock.now_s += 60
        for _ in range(5):
            with pytest.raises(RateLimitedError):
                _ask(allowance)
    _ask(allowance)


def test_visual_tokens_are_paid_back_before_the_next_request() -> None:
    allowance, clock = _limited(visual_tokens_per_minute=600)
    with allowance.admit():
        allowance.charge_visual_tokens(1200)
    with pytest.raises(RateLimitedError) as caught:
        _ask(allowance)
    assert caught.value.retry_after_s == pytest.approx(60.0)
    clock.now_s += 60.0
    _ask(allowance)
