"""The figures of all ranks as JSON, and as Markdown: what a transition takes, and what memory it leaves in use."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Value = Callable[[Row], float]
Cell = Callable[[list[Row], list[Row]], str]
"""From a mode's rows and onecopy's, of all rounds and ranks."""

GIB = 2**30
OURS = "onecopy"


def _phase(name: str) -> Value:
    return lambda row: row["phases_s"].get(name, 0.0)


def _weights(row: Row) -> int:
    return sum(size for owner, size in row["memory"].items() if owner.endswith("_weights"))


def _generating(row: Row) -> int:
    return int(row["peak_in_generation"])


def _without_cache(row: Row) -> int:
    return _generating(row) - int(row["memory"].get("kv_cache", 0))


def _median(value: Value, form: str, unit: float = 1) -> Cell:
    return lambda rows, _: f"{statistics.median(value(row) for row in rows) / unit:{form}}"


def _step(name: str) -> Cell:
    """Median seconds of a step of filling; empty where the mode has no such step."""
    median = _median(_phase(name), ".4f")
    return lambda rows, ours: median(rows, ours) if any(name in row["phases_s"] for row in rows) else ""


def _highest(value: Value) -> Cell:
    return lambda rows, _: f"{max(map(value, rows)) / GIB:.2f}"


def _saved(value: Value) -> Cell:
    """How far onecopy's highest is below the mode's, of the mode's; empty for onecopy itself."""

    def cell(rows: list[Row], ours: list[Row]) -> str:
        theirs = max(map(value, rows))
        return f"{100 * (1 - max(map(value, ours)) / theirs):.1f}" if rows[0]["mode"] != OURS and theirs > 0 else ""

    return cell


TRANSITION_COLUMNS: dict[str, Cell] = {
    "weights into generation, s": _median(_phase("move"), ".4f"),
    "gather, s": _step("gather"),
    "convert, s": _step("convert"),
    "load, s": _step("load"),
    "KV cache wakes, s": _median(_phase("wake"), ".3f"),
    "into training, s": _median(lambda row: row["into_training_s"], ".3f"),
    "received, MB": _median(lambda row: row["received_bytes"], ",.1f", 1e6),
    "copied, MB": _median(lambda row: row["copied_bytes"], ",.1f", 1e6),
    "mean log-prob gap": lambda rows, _: f"{statistics.mean(row['gap_mean'] for row in rows):.4f}",
}

MEMORY_COLUMNS: dict[str, Cell] = {
    "weights in generation, GiB": _highest(_weights),
    "of them redundant, GiB": _highest(lambda row: _weights(row) - row["weight_bytes_in_use"]),
    "used in training, GiB": _highest(lambda row: row["used_in_training"]),
    "peak in transition, GiB": _highest(lambda row: row["peak_in_transition"]),
    "peak while generating, GiB": _highest(_generating),
    "onecopy is under it by, %": _saved(_generating),
    "without KV cache, GiB": _highest(_without_cache),
    "onecopy is under that by, %": _saved(_without_cache),
}


def write(ranks: list[Row], command: str, folder: Path) -> None:
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


def markdown(ranks: list[Row], command: str) -> str:
    """Seconds and bytes moved are medians over rounds and ranks, memory is the highest."""
    first = ranks[0]
    parts = [
        f"### {first['shape']}: {first['train']} to {first['generate']} on {first['world_size']} x {first['device']}",
        f"{first['precision']}, vLLM {first['vllm']}, torch {first['torch']}, megatron-core {first['megatron_core']}; weights a"
        f" rank: {first['training_weight_bytes'] / GIB:.2f} GiB in training, {first['generation_weight_bytes'] / GIB:.2f} in"
        f" generation. `{command}`",
        _table(ranks, TRANSITION_COLUMNS),
        *(f"{mode} was not run: {reason}." for mode, reason in first["skipped"].items()),
    ]
    if first["control_gap"] is not None:
        gap = f"{first['control_gap']:.4f}"
        parts.append(f"In the same precision the actor and transformers themselves differ by {gap} in the mean.")
    parts += [
        _table(ranks, MEMORY_COLUMNS),
        "Memory is the highest over rounds and ranks, of what the device has in use beyond an idle process; a peak is looked for"
        " every 2 ms.",
        *_updates([row for rank in ranks for row in rank["updates"]]),
        *(_kept([rank["kept"][-1] for rank in ranks]) if first["device"] != "cpu" else []),  # nothing sleeps there
        *_growth([rank["alternations"] for rank in ranks]),
    ]
    return "\n\n".join(parts)


def _table(ranks: list[Row], columns: dict[str, Cell]) -> str:
    modes: dict[str, list[Row]] = {}
    for row in (row for rank in ranks for row in rank["rounds"]):
        modes.setdefault(row["mode"], []).append(row)
    lines = ["| mode | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 1)]
    for mode, rows in modes.items():
        lines.append(f"| {mode} | " + " | ".join(cell(rows, modes[OURS]) for cell in columns.values()) + " |")
    return "\n".join(lines)


def _updates(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    before, peak, after = (max(row[name] for row in rows) / GIB for name in ("before", "peak", "after"))
    return [f"Updates: {before:.2f} GiB before, {peak:.2f} at the peak, {after:.2f} after."]


def _kept(rows: list[Row]) -> list[str]:
    """Of each rank's last alternation in which the KV cache might keep its memory."""
    if not all(row["kept"] for row in rows):
        return ["The KV cache cannot keep its memory beside this update."]
    needed, seconds_in, seconds_out = (
        max(row[name] for row in rows) for name in ("needed", "into_generation_s", "into_training_s")
    )
    return [
        f"When the update leaves room (it needs {needed / GIB:.1f} GiB), the KV cache keeps its memory:"
        f" {seconds_in:.4f} s into generation, {seconds_out:.4f} s into training."
    ]


def _growth(ranks: list[list[dict[str, int]]]) -> list[str]:
    """Growth from the sixth alternation to the last, of the rank that grew most."""
    count = len(ranks[0])
    if count < 7:
        return []
    grown = {name: max(rows[-1][name] / max(1, rows[5][name]) - 1 for rows in ranks) for name in ranks[0][0]}
    parts = ", ".join(f"{name} {100 * growth:+.3f} %" for name, growth in grown.items())
    return [f"{count} alternations of update and generation: {parts} from the sixth to the last."]
