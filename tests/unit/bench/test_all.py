"""What ``python -m bench.all`` would run."""

import pytest

from bench import __main__ as latency
from bench import all as every
from bench import load
from bench.answers.systems import systems
from bench.base.environment import ROOT


@pytest.mark.parametrize("name", every.BENCHMARKS)
def test_each_command_is_one_that_its_module_takes(name: str) -> None:
    module, *arguments = every.command_of(name)
    args = {"bench": latency, "bench.load": load}[module]._parse(arguments)
    assert args.out == (every.OUT / f"{name}.json").relative_to(ROOT)
    if module == "bench" and args.systems:
        assert latency._chosen(args.systems, systems("none", 0.0))


def test_nothing_is_run_to_list_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert every.main(["--list", "--only", "load"]) == 0
    assert "bench/out/load.json" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        every.main(["--only", "none"])
