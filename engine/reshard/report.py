"""A plan's figures, for people and programs: what it moves, what it needs, and what others would."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.layout import Layout
from engine.reshard.formulas import FORMULAS
from engine.reshard.plan import Plan, plan_generation, reversed_plan
from engine.weights.architecture import Architecture


def plan_report(
    arch: Architecture, train: Layout, generate: Layout, *, bytes_per_number: int, ranks_per_node: int
) -> dict[str, Any]:
    """Figures of the way to generation and back; bytes are of the rank that has most.

    Returns:
        received_bytes_max, lower_bound_bytes_max, received_network_bytes_max, return_bytes_max: what travels.
        peak_parameter_bytes_max, redundant_bytes_max: weights in memory outside the transition, and those held twice.
        transition_bytes_max: weights in memory inside it, when both layouts are there (the KV cache is not, then).
        regimes: bytes of the model by regime. seconds: to make both plans. formulas: the paper's, a GPU.
    """
    plan = plan_generation(arch, train, generate, bytes_per_number=bytes_per_number, ranks_per_node=ranks_per_node)
    back = reversed_plan(plan)
    before, after = plan.held(plan.source), plan.held(plan.target)
    shared = _resident_bytes(plan)
    model_bytes = sum(part.numbers for part in plan.classes) * bytes_per_number
    costs = {name: formula(model_bytes, train, generate) for name, formula in FORMULAS.items()}
    return {
        "model_bytes": model_bytes,
        "train": str(train),
        "generate": str(generate),
        "received_bytes_max": int(plan.received().max()),
        "lower_bound_bytes_max": int(plan.lower_bound().max()),
        "received_network_bytes_max": int(plan.traffic["received_network"].max()),
        "return_bytes_max": int(back.received().max()),
        "training_bytes_max": int(before.max()),
        "generation_bytes_max": int(after.max()),
        "peak_parameter_bytes_max": int(max(before.max(), after.max())),
        "redundant_bytes_max": int((_in_generation(plan) - after).max()),
        "transition_bytes_max": int((before + after - shared).max()),
        "regimes": _regimes(plan),
        "seconds": plan.seconds + back.seconds,
        "formulas": {name: dataclasses.asdict(cost) if cost else None for name, cost in costs.items()},
    }


def _resident_bytes(plan: Plan) -> Any:
    """[world] bytes that both layouts use alike."""
    return plan.held(plan.source, plan.resident)


def _in_generation(plan: Plan) -> Any:
    """[world] bytes of weights in memory while generating: what both layouts use, and the generation memory of the rest."""
    moving = frozenset(part.division for part in plan.classes) - plan.resident
    return _resident_bytes(plan) + plan.held(plan.target, moving)


def _regimes(plan: Plan) -> dict[str, int]:
    found = {"alias": 0, "regroup": 0, "move": 0}
    for part in plan.classes:
        found[plan.regime(part)] += part.numbers * plan.bytes_per_number
    return found
