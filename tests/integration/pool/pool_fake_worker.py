"""A worker without torch: enough of the real one's behaviour to exercise the pool around it."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any


class FakeWorker:
    """Counts updates; sleeps, fails, dies or hangs when told to. Ranks meet over a plain socket."""

    READ_ONLY_OPS = frozenset({"describe", "generate", "sleep", "fail", "exit", "hang"})

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.version, self.updates, self.slept = 0, 0, 0.0
        self._cancelled = threading.Event()
        self._thread = threading.get_ident()
        self._listener: socket.socket | None = None
        print(f"fake worker {rank} of {world_size} on {device}")

    def rendezvous(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=self.world_size)
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def join(self, address: str) -> None:
        assert threading.get_ident() == self._thread
        if self._listener is None:
            host, port = address.split(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        else:
            self._listener.settimeout(10)
            for _ in range(self.world_size - 1):
                self._listener.accept()[0].close()

    def execute(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        assert threading.get_ident() == self._thread, "operations must run in the thread that built the worker"
        self._cancelled.clear()
        operation: Callable[..., dict[str, Any]] = getattr(self, f"_{op}")
        return operation(**args)

    def progress(self) -> dict[str, Any]:
        return {"slept": round(self.slept, 2)}

    def cancel(self) -> None:
        self._cancelled.set()

    def _describe(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "CUDA_VISIBLE_DEVICES")
        environment = {name: os.environ.get(name) for name in names}
        return {"rank": self.rank, "pid": os.getpid(), "updates": self.updates, "environment": environment}

    def _load(self, version: int) -> dict[str, Any]:
        self.version = version
        return {"weight_version": version}

    def _update(self, seconds: float = 0.0) -> dict[str, Any]:
        time.sleep(seconds)
        self.updates += 1
        self.version += 1
        return {"weight_version": self.version, "updates": self.updates}

    def _broken_update(self) -> dict[str, Any]:
        raise ValueError("the loss is not finite")

    def _diverge(self) -> dict[str, Any]:
        return {"weight_version": self.rank}

    def _sleep(self, seconds: float, only: int | None = None) -> dict[str, Any]:
        begin = time.monotonic()
        while only in (None, self.rank) and (passed := time.monotonic() - begin) < seconds:
            self.slept = passed
            if self._cancelled.wait(0.05):
                raise InterruptedError("asked to stop")
        return {"pid": os.getpid()}

    def _fail(self, only: int) -> dict[str, Any]:
        if self.rank == only:
            raise ValueError(f"no luck on rank {only}")
        return {}

    def _exit(self, only: int, code: int) -> dict[str, Any]:
        if self.rank == only:
            os._exit(code)
        time.sleep(600)  # like a collective that waits for the rank that died
        return {}

    def _hang(self) -> dict[str, Any]:
        ctypes.PyDLL(None).sleep(600)  # in native code, with the interpreter lock held
        return {}
