"""The simulator's tables on docs/performance-simulator.md, from what a fit has written as JSON."""

from __future__ import annotations

import json

from bench.environment import describe_environment
from bench.simulator_page import fit_section
from hippo.simulation.machine import Machine, StepTime

MACHINE = Machine(
    name="measured",
    target=StepTime(one_row_ms=5.0, points=((1.0, 0.0), (8.0, 2.0), (16.0, 4.0))),
    draft=StepTime(one_row_ms=0.5),
    leg_ms=0.25,
    target_contention=0.1,
)


def test_a_fit_is_told_with_its_policies_noise_and_machine() -> None:
    vpsd = {"system": "vpsd γ=7", "is_learnt": True, "noise_percent": 2.5, "ideal": 1.0}
    serial = {"system": "serial γ=7", "is_learnt": False, "noise_percent": None, "ideal": 1.5}
    figures = {"measured": 2.0, "predicted": 2.2, "error_percent": 10.0, "efficiency": 0.5}
    fit = {
        "command": "python -m bench.simulate_fit fit.json",
        "system": "vpsd γ=7",
        "records": {
            "command": "python -m bench",
            "environment": describe_environment(),
        },
        "runs": [
            {
                "kind": "short",
                "dtype": "float32",
                "num_learnt": 8,
                "num_held_out": 8,
                "machine": MACHINE.as_dict(),
                "predictions": [{**vpsd, **figures, "error_percent": 1.0}, {**serial, **figures}],
            }
        ],
    }
    told = fit_section(json.loads(json.dumps(fit)))
    assert "1 of 2 policies within 5 %, the worst serial γ=7 (+10.0 %)" in told
    assert "the worst of the 1 that were not learnt from: serial γ=7 (+10.0 %)" in told
    assert "| vpsd γ=7 (learnt) | 2.000 | 2.5 % | 2.200 | +1.0 % | 1.000 | 50% |" in told
    assert "| serial γ=7 | 2.000 | - |" in told
    assert "target 5.00 with 1, 5.29 with 2, 7.00 with 8, 9.00 with 16 rows" in told
    assert "the target's steps +10%" in told
