"""Who may use the pool: one run at a time, with fencing tokens.

A process that was thought dead may come back (a flow marked Crashed often still runs). It must not touch a pool that
a newer attempt took over, so every operation carries the token of its lease and only the newest token is accepted.

Rules:
  * a free or expired pool goes to whoever asks;
  * the *same run* takes over at once, because a second attempt of a run replaces the first one;
  * another run waits until the lease is released or has not been renewed for its length;
  * an expired lease stays usable as long as nobody else took the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.pool.errors import PoolBusy, StaleLease


@dataclass(frozen=True)
class Lease:
    """Right to use one life of a pool.

    Attributes:
        token: grows with every lease of the pool.
        epoch: identifies the life of the pool; a rebuilt pool has another one.
        run: name of the run.
        holder: who asked, for messages (for example a flow run id).
        seconds: the lease lapses when it is not renewed for this long.
    """

    token: int
    epoch: str
    run: str
    holder: str
    seconds: float


class LeaseTable:
    """The lease of one pool; pure logic, driven by `clock` (seconds, monotonic)."""

    def __init__(self, epoch: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._epoch = epoch
        self._clock = clock
        self._last_token = 0
        self._current: Lease | None = None
        self._expires_at = 0.0

    @property
    def current(self) -> Lease | None:
        """The newest lease that was not released; it may have expired (see `seconds_left`)."""
        return self._current

    @property
    def seconds_left(self) -> float:
        """Seconds until the current lease expires; 0.0 when it has, or when there is none."""
        return max(0.0, self._expires_at - self._clock()) if self._current else 0.0

    def acquire(self, run: str, holder: str, seconds: float) -> Lease:
        """Give `run` the pool.

        Raises:
            PoolBusy: another run holds a lease that has not expired.
        """
        current = self._current
        if current is not None and current.run != run and self.seconds_left > 0:
            raise PoolBusy(
                f"the pool is held by run {current.run!r} ({current.holder}); "
                f"its lease ends in {self.seconds_left:.0f} s unless it is renewed",
                run=current.run,
                holder=current.holder,
            )
        self._last_token += 1
        self._current = Lease(self._last_token, self._epoch, run, holder, seconds)
        self._expires_at = self._clock() + seconds
        return self._current

    def check(self, token: int, epoch: str) -> Lease:
        """Return the lease with this token and renew it.

        Raises:
            StaleLease: it is not the newest lease of this life of the pool.
        """
        if epoch != self._epoch:
            raise StaleLease(f"lease {token} belongs to an earlier life of the pool, which has been rebuilt since")
        current = self._current
        if current is None or current.token != token:
            now = f"run {current.run!r} ({current.holder}) holds it" if current else "nobody holds it now"
            raise StaleLease(f"lease {token} of the pool is no longer valid: it was released or taken over; {now}")
        self._expires_at = self._clock() + current.seconds
        return current

    def release(self, token: int, epoch: str) -> bool:
        """Give the pool back; False when the lease was stale already, which is not an error."""
        if self._current is None or epoch != self._epoch or self._current.token != token:
            return False
        self._current = None
        return True
