"""What a transition cost: bytes by link, seconds by phase, memory by owner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.reshard.plan import Plan


@dataclass
class Transition:
    """One change of layout on one rank.

    Attributes:
        into: "generation" or "training".
        received, sent: bytes by link: "node" and "network" from other ranks; copies on the device are "local" (received).
        seconds: by phase: plan (in the first one), move, optimizer, wake, sleep.
        peak_weight_bytes: of both layouts together while the change is made (staging comes on top).
    """

    into: str
    received: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_weight_bytes: int = 0

    def count(self, plan: Plan, rank: int) -> None:
        """Enter the plan's bytes of a rank."""
        for table, name in ((self.received, "received"), (self.sent, "sent")):
            table.update(
                node=int(plan.traffic[f"{name}_node"][rank]), network=int(plan.traffic[f"{name}_network"][rank])
            )
        self.received["local"] = int(plan.traffic["local"][rank])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a block under a name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Flat names for a stage's metrics, as `reshard/into_generation/received_node_bytes`."""
        start = f"reshard/into_{self.into}"
        values: dict[str, float] = {f"{start}/received_{link}_bytes": float(n) for link, n in self.received.items()}
        values |= {f"{start}/sent_{link}_bytes": float(n) for link, n in self.sent.items()}
        values |= {f"{start}/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        return values | {f"{start}/peak_weight_bytes": float(self.peak_weight_bytes)}
