"""Keeps a lease alive while its holder works on something that needs no pool, such as scoring rollouts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.pool.errors import PoolError, StaleLease


class Heartbeat:
    """Calls `renew` every `interval_s` seconds from a daemon thread, until `stop` or until the lease is stale.

    A daemon thread on purpose: when the process dies or hangs as a whole, the lease lapses, and that is the point.
    """

    def __init__(self, renew: Callable[[], None], interval_s: float) -> None:
        self._renew = renew
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pool-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns at once."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._renew()
            except StaleLease:
                return  # the next call of the holder says so
            except PoolError:
                continue  # a slow supervisor; try again before the lease ends
