"""A run's curves as JSON, from its manifests alone: `python infra/benchmarks/curve.py RUN_FOLDER > curve.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from storage.ledger import Ledger

KEPT = {
    "rollout": ("tokens_per_second", "seconds"),
    "reward": ("reward", "success", "response_tokens", "truncated"),
    "update": ("loss", "grad_norm", "rollout_kl", "rollout_logprob_gap", "entropy", "seconds"),
    "evaluation-reward": ("success",),
}
"""Metrics of each stage that make up the curves."""


def curves(folder: Path) -> dict[str, object]:
    """Stage to metric to [[step, value], …], with the run's configuration and package versions."""
    ledger = Ledger(str(folder.parent), folder.name)
    record = ledger.record()
    assert record is not None, f"{folder} is no run"
    found: dict[str, dict[str, list[list[float]]]] = {}
    for stage, names in KEPT.items():
        manifests = [ledger.get(stage, step) for step in ledger.committed(stage)]
        found[stage] = {n: [[m.step, round(m.metrics[n], 5)] for m in manifests if m and n in m.metrics] for n in names}
    return {"run": record.name, "versions": record.versions, "config": record.config, "curves": found}


if __name__ == "__main__":
    print(json.dumps(curves(Path(sys.argv[1]).resolve())))
