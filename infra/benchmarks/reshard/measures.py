"""How a device's memory and seconds are read, and the random tokens that it works on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Peak:
    """The most device memory in use inside a block, looked at every 2 ms by a thread.

    Attributes:
        highest: bytes, as `used_bytes` counts them.
    """

    def __init__(self, device: str) -> None:
        self._device, self.highest = device, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.highest = max(self.highest, used_bytes(self._device))
            time.sleep(0.002)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.highest = max(self.highest, used_bytes(self._device))


def used_bytes(device: str) -> int:
    """In use on the device; resident memory of the process on CPU."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


def timed(device: str, work: Callable[[], Result]) -> tuple[float, Result]:
    """Wall seconds around device work, and its result."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def tokens(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """`count` rows of `length` random token ids; never the last id, which ends a response."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary - 1, (count, length), generator=generator).tolist()
