"""What ``python -m bench.all`` would run."""

from __future__ import annotations

import pytest

from bench import __main__ as latency
from bench import all as every
from bench.answers.systems import systems
from bench.base.environment import ROOT
from bench.load import __main__ as load


@pytest.mark.parametrize("step", every.BENCHMARKS, ids=lambda step: step.name)
@pytest.mark.parametrize("is_quick", [False, True])
def test_each_command_is_one_that_its_module_takes(step: every.Benchmark, is_quick: bool) -> None:
    module, *arguments = step.command(is_quick=is_quick)
    args = {"bench": latency, "bench.load": load}[module]._parse(arguments)
    assert args.out == step.out(is_quick=is_quick).relative_to(ROOT)
    if module == "bench" and args.systems:
        assert latency._chosen(args.systems, systems("none", 0.0))


def test_the_issues_measurements_are_among_them() -> None:
    parsed = {step.name: step.command(is_quick=False) for step in every.BENCHMARKS}
    short = latency._parse(parsed["short"][1:])
    assert {"float32", "bfloat16"} <= set(short.dtypes)
    assert (short.temperatures, short.systems, short.rivals) == ([0.0, 0.8], [], True)
    loads = load._parse(parsed["load"][1:])
    assert loads.clients == [1, 2, 4, 8, 16, 32]
    assert loads.systems == list(load.SYSTEMS)


def test_nothing_is_run_to_list_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert every.main(["--list", "--only", "load"]) == 0
    assert "bench/out/load.json" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        every.main(["--only", "none"])
