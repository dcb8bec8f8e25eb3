"""The measured systems: target-only and the policies, by name."""

from typing import Any

from hippo.client.latency import TARGET_ONLY, System
from hippo.lab.simulation.replay import PolicyChoice
from hippo.speculation.policies import DEFAULT_GAMMA

__all__ = ["TARGET_ONLY", "System", "is_preset_name", "policy_of", "systems"]


def systems(strategy: str, ratio: float) -> tuple[System, ...]:
    """Returns target-only, every policy with the given pruning, and the published systems."""
    pruning = {"strategy": strategy, "ratio": ratio}

    def system(name: str, policy: str, **extra: Any) -> System:
        return System(name, {"policy": policy, "pruning": pruning, **extra})

    return (
        System(TARGET_ONLY, {"policy": "off"}),
        *(
            system(f"serial γ={gamma}", "serial", gamma=gamma)
            for gamma in (3, 5, 7, 10, 15, 20, 30)
        ),
        *(system(f"vpsd γ={gamma}", "vpsd", gamma=gamma) for gamma in (3, 5, 7, 10, 15, "auto")),
        system("always optimistic", "optimistic"),
        system("always conservative", "conservative"),
        system("adaptive", "adaptive"),
        # As published, but for what docs/algorithms.md names; specvlm decodes a chain, not a tree.
        System("preset hippo", {"preset": "hippo"}),
        System("preset specvlm, chain", {"preset": "specvlm"}),
    )


def is_preset_name(system: str) -> bool:
    """Whether a system is a preset, which has a pruning of its own."""
    return system.startswith("preset ")


def policy_of(system: str) -> PolicyChoice:
    """Returns the policy for a system's name, such as "serial γ=5"."""
    if system == TARGET_ONLY:
        return PolicyChoice("off")
    name, _, gamma = system.removeprefix("always ").partition(" γ=")
    return PolicyChoice(name, "auto" if gamma == "auto" else int(gamma or DEFAULT_GAMMA))
