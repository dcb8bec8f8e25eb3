"""API keys: which clients may send requests, and how many.

Keys come from the environment (``name=key,name=key``) or from a TOML file. The file can hold the
SHA-256 of a key instead of the key itself, and limits for each key:

    [alice]
    key = "sk-..."
    requests_per_minute = 60

    [bob]
    sha256 = "9f86d0..."
    concurrent_requests = 4
    visual_tokens_per_minute = 200000
"""

import hashlib
import hmac
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hippo.base.config import SettingsError
from hippo.errors import InvalidRequestError, OverloadedError

_LEAST_KEY_LENGTH = 16
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class RateLimitedError(OverloadedError):
    """A key has reached a limit; after ``retry_after_s`` it may send a request again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Limits(BaseModel):
    """The limits of one key; 0 means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    requests_per_minute: int = Field(default=0, ge=0)
    concurrent_requests: int = Field(default=0, ge=0)
    visual_tokens_per_minute: int = Field(default=0, ge=0)


class _KeyTable(Limits):
    """A key's table in the file."""

    key: str | None = None
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")


class _Bucket:
    """A token bucket of capacity ``per_minute``, 0: unlimited; its level may fall below 0."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Returns the seconds until the level is ``amount``."""
        if not self._per_minute:
            return 0.0
        self._fill(now_s)
        return max(0.0, (amount - self._level) * 60 / self._per_minute)

    def take_amount(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        self._level += (now_s - self._filled_s) * self._per_minute / 60
        self._level = min(self._level, float(self._per_minute))
        self._filled_s = now_s


class Allowance:
    """Counts one key's use of the gateway and enforces its limits."""

    def __init__(
        self, name: str, limits: Limits, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._limits = limits
        self._clock_s = clock_s
        self.num_running = 0
        self.max_running = limits.concurrent_requests  # 0: no limit
        now_s = clock_s()
        self._requests = _Bucket(limits.requests_per_minute, now_s)
        self._visual_tokens = _Bucket(limits.visual_tokens_per_minute, now_s)

    def admit(self) -> "Admission":
        """Counts a request, whose body is not read yet, as running until it is released.

        Raises RateLimitedError when a limit is reached.
        """
        limits, now_s = self._limits, self._clock_s()
        self.check_running(1)
        if wait_s := self._visual_tokens.wait_s(0, now_s):
            raise RateLimitedError(
                f"key {self.name!r} has used its {limits.visual_tokens_per_minute} visual tokens "
                "a minute",
                retry_after_s=wait_s,
            )
        if wait_s := self._requests.wait_s(1, now_s):
            raise RateLimitedError(
                f"key {self.name!r} has made its {limits.requests_per_minute} requests a minute",
                retry_after_s=wait_s,
            )
        self._requests.take_amount(1, now_s)
        return Admission(self)

    def check_running(self, num_more: int) -> None:
        """Raises RateLimitedError if so many more requests would be too many at once."""
        most = self.max_running
        if most and self.num_running + num_more > most:
            raise RateLimitedError(
                f"key {self.name!r} has {self.num_running} requests running and may have {most}",
                retry_after_s=1.0,
            )

    def charge_visual_tokens(self, num_tokens: int) -> None:
        """Charges a prompt's visual tokens after it was read; an excess delays later requests."""
        self._visual_tokens.take_amount(num_tokens, self._clock_s())


class Admission:
    """A running request of a key, until it is released, at the end of a ``with`` block at last."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self._num_running = 0
        self._add(1)

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def add_choices(self, num_choices: int) -> None:
        """Counts each choice of the request as running.

        Raises RateLimitedError as ``Allowance.admit`` does, and InvalidRequestError for more
        choices than the limit of concurrent requests.
        """
        most = self.allowance.max_running
        if most and num_choices > most:
            raise InvalidRequestError(
                f"n is {num_choices}; key {self.allowance.name!r} may have {most} requests "
                "running, and each choice counts as one",
                param="n",
            )
        self.allowance.check_running(num_choices - 1)
        self._add(num_choices - 1)

    def release(self) -> None:
        """Ends the request; further calls do nothing."""
        self._add(-self._num_running)

    def _add(self, count: int) -> None:
        self._num_running += count
        self.allowance.num_running += count


class Keyring:
    """All API keys. Without any keys, every client may send requests."""

    def __init__(self, allowances: Mapping[bytes, Allowance]) -> None:
        self._allowances = dict(allowances)  # by SHA-256 of the key

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._allowances

    def find(self, key: str) -> Allowance | None:
        """Returns the key's allowance, None for an unknown key; takes equally long for all keys."""
        given = hashlib.sha256(key.encode()).digest()
        found = [each for each in self._allowances if hmac.compare_digest(each, given)]
        return self._allowances[found[0]] if found else None


def load_keyring(keys: Sequence[str], path: str, limits: Limits) -> Keyring:
    """Returns the keys given as ``name=key`` and in a TOML file.

    ``limits`` are the defaults of limits that the file does not set. Raises SettingsError, which
    never shows a key.
    """
    allowances: dict[bytes, Allowance] = {}

    def add(name: str, digest: bytes, own: Limits) -> None:
        if not _NAME.fullmatch(name):
            raise SettingsError(
                f"API key name {name!r}: expected 1 to 64 letters, digits or any of . _ @ -"
            )
        if name in (each.name for each in allowances.values()):
            raise SettingsError(f"API key name {name!r} is given twice")
        if digest in allowances:
            raise SettingsError(f"API keys {allowances[digest].name!r} and {name!r} are the same")
        allowances[digest] = Allowance(name, own)

    for number, given in enumerate(keys, 1):
        name, equals, key = given.partition("=")
        if not equals:
            raise SettingsError(f"--api-keys: number {number} is not of the form name=key")
        add(name.strip(), _digest_of(key.strip(), name), limits)
    for name, table in _read_file(path).items() if path else ():
        add(name, *_from_table(path, name, table, limits))
    return Keyring(allowances)


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--api-keys-file {path}: {error.strerror}") from None
    except ValueError as error:  # the error names the position, not the content
        raise SettingsError(f"--api-keys-file {path} is not TOML: {error}") from None


def _from_table(path: str, name: str, table: Any, limits: Limits) -> tuple[bytes, Limits]:
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: expected tables such as [alice], found {name!r}")
    try:
        own = _KeyTable.model_validate({**limits.model_dump(), **table})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        known = ", ".join(("key", "sha256", *Limits.model_fields))
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise SettingsError(f"{path}: [{name}]: {fault} (there are {known})") from None
    limits = Limits.model_validate(own.model_dump(exclude={"key", "sha256"}))
    if own.key is not None and own.sha256 is None:
        return _digest_of(own.key, name), limits
    if own.sha256 is not None and own.key is None:
        return bytes.fromhex(own.sha256), limits
    raise SettingsError(f"{path}: [{name}] needs either key or sha256")


def _digest_of(key: str, name: str) -> bytes:
    if len(key) < _LEAST_KEY_LENGTH:
        raise SettingsError(
            f"API key {name!r} has {len(key)} characters; at least {_LEAST_KEY_LENGTH} are needed"
        )
    return hashlib.sha256(key.encode()).digest()
