"""What a person sees while a run works: one live line on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, TextIO

from storage.manifest import Manifest

REFRESH_S = 0.2
"""Seconds between two redraws of the live line."""

LIVE_FIGURES = (("reward.reward", "reward {:.3f}"), ("rollout.tokens_per_second", "{:.0f} tokens/s"))
LINE_FIGURES = (
    ("reward.reward", "reward {:.3f}"),
    ("reward.success", "success {:.2f}"),
    ("update.loss", "loss {:.4f}"),
    ("rollout.tokens_per_second", "{:.0f} tokens/s"),
    ("rollout.seconds", "rollout {:.1f} s"),
    ("update.seconds", "update {:.1f} s"),
)
"""Figures of a finished step, by stage and metric; those a flow does not have are left out."""


class Progress:
    """Reports a run's steps.

    Args:
        total_steps: of the run.
        stream: where to write; a terminal gets the live line.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._first_step_at: float | None = None
        self._steps_done = 0
        self._figures: list[str] = []
        self._ends_at: float | None = None
        self._doing, self._detail = "", ""
        self._drawn_at = 0.0
        self._width = 0

    def note(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        print(text, file=self.stream, flush=True)

    def begin(self, step: int, doing: str) -> None:
        """`doing` (a stage's name) begins at `step`."""
        if self._first_step_at is None:
            self._first_step_at = time.monotonic()
        self._doing, self._detail = f"step {step + 1}/{self.total_steps} · {doing}", ""
        self._draw(force=True)

    def operation(self, state: dict[str, Any]) -> None:
        """The pool's own report on the running operation, as the client passes it on."""
        self._detail = _operation_detail(state)
        self._draw()

    def finished(self, step: int, manifests: list[Manifest]) -> None:
        """`step` is committed; its figures come from the stages' metrics."""
        self._steps_done += 1
        left = self.seconds_left(step)
        self._figures, self._ends_at = _figures(manifests, LIVE_FIGURES), time.monotonic() + left
        if not self.live:
            done = f"step {step + 1}/{self.total_steps}"
            self.note(" · ".join([done, *_figures(manifests, LINE_FIGURES), f"{left:.0f} s left"]))

    def seconds_left(self, step: int) -> float:
        """Seconds for the steps after `step`, at the pace of this process's steps so far."""
        now = time.monotonic()
        pace = (now - (self._first_step_at or now)) / max(self._steps_done, 1)
        return pace * (self.total_steps - step - 1)

    def close(self) -> None:
        """Leave the terminal on a fresh line."""
        if self.live and self._width:
            print(file=self.stream, flush=True)
            self._width = 0

    def _draw(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not self.live or (not force and now - self._drawn_at < REFRESH_S):
            return
        self._drawn_at = now
        left = [] if self._ends_at is None else [f"{max(0.0, self._ends_at - now):.0f} s left"]
        line = " · ".join(filter(None, [self._doing, self._detail, *self._figures, *left]))
        line = line[: shutil.get_terminal_size().columns - 1]
        # Blanks over the rest of the longer line before, instead of escape codes that some terminals print.
        self.stream.write("\r" + line.ljust(self._width))
        self.stream.flush()
        self._width = len(line)

    def _clear(self) -> None:
        if self.live and self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self._width = 0


def _figures(manifests: list[Manifest], shown: tuple[tuple[str, str], ...]) -> list[str]:
    metrics = {f"{manifest.stage}.{name}": value for manifest in manifests for name, value in manifest.metrics.items()}
    return [template.format(metrics[name]) for name, template in shown if name in metrics]


def _operation_detail(state: dict[str, Any]) -> str:
    """How far the ranks are: each may report `done` and `total`."""
    ranks = state.get("ranks", [])
    done, total = (sum(rank.get(key) or 0 for rank in ranks) for key in ("done", "total"))
    return f"{done:.0f}/{total:.0f}" if total else ""
