"""The benchmark's modes on each rank: what each leaves in vLLM's parameters, and the figures that it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.layout import Layout
from infra.benchmarks.reshard.__main__ import options_of
from infra.benchmarks.reshard.bench import Bench
from tests.integration.engine.generation_programs import KEPT, Hybrid

SMALL = (
    "--shape tiny --out unused --samples 8 --prompt 16 --response 16 --batch 4 --sequence 64 --micro-batch-tokens 256"
)


class Compared(Hybrid):
    """The comparisons of `Hybrid`, of a benchmark's actor and engine."""

    def __init__(self, bench: Bench) -> None:
        self.actor, self.engine, self.weights = bench.actor, bench.engine, bench.hybrid


def baselines(folder: str, train: str, generate: str) -> dict[str, Any]:
    """Two rounds with an update between them; before each, every parameter of vLLM in every mode is compared."""
    torch.manual_seed(0)
    options, layouts = options_of(SMALL.split()), (Layout.parse(train), Layout.parse(generate))
    bench = Bench(options, Path(folder), "cpu", *layouts)
    KEPT.append(bench)
    compared, wrong, changed, rows = Compared(bench), {}, [], []
    for number in range(2):
        for mode, prepare in bench.modes.items():
            whole, before = compared.whole(), {n: p.data.clone() for n, p in bench.actor.parameters.items()}
            prepare()
            bench.engine.wake()
            wrong[f"{mode} {number}"] = compared.wrong_slices(whole)
            bench.engine.sleep()
            changed += [n for n, p in bench.actor.parameters.items() if not torch.equal(p.data, before[n])]
        rows += bench.round(number)
    return {
        "wrong": wrong, "changed": changed, "rows": rows, "skipped": bench.skipped, "control": bench.control,
        "updates": bench.updates, "planned": int(bench.plan.received()[dist.get_rank()]),
    }  # fmt: skip
