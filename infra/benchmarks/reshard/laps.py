"""Seconds of the steps of one stream of work, without waiting for the device between them."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch


class Laps:
    """Each `mark` ends a step under a name. On a GPU events are recorded: a wait between steps would slow what is measured."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, name: str) -> None:
        self._marks.append((name, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by name, steps of one name added up; waits for the device once."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        found: dict[str, float] = defaultdict(float)
        for (_, start), (name, end) in zip(self._marks[:-1], self._marks[1:], strict=True):
            found[name] += start.elapsed_time(end) / 1000 if self._device == "cuda" else end - start
        return dict(found)

    def _now(self) -> Any:
        if self._device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
