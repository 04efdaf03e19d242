"""Do the engines work on this machine? `python -m engine.selfcheck [--json]`; a few seconds, exit code 1 if not."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = {"torch": "torch", "megatron.core": "megatron-core", "vllm": "vllm", "transformers": "transformers"}


def check_imports() -> dict[str, str]:
    """Versions of the engines' packages; raises ImportError."""
    versions = {}
    for module, package in PACKAGES.items():
        importlib.import_module(module)
        names = (package, f"{package}-cpu")
        versions[package] = next(filter(None, map(_version, names)), "unknown")
    return versions


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_devices() -> dict[str, Any]:
    """What torch sees: CPU threads and GPUs with their memory in GiB."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu_threads": torch.get_num_threads(),
        "gpus": [f"{g.name}, {g.total_memory / 2**30:.0f} GiB" for g in gpus],
    }


def check_actor() -> dict[str, float]:
    """Build a one-layer actor, take one gradient step, and see that the loss falls on the same batch.

    Raises:
        AssertionError: it does not.
    """
    import torch
    import torch.distributed as dist

    from engine.config import OptimizerConfig
    from engine.layout import Layout
    from engine.losses.config import LossConfig
    from engine.megatron.update import Update, UpdateSettings
    from engine.roles.actor import Actor
    from engine.samples import Samples
    from engine.weights.architecture import read_architecture

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = _tiny_model(Path(scratch))
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1
        )
        actor = Actor(
            read_architecture(folder), folder, Layout(), sequence_parallel=False, dtype=torch.float32, device=device,
            optimizer=OptimizerConfig(lr=1e-2),
        )  # fmt: skip
        samples = Samples([[1, 2], [3]], [[4, 5, 6], [7, 8]], [[1, 1, 1], [1, 1]], [[0.0] * 3, [0.0] * 2])
        settings = UpdateSettings(LossConfig(name="sft"), 1.0, None, 1, 64, 8, 0)
        first, second = (Update(actor, samples, settings).run()["loss"] for _ in range(2))
        dist.destroy_process_group()
    assert second < first, f"the loss went from {first} to {second}"
    return {"loss_before": first, "loss_after": second}


def _tiny_model(folder: Path) -> Path:
    from engine.weights.initialise import write_random_model

    config = dict(
        model_type="llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    return write_random_model(config, folder, seed=0)


CHECKS: dict[str, tuple[Callable[[], Any], str]] = {
    "packages": (check_imports, "run infra/install.sh"),
    "devices": (check_devices, "reinstall torch with infra/install.sh cpu or cuda"),
    "actor": (check_actor, "report it with the output of `onecopy doctor --json`"),
}
"""Name to (check, what to do when it fails)."""


def run_checks() -> list[dict[str, Any]]:
    """One record a check: name, ok, seconds, result or error and mend. Stops at the first failure, which the rest depend on."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    records: list[dict[str, Any]] = []
    for name, (check, mend) in CHECKS.items():
        started = time.monotonic()
        try:
            record = {"name": name, "ok": True, "result": check()}
        except Exception as error:
            record = {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}", "mend": mend}
        records.append({**record, "seconds": round(time.monotonic() - started, 2)})
        if not record["ok"]:
            break
    return records


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.selfcheck", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON array on standard output")
    as_json = parser.parse_args().json
    records = run_checks()
    if as_json:
        print(json.dumps(records))
    else:
        for record in records:
            print("ok  " if record["ok"] else "FAIL", record["name"], record.get("result") or record.get("error"))
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
