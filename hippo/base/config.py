"""Reads a settings dataclass: a flag overrides an environment variable, which overrides the
default."""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hippo.errors import InvalidRequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SettingsT = TypeVar("SettingsT", bound="DataclassInstance")

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class SettingsError(InvalidRequestError):
    """A setting is missing or has an unsuitable value."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    choices: Sequence[str] = (),
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> Any:
    """Declares one setting of a settings dataclass; a setting without a default is required.

    A number is one of ``least`` to ``most``, and greater than ``above``; ``check_ranges`` holds it
    to that.
    """
    bounds = {"least": least, "above": above, "most": most}
    metadata = {"help": help, "choices": tuple(choices), **bounds}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The settings that the gateway and both services have."""

    host: str = setting("127.0.0.1", help="address to listen on")
    port_file: str | None = setting(None, help="file to write the bound port to")
    log_level: str = setting(
        "info", help="lowest level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_style: str = setting("text", help="form of the log lines", choices=("text", "json"))


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
    variables = {spec.name: f"{env_prefix}_{spec.name}".upper() for spec in dataclasses.fields(cls)}
    for spec in dataclasses.fields(cls):
        _add_option(parser, spec, variables[spec.name], is_bool=hints[spec.name] is bool)
    given = vars(parser.parse_args(list(argv)))
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        source, variable, told = flag(spec.name), variables[spec.name], spec.metadata
        if (raw := given.get(spec.name)) is None and (raw := env.get(variable)) is not None:
            source = variable
        if raw is not None:
            values[spec.name] = _parse(raw, hints[spec.name], source)
            if told["choices"] and values[spec.name] not in told["choices"]:
                raise SettingsError(
                    f"{source}={raw!r}: expected one of {', '.join(told['choices'])}"
                )
        elif spec.default is dataclasses.MISSING:
            raise SettingsError(f"{source} (or {variable}) is required: {told['help']}")
    return cls(**values)


def check_ranges(settings: "DataclassInstance") -> None:
    """Raises SettingsError for a number outside its setting's bounds; None and auto are allowed."""
    for spec in dataclasses.fields(settings):
        value = getattr(settings, spec.name)
        least, above, most = (spec.metadata[name] for name in ("least", "above", "most"))
        is_bounded = max(least, above) > -math.inf or most < math.inf
        if not is_bounded or value is None or isinstance(value, str):
            continue
        if above < value and least <= value <= most:
            continue
        if above > -math.inf:
            words = f"above {above:g}" + (f" and at most {most:g}" if most < math.inf else "")
        else:
            words = f"{least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
        auto = ", or auto" if typing.get_args(spec.type) else ""
        raise SettingsError(f"{flag(spec.name)} is {value}; it must be {words}{auto}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_text(value: Any) -> str:
    """Returns a setting's value as a flag or a variable takes it; None is empty."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _add_option(
    parser: argparse.ArgumentParser, spec: dataclasses.Field[Any], variable: str, *, is_bool: bool
) -> None:
    text = f"{spec.metadata['help']} [env {variable}]"
    if spec.default is dataclasses.MISSING:
        text += " (required)"
    elif shown := as_text(spec.default):
        text += f" (default: {shown})"
    option: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS}
    if is_bool:
        no: dict[str, Any] = {"action": "store_const", "const": "false", **option}
        parser.add_argument(flag("no_" + spec.name), help=argparse.SUPPRESS, **no)
        option |= {"nargs": "?", "const": "true"}
    metavar = spec.name.split("_")[-1].upper()
    parser.add_argument(flag(spec.name), metavar=metavar, help=text.replace("%", "%%"), **option)


def _parse(raw: str, hint: Any, source: str) -> Any:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if is_union else (hint,)
    kind = kinds[0]
    if kind is str:
        return raw
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if is_union and raw == "auto":
        return None if type(None) in kinds else "auto"
    try:
        return _BOOLEANS[raw.strip().lower()] if kind is bool else kind(raw)
    except (KeyError, ValueError):
        noun = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        noun += ", or auto" if is_union else ""
        raise SettingsError(f"{source}={raw!r}: expected {noun}") from None
