"""What one set-up costs, as plain numbers in milliseconds, and as the simulator's callables."""

from __future__ import annotations

import dataclasses
import json
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hippo.errors import InvalidRequestError
from hippo.speculation.simulator import Costs

_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of one forward: linear in rows and in cached tokens, with a step after the first row.

    ``several_ms`` is what a second row costs at once, because another kernel runs then. Where it
    was measured by itself what more rows cost, ``points`` says so instead of both: numbers of rows
    in ascending order, each with its milliseconds over one row (below 0 where another kernel is
    faster); linear between them and behind the last two.
    """

    one_row_ms: float
    several_ms: float = 0.0
    row_ms: float = 0.0  # each row after the first
    kilotoken_ms: float = 0.0  # each 1,000 tokens cached before the rows
    row_kilotoken_ms: float = 0.0  # the same, for each row after the first
    points: tuple[tuple[float, float], ...] = ()
    # What the first step behind a rest of 16 ms or more takes longer (behind a shorter one, so much
    # less): numbers of rows in ascending order, each with its milliseconds.
    cold_points: tuple[tuple[float, float], ...] = ()

    def ms(self, num_rows: int, context: int) -> float:
        """Milliseconds of ``num_rows`` rows (at least 1) behind ``context`` cached tokens."""
        num_more, kilotokens = num_rows - 1, context / 1000
        several = self.several_ms + self.row_ms * num_more if num_more else 0.0
        if self.points:
            several = line_through(self.points, num_rows)
        per_kilotoken = self.kilotoken_ms + self.row_kilotoken_ms * num_more
        return self.one_row_ms + several + per_kilotoken * kilotokens

    def cold_ms(self, num_rows: int) -> float:
        """Milliseconds that so many rows take longer behind a rest of 16 ms or more; more rows than
        the points have, as much as their most."""
        if not self.cold_points:
            return 0.0
        return line_through(self.cold_points, min(num_rows, self.cold_points[-1][0]))

    def scaled(self, factor: float) -> StepTime:
        """The same of a device that takes ``factor`` times as long."""
        numbers = {
            each.name: getattr(self, each.name) * factor
            for each in dataclasses.fields(self)
            if not each.name.endswith("points")
        }
        scaled = self.with_rows_scaled(factor).with_cold_scaled(factor)
        return dataclasses.replace(scaled, **numbers)

    def with_rows_scaled(self, factor: float) -> StepTime:
        """The same with so many times the cost of more rows, where ``points`` tell it."""
        points = tuple((rows, factor * more_ms) for rows, more_ms in self.points)
        return dataclasses.replace(self, points=points)

    def with_cold_scaled(self, factor: float) -> StepTime:
        """The same with so many times what a step behind a rest takes longer."""
        points = tuple((rows, factor * more_ms) for rows, more_ms in self.cold_points)
        return dataclasses.replace(self, cold_points=points)


def line_through(points: Sequence[tuple[float, float]], x: float) -> float:
    """``y`` at ``x`` by points in ascending order: linear between two, nothing before the first
    one, on by the last two behind them."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    after = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that takes time in one set-up of a pair.

    ``leg_ms`` is a latency, a message between a service and the gateway one way; the messages'
    and the scheduling's times occupy a device. ``jitter`` is the spread (sigma of a lognormal) of
    step times, legs and scheduling.
    """

    name: str
    target: StepTime
    draft: StepTime
    target_prefill_ms: float = 0.0
    draft_prefill_ms: float = 0.0
    selection_ms: float = 0.0  # from the start until the draft may begin its prefill
    leg_ms: float = 0.0
    late_share: float = 0.0  # of messages to a core that computes, those that wait for it
    late_ms: float = 0.0  # how long these wait, on the average
    draft_message_ms: float = 0.0  # of the draft's device, a message
    draft_verdict_ms: float = 0.0  # the gateway's and client's work about a verdict, if shared
    draft_token_ms: float = 0.0  # the same, about each of its tokens
    # Share of what others take of the draft's core by which its step takes longer besides.
    draft_disturbance: float = 0.0
    target_message_ms: float = 0.0
    target_interruption_ms: float = 0.0  # what one more takes that arrives in a step
    draft_scheduling_ms: float = 0.0  # between two steps
    target_scheduling_ms: float = 0.0
    target_contention: float = 0.0  # share by which a step is slower while the draft computes
    draft_contention: float = 0.0
    # How cold the target's first step behind its prefill is: a share of its ``cold_points``.
    target_cold_start: float = 0.0
    jitter: float = 0.0
    sources: tuple[str, ...] = field(default=())  # where the numbers come from

    def costs(self, seed: int = 0) -> Costs:
        """For the simulator; the same seed gives the same delays."""
        rng = random.Random(seed)

        def noise() -> float:
            return rng.lognormvariate(0.0, self.jitter) if self.jitter else 1.0

        def late_ns() -> float:
            is_late = self.late_share and rng.random() < self.late_share
            return _MS * rng.uniform(0.0, 2 * self.late_ms) if is_late else 0.0

        return Costs(
            late_ns=late_ns,
            target_ns=lambda rows, context: _MS * self.target.ms(rows, context) * noise(),
            draft_ns=lambda rows, context: _MS * self.draft.ms(rows, context) * noise(),
            target_prefill_ns=round(_MS * self.target_prefill_ms),
            draft_prefill_ns=round(_MS * self.draft_prefill_ms),
            draft_prefill_delay_ns=round(_MS * self.selection_ms),
            leg_ns=lambda: _MS * self.leg_ms * noise(),
            draft_message_ns=_MS * self.draft_message_ms,
            draft_verdict_ns=_MS * self.draft_verdict_ms,
            draft_token_ns=_MS * self.draft_token_ms,
            draft_disturbance=self.draft_disturbance,
            target_message_ns=_MS * self.target_message_ms,
            target_interruption_ns=_MS * self.target_interruption_ms,
            draft_scheduling_ns=lambda: _MS * self.draft_scheduling_ms * noise(),
            target_scheduling_ns=lambda: _MS * self.target_scheduling_ms * noise(),
            target_contention=self.target_contention,
            draft_contention=self.draft_contention,
            target_cold_ns=lambda rows: _MS * self.target.cold_ms(rows),
            target_cold_start=self.target_cold_start,
            draft_cold_ns=lambda rows: _MS * self.draft.cold_ms(rows),
        )

    def ideal(self) -> Machine:
        """The same step and prefill times with nothing else: what efficiency is measured by.

        Contention and cold caches stay: they are the steps' own.
        """
        return dataclasses.replace(
            self,
            name=f"{self.name}, ideal",
            leg_ms=0.0,
            late_share=0.0,
            late_ms=0.0,
            draft_message_ms=0.0,
            draft_verdict_ms=0.0,
            draft_token_ms=0.0,
            draft_disturbance=0.0,
            target_message_ms=0.0,
            target_interruption_ms=0.0,
            draft_scheduling_ms=0.0,
            target_scheduling_ms=0.0,
            jitter=0.0,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``read_machine`` is its inverse."""
        return dataclasses.asdict(self)


def machine_from(values: Mapping[str, Any], *, where: str) -> Machine:
    """The inverse of ``as_dict``; raises InvalidRequestError that says what is wrong in ``where``.

    Fields that are left out take their defaults; ``target`` and ``draft`` need ``one_row_ms``.
    """
    known = {each.name for each in dataclasses.fields(Machine)}
    if unknown := sorted(set(values) - known):
        raise InvalidRequestError(
            f"{where}: unknown field {unknown[0]!r}; a machine has {', '.join(sorted(known))}"
        )
    steps = {}
    for side in ("target", "draft"):
        step = values.get(side)
        names = {each.name for each in dataclasses.fields(StepTime)}
        if not isinstance(step, Mapping) or "one_row_ms" not in step or set(step) - names:
            raise InvalidRequestError(
                f"{where}: {side!r} must be an object with one_row_ms and, as you like, "
                f"{', '.join(sorted(names - {'one_row_ms'}))}"
            )
        numbers = {n: _number(step[n], where, n) for n in step if not n.endswith("points")}
        steps[side] = StepTime(
            **numbers,
            points=_points(step.get("points", ()), where),
            cold_points=_points(step.get("cold_points", ()), where),
        )
        if steps[side].one_row_ms <= 0:
            raise InvalidRequestError(f"{where}: {side}.one_row_ms must be above 0")
        if any(cold_ms < 0 for _, cold_ms in steps[side].cold_points):
            raise InvalidRequestError(
                f"{where}: {side}.cold_points must not be below 0: they say what a step behind a "
                "rest takes longer"
            )
        points = steps[side].points
        if any(steps[side].one_row_ms + over_one_ms <= 0 for _, over_one_ms in points):
            raise InvalidRequestError(f"{where}: {side}.points must not say that rows take no time")
        if len(points) > 1 and points[-1][1] < points[-2][1]:
            raise InvalidRequestError(
                f"{where}: the last of {side}.points must not be below the one before it, because "
                "the line through them goes on"
            )
    texts = {"name", "target", "draft", "sources"}
    numbers = {name: _number(values[name], where, name) for name in values if name not in texts}
    sources = tuple(str(source) for source in values.get("sources", ()))
    return Machine(
        name=str(values.get("name", where)),
        target=steps["target"],
        draft=steps["draft"],
        sources=sources,
        **numbers,
    )


def read_machine(path: Path) -> Machine:
    """A machine from a JSON file; raises InvalidRequestError when it cannot be read as one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRequestError(f"{path} is no JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise InvalidRequestError(f"{path}: expected an object with the fields of a machine")
    return machine_from(values, where=str(path))


def _points(values: Any, where: str) -> tuple[tuple[float, float], ...]:
    try:
        points = [(rows, more_ms) for rows, more_ms in values]
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"{where}: points are a list of pairs, rows and milliseconds over one row"
        ) from None
    found = [(_number(r, where, "points"), _signed(ms, where, "points")) for r, ms in points]
    if [rows for rows, _ in found] != sorted({rows for rows, _ in found}):
        raise InvalidRequestError(f"{where}: points must be in ascending order of rows")
    return tuple(found)


def _number(value: Any, where: str, name: str) -> float:
    number = _signed(value, where, name)
    if number < 0:
        raise InvalidRequestError(f"{where}: {name} is {value!r}; it must be a number, at least 0")
    return number


def _signed(value: Any, where: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise InvalidRequestError(f"{where}: {name} is {value!r}; it must be a number")
    return float(value)
