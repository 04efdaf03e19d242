"""The figures of all ranks as JSON and as a Markdown table."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

GIB = 2**30

COLUMNS = (
    "mode",
    "weights into generation, s",
    "KV cache wakes, s",
    "into training, s",
    "received, MB",
    "copied, MB",
    "weights in generation, GiB",
    "of them redundant, GiB",
    "used without KV cache, GiB",
    "used, GiB",
    "peak in transition, GiB",
    "mean log-prob gap",
)


def write(ranks: list[dict[str, Any]], command: str, folder: Path) -> None:
    """Write and print the results of one shape."""
    first = ranks[0]
    folder.mkdir(parents=True, exist_ok=True)
    kind = "growth" if first["alternations"] else "transitions"
    layouts = "" if first["world_size"] == 1 else f"-{first['train']}-to-{first['generate']}".replace(",", "")
    name = f"{kind}-{first['shape']}{layouts}"
    text = markdown(ranks, command)
    (folder / f"{name}.json").write_text(json.dumps({"command": command, "ranks": ranks}, indent=1))
    (folder / f"{name}.md").write_text(text + "\n")
    print(text, flush=True)


def markdown(ranks: list[dict[str, Any]], command: str) -> str:
    """Medians over the rounds of the worst rank."""
    first = ranks[0]
    lines = [
        f"### {first['shape']}: {first['train']} to {first['generate']} on {first['world_size']} x {first['device']}",
        "",
        f"{first['precision']}, vLLM {first['vllm']}, torch {first['torch']}; weights a rank:"
        f" {first['training_weight_bytes'] / GIB:.2f} GiB in training, {first['generation_weight_bytes'] / GIB:.2f} in generation."
        f" `{command}`",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
    ]
    rows = [row for rank in ranks for row in rank["rounds"]]
    lines += [
        _line(mode, [row for row in rows if row["mode"] == mode]) for mode in dict.fromkeys(row["mode"] for row in rows)
    ]
    lines += [
        f"| {mode} | not run: {reason} |" + " |" * (len(COLUMNS) - 2) for mode, reason in first["skipped"].items()
    ]
    if first["control_gap"] is not None:
        gap = f"{first['control_gap']:.4f}"
        lines += ["", f"In the same precision the actor and transformers themselves differ by {gap} in the mean."]
    lines += ["", *_kept(first["kept"]), *_growth(first["alternations"])]
    return "\n".join(lines).rstrip()


def _line(mode: str, rows: list[dict[str, Any]]) -> str:
    def median(value: Any) -> float:
        return statistics.median(value(row) for row in rows)

    def kv(row: dict[str, Any]) -> int:
        return int(row["memory"].get("kv_cache", 0))

    def weights(row: dict[str, Any]) -> int:
        return sum(size for owner, size in row["memory"].items() if owner.endswith("_weights"))

    cells = [
        f"{median(lambda row: row['phases_s'].get('move', 0.0)):.4f}",
        f"{median(lambda row: row['phases_s'].get('wake', 0.0)):.3f}",
        f"{median(lambda row: row['into_training_s']):.3f}",
        f"{median(lambda row: row['received_bytes']) / 1e6:,.1f}",
        f"{median(lambda row: row['copied_bytes']) / 1e6:,.1f}",
        f"{median(weights) / GIB:.2f}",
        f"{median(lambda row: weights(row) - row['weight_bytes_in_use']) / GIB:.2f}",
        f"{median(lambda row: row['used_in_generation'] - kv(row)) / GIB:.2f}",
        f"{median(lambda row: row['used_in_generation']) / GIB:.2f}",
        f"{median(lambda row: row['peak_in_transition']) / GIB:.2f}",
        f"{statistics.mean(row['gap_mean'] for row in rows):.4f}",
    ]
    return f"| {mode} | " + " | ".join(cells) + " |"


def _kept(rows: list[dict[str, Any]]) -> list[str]:
    last = rows[-1]
    if last["needed"] is None:  # not measured on CPU, where nothing sleeps
        return []
    if not last["kept"]:
        return ["The KV cache cannot keep its memory beside this update."]
    return [
        f"When the update leaves room (it needs {last['needed'] / GIB:.1f} GiB), the KV cache keeps its memory:"
        f" {last['into_generation_s']:.4f} s into generation, {last['into_training_s']:.4f} s into training."
    ]


def _growth(rows: list[dict[str, int]]) -> list[str]:
    """Growth from the sixth alternation to the last."""
    if len(rows) < 7:
        return []
    parts = [f"{name} {100 * (rows[-1][name] / max(1, rows[5][name]) - 1):+.3f} %" for name in rows[0]]
    return [f"{len(rows)} alternations of update and generation: {', '.join(parts)} from the sixth to the last."]
