"""One rank of the pool: an actor in Megatron, vLLM on its memory, and the operations that flows ask for.

Arguments and outcomes are small JSON; data is read from and written to storage by the ranks themselves. Nothing here
knows Ray: the tests run it under plain `torch.distributed`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest time a rank waits for another one in a collective (a long rollout on one of them, for example)."""


class Worker:
    """Rank `rank` of `world_size`, on `device` ("cpu" or "cuda")."""

    READ_ONLY_OPS = frozenset({"annotate", "describe", "fits", "generate", "save", "saved"})

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.model: Any = None  # engine.model_session.ModelSession, once loaded
        self._half_built = False
        self._report: dict[str, Any] = {}
        self._cancel = threading.Event()
        self._store: Any = None

    def rendezvous(self) -> str:
        """Bind the store at which the ranks meet (rank 0) and return host:port. The port is free because it is bound."""
        import torch.distributed as dist

        host = os.environ.get("ONECOPY_RANK_HOST") or _own_address(self.world_size)
        self._store = dist.TCPStore(host, 0, self.world_size, is_master=True, wait_for_workers=False)
        return f"{host}:{self._store.port}"

    def join(self, address: str) -> None:
        """Become a member of the process group that meets at `address`."""
        import torch
        import torch.distributed as dist

        host, _, port = address.rpartition(":")
        environment = dict(
            RANK=str(self.rank), LOCAL_RANK="0", WORLD_SIZE=str(self.world_size), MASTER_ADDR=host, MASTER_PORT=port
        )
        os.environ.update(environment)  # vLLM reads them from there
        store = self._store or dist.TCPStore(host, int(port), self.world_size, is_master=False)
        if self.device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )

    def execute(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Run one operation; see the methods `op_...` for arguments and outcomes.

        Raises:
            ValueError: no such operation.
            RuntimeError: the operation needs a model and none is loaded.
        """
        method: Callable[..., dict[str, Any]] | None = getattr(self, f"op_{op}", None)
        if method is None:
            raise ValueError(f"the worker has no operation {op!r}")
        self._cancel.clear()
        self._report = {}
        return method(**args)

    def progress(self) -> dict[str, Any]:
        """The running operation's progress: done, total and, while generating, tokens_per_second."""
        return dict(self._report)

    def cancel(self) -> None:
        """Ask the running operation to stop (generation does, at its next look)."""
        self._cancel.set()

    def op_describe(self) -> dict[str, Any]:
        """What is loaded: run, weight_version, and memory."""
        if self.model is None:
            return {"run": None, "weight_version": None}
        return self.model.describe()

    def op_fits(self, spec: dict[str, Any]) -> dict[str, Any]:
        """{"different": what the running engines were built with otherwise, None if `load` could take this spec}."""
        if self._half_built:
            return {"different": "an error, and cannot be finished in their process"}
        different = [] if self.model is None else self.model.differences(spec)
        return {"different": f"another {', '.join(different)}" if different else None}

    def op_load(self, run: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Load a model as version 0 of a run. The engines that are up are kept when they fit the spec.

        Args:
            run: identity of the run that the weights belong to from now on.
            spec: which models and how; see ModelSession.
        """
        from engine.model_session import ModelSession

        started = time.monotonic()
        fresh = self.model is None
        if self.model is None:
            self._half_built = True
            self.model = ModelSession(spec, self.device)
            self._half_built = False
        else:
            self.model.load(spec)
        self.model.own(run, 0)
        return {
            "weight_version": 0,
            "metrics": {"seconds": time.monotonic() - started, "engines_started": float(fresh)},
        }

    def op_restore(self, run: str, spec: dict[str, Any], store: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """Load a checkpoint (as op_load, then the trained models' state, checked while it is read).

        {"weight_version": None, "damaged": which file and how} if a file is not what was saved: no weights are loaded then.
        """
        from storage.integrity import CorruptFile

        self.op_load(run, spec)
        try:
            version = self.model.restore(store, manifest)
        except CorruptFile as error:
            return {"weight_version": None, "damaged": str(error)}
        self.model.own(run, version)
        return {"weight_version": version}

    def op_generate(self, **args: Any) -> dict[str, Any]:
        """Answer prompts; see ModelSession.generate."""
        return self._loaded().generate(self._tell, self._cancel.is_set, **args)

    def op_annotate(self, **args: Any) -> dict[str, Any]:
        """What the reference or the critic says of staged samples; see ModelSession.annotate."""
        return self._loaded().annotate(**args)

    def op_update(self, **args: Any) -> dict[str, Any]:
        """Train on staged datasets; see ModelSession.update."""
        return self._loaded().update(self._tell, **args)

    def op_save(self, store: str, out: str) -> dict[str, Any]:
        """Copy the trained models' state and begin to write it as a checkpoint; see Checkpointing.save."""
        return self._loaded().save(store, out)

    def op_saved(self, out: str, wait: bool) -> dict[str, Any]:
        """How far that checkpoint is; see Checkpointing.saved."""
        if self.model is None:
            return {"state": "absent", "problems": [], "news": []}
        return self.model.checkpoints.saved(out, wait)

    def _tell(self, **report: Any) -> None:
        self._report = report

    def _loaded(self) -> Any:
        if self.model is None or self.model.weight_version is None:
            raise RuntimeError("no complete weights are loaded: load or restore first")
        return self.model


def _own_address(world_size: int) -> str:
    """Loopback when all ranks can reach it, else this host's address as the others see it."""
    if os.environ.get("ONECOPY_SINGLE_HOST", "1") == "1" or world_size == 1:
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())
