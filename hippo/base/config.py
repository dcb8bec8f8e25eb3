"""Reads a settings dataclass: a flag overrides an environment variable, which overrides the
default."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hippo.errors import InvalidRequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_AUTO = typing.Literal["auto"]
SettingsT = TypeVar("SettingsT", bound="DataclassInstance")


class SettingsError(InvalidRequestError):
    """A setting is missing or has an unsuitable value."""


def setting(default: Any = dataclasses.MISSING, *, help: str, choices: Sequence[str] = ()) -> Any:
    """Declares one setting of a settings dataclass; a setting without a default is required."""
    metadata = {"help": help, "choices": tuple(choices)}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load_settings(
    cls: type[SettingsT],
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    env_prefix: str,
    prog: str,
    description: str,
) -> SettingsT:
    """Reads ``cls`` from flags (``--max-tokens``), then the environment (``PREFIX_MAX_TOKENS``).

    Field types may be str, int, float, bool (``--flag``, ``--flag false``, ``--no-flag``),
    tuple[str, ...] (comma-separated), and each type ``| None``; ``auto`` is a number's None, or
    itself for a type ``| Literal["auto"]``. The dataclass's ``__post_init__`` may raise
    SettingsError for values that do not go together. Raises SettingsError with the name of the flag
    or variable for a missing or wrong value.
    """
    hints = typing.get_type_hints(cls)
    parser = argparse.ArgumentParser(prog=prog, description=description)
    for spec in dataclasses.fields(cls):
        required = spec.default is dataclasses.MISSING
        text = f"{spec.metadata['help']} [env {_env_name(env_prefix, spec.name)}]"
        if required:
            text += " (required)"
        elif spec.default not in (None, "", ()):
            text += f" (default: {_show(spec.default)})"
        is_bool = _base_type(hints[spec.name]) is bool
        optional_value: dict[str, Any] = {"nargs": "?", "const": "true"} if is_bool else {}
        parser.add_argument(
            _flag(spec.name),
            dest=spec.name,
            default=argparse.SUPPRESS,
            metavar=spec.name.split("_")[-1].upper(),
            help=text.replace("%", "%%"),
            **optional_value,
        )
        if is_bool:
            parser.add_argument(
                _flag("no_" + spec.name),
                dest=spec.name,
                default=argparse.SUPPRESS,
                action="store_const",
                const="false",
                help=argparse.SUPPRESS,
            )
    given = vars(parser.parse_args(list(argv)))
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        source = _flag(spec.name)
        raw = given.get(spec.name)
        if raw is None and (raw := env.get(_env_name(env_prefix, spec.name))) is not None:
            source = _env_name(env_prefix, spec.name)
        if raw is None:
            if spec.default is dataclasses.MISSING:
                raise SettingsError(
                    f"{_flag(spec.name)} (or {_env_name(env_prefix, spec.name)}) is required: "
                    f"{spec.metadata['help']}"
                )
            continue
        values[spec.name] = _parse(raw, hints[spec.name], source)
        choices = spec.metadata["choices"]
        if choices and values[spec.name] not in choices:
            raise SettingsError(f"{source}={raw!r}: expected one of {', '.join(choices)}")
    return cls(**values)


def require_least(settings: object, least: int, *names: str) -> None:
    """Raises SettingsError if a setting in ``names`` is below ``least``; None is allowed."""
    words = f"be at least {least}" if least else "not be below 0"
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise SettingsError(f"{_flag(name)} is {value:g}; it must {words}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _env_name(prefix: str, name: str) -> str:
    return f"{prefix}_{name}".upper()


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _base_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _parse(raw: str, hint: Any, source: str) -> Any:
    kind = _base_type(hint)
    if kind is str:
        return raw
    if kind is bool:
        lowered = raw.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise SettingsError(f"{source}={raw!r}: expected true or false")
    if kind in (int, float):
        has_auto = kind is not hint
        if raw == "auto" and has_auto:
            return "auto" if _AUTO in typing.get_args(hint) else None
        try:
            return kind(raw)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            noun += ", or auto" if has_auto else ""
            raise SettingsError(f"{source}={raw!r}: expected {noun}") from None
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    raise TypeError(f"settings field of unsupported type {hint!r}")
