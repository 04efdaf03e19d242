"""What the ranks report about memory and resharding, for a stage's metrics."""

from __future__ import annotations

from typing import Any

PREFIXES = ("reshard/", "memory/")


def largest_of_ranks(result: dict[str, Any]) -> dict[str, float]:
    """Of each figure about memory and resharding the largest of all ranks: the slowest transition, the fullest device."""
    largest: dict[str, float] = {}
    for rank in result["ranks"]:
        for name, value in rank.get("metrics", {}).items():
            if name.startswith(PREFIXES):
                largest[name] = max(value, largest.get(name, value))
    return largest
