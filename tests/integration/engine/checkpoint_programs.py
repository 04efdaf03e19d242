"""Actors that are saved under one layout and loaded into another, and what their whole state is, gathered independently."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from engine.checkpointing import Checkpointing, TrainedModel
from engine.losses.config import LossConfig
from engine.megatron.optimizer import STATE_NAMES, ensure_state, shard_states
from engine.megatron.update import Update
from engine.roles.actor import Actor
from engine.weights.huggingface import huggingface_tensors
from engine.weights.map import weight_map
from storage.filesystem import Store
from storage.integrity import CorruptFile
from storage.ledger import Ledger
from storage.manifest import FileEntry, Manifest, utc_now
from tests.integration.engine.programs import batch, demonstrations, make_actor, settings


def train(actor: Actor, step: int) -> None:
    Update(actor, demonstrations(step, actor.arch.vocabulary), settings(LossConfig(name="sft"))).run()


def whole_state(actor: Actor) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor's weights, master weights and moments, put together from the shards of all ranks."""
    ensure_state(actor.optimizer)
    mine = []
    for name, state in shard_states(actor.optimizer, actor.parameters):
        numbers = {key: value.detach().cpu().float().numpy() for key, value in state.tensors.items()}
        mine.append((name, actor.shards[name], state.start, state.stop, numbers))
    weights = [(n, actor.shards[n], p.detach().cpu().float().numpy()) for n, p in actor.parameters.items()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, weights))
    out: dict[str, torch.Tensor] = {}
    for weight in weight_map(actor.arch):
        for key in (*STATE_NAMES, "weight"):
            shards: dict[Any, torch.Tensor] = {}
            for parts, whole in everyone:
                for name, shard, start, stop, numbers in parts:
                    if name == weight.megatron and key != "weight":
                        shape = weight.shard_shape(shard)
                        flat = shards.setdefault(shard, torch.full(shape, float("nan"))).view(-1)
                        flat[start:stop] = torch.from_numpy(numbers[key])
                for name, shard, values in whole:
                    if name == weight.megatron and key == "weight":
                        shards[shard] = torch.from_numpy(values)
            out |= {f"{name}|{key}": t for name, t in huggingface_tensors(weight, shards).items()}
    return out


def keep(actor: Actor, path: Path) -> None:
    """`whole_state` and the optimizer steps as one file, for the test to compare."""
    state = whole_state(actor) | {"optimizer_steps": torch.tensor(actor.optimizer_steps)}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def models_of(actor: Actor, folder: str) -> dict[str, TrainedModel]:
    return {"actor": TrainedModel(lambda: contextlib.nullcontext(actor), folder)}


def publish(ledger: Ledger, files: list[dict[str, Any]]) -> Manifest:
    """The manifest of what all ranks wrote, as the flow would commit it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, files)
    if dist.get_rank() == 0:
        entries = [FileEntry(**entry) for part in everyone for entry in part]
        ledger.publish(
            Manifest(run=ledger.run, step=2, stage="checkpoint", fingerprint="f", files=entries, weight_version=2,
                     started_at=utc_now(), finished_at=utc_now())
        )  # fmt: skip
    dist.barrier()
    manifest = ledger.get("checkpoint", 2)
    assert manifest is not None
    return manifest


def save(runs: dict[str, dict[str, Any]], root: str) -> dict[str, Any]:
    """Two updates, a checkpoint, and a third update while it is written."""
    results: dict[str, Any] = {}
    for name, arguments in runs.items():
        actor, checkpoints, ledger = make_actor(**arguments), Checkpointing(), Ledger(f"{root}/runs", name)
        train(actor, 0)
        train(actor, 1)
        keep(actor, Path(root) / name / "saved.safetensors")
        logprobs = actor.logprobs(*batch(99, actor.arch.vocabulary), 1.0).tolist()
        out = ledger.stage_path("checkpoint", 2)
        checkpoints.save(ledger.root_uri, out, models_of(actor, arguments["folder"]), time.monotonic())
        train(actor, 2)
        found = checkpoints.saved(out, wait=True)
        keep(actor, Path(root) / name / "next.safetensors")
        publish(ledger, found["files"])
        results[name] = {"logprobs": logprobs, "parameters": sum(p.numel() for p in actor.parameters.values())}
    return results


def load(runs: dict[str, dict[str, Any]], root: str) -> dict[str, Any]:
    """Another actor, spoiled by an update of its own, brought to a checkpoint; then the third update.

    Every generator of random numbers is somewhere else than when the checkpoint was saved.
    """
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    for name, arguments in runs.items():
        saved = arguments.pop("saved")
        actor = make_actor(**arguments)
        train(actor, 5)
        manifest = Ledger(f"{root}/runs", saved).get("checkpoint", 2)
        assert manifest is not None
        Checkpointing().restore(f"{root}/runs", manifest, models_of(actor, arguments["folder"]))
        keep(actor, Path(root) / name / "saved.safetensors")
        train(actor, 2)
        keep(actor, Path(root) / name / "next.safetensors")
    return {}


def damaged(folder: str, root: str) -> dict[str, Any]:
    """A checkpoint of two ranks of which one file at a time is spoiled: what each rank says of it."""
    actor, checkpoints, ledger = make_actor(folder, tp=1), Checkpointing(), Ledger(root, "run")
    models, out = models_of(actor, folder), ledger.stage_path("checkpoint", 2)
    checkpoints.save(root, out, models, time.monotonic())
    manifest = publish(ledger, checkpoints.saved(out, wait=True)["files"])
    before, messages = whole_state(actor), {}
    for entry in manifest.files:
        if entry.path.startswith("actor-"):
            for damage in ("flip", "cut"):
                messages[f"{entry.path} {damage}"] = _restore_damaged(
                    checkpoints, models, manifest, f"{manifest.folder}/{entry.path}", damage
                )
    same = all(torch.equal(before[name], tensor) for name, tensor in whole_state(actor).items())
    checkpoints.restore(root, manifest, models)
    return {"messages": messages, "same": same}


def _restore_damaged(
    checkpoints: Checkpointing, models: dict[str, TrainedModel], manifest: Manifest, path: str, damage: str
) -> str:
    store = Store.open(manifest.root_uri)
    data = store.read(path)
    middle = len(data) // 2
    dist.barrier()
    if dist.get_rank() == 0:
        flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        store.write(path, flipped if damage == "flip" else data[:-1])
    dist.barrier()
    try:
        checkpoints.restore(manifest.root_uri, manifest, models)
        message = "restored"
    except CorruptFile as error:
        message = str(error)
    dist.barrier()
    if dist.get_rank() == 0:
        store.write(path, data)
    dist.barrier()
    return message


def failing(folder: str, root: str) -> dict[str, Any]:
    """Stores that fail for ever and once, and a checkpoint that is given up; the last one on this rank only."""
    from engine import checkpointing

    checkpointing.RETRY_AFTER_S = 0.0
    actor, checkpoints, ledger = make_actor(folder, tp=1), Checkpointing(), Ledger(root, "run")
    models, seen, plain = models_of(actor, folder), {}, Store.open_output
    calls = {"left": 0}

    @contextlib.contextmanager
    def output(self: Store, path: str) -> Any:
        if calls["left"] > 0:
            calls["left"] -= 1
            raise OSError(28, "No space left on device", path)
        with plain(self, path) as file:
            yield file

    Store.open_output = output  # type: ignore[method-assign]
    for name, failures in (("for ever", 9), ("once", 1)):
        calls["left"], out = failures, f"run/checkpoint/step={len(seen):06d}"
        checkpoints.save(root, out, models, time.monotonic())
        train(actor, len(seen))
        told = checkpoints.saved(out, wait=True)
        seen[name] = {**told, "again": checkpoints.saved(out, wait=True)["state"]}
    calls["left"], out = 0, "run/checkpoint/step=000009"
    checkpoints.save(root, out, models, time.monotonic())
    checkpoints.abandon()
    seen["abandoned"] = checkpoints.saved(out, wait=True)
    return {**seen, "files": ledger.store.files(), "process": os.getpid()}


def hold(folder: str, root: str) -> None:
    """Never gets beyond the first block of a checkpoint; the test kills it there."""
    from storage.integrity import HashingWriter

    def stuck(self: HashingWriter, data: Any) -> int:
        plain(self, data)
        Path(root, "stuck").touch()
        time.sleep(600)
        raise AssertionError("not killed")

    plain, HashingWriter.write = HashingWriter.write, stuck  # type: ignore[method-assign]
    actor, checkpoints = make_actor(folder, tp=1), Checkpointing()
    checkpoints.save(root, "run/checkpoint/step=000002", models_of(actor, folder), time.monotonic())
    checkpoints.saved("run/checkpoint/step=000002", wait=True)


def timed(folder: str, root: str) -> dict[str, Any]:
    """Seconds to copy, write and load a model's state."""
    actor, checkpoints, ledger = make_actor(folder, tp=1), Checkpointing(), Ledger(root, "run")
    models, out = models_of(actor, folder), ledger.stage_path("checkpoint", 2)
    results = {}
    for name in ("first", "second"):
        dist.barrier()
        stall = checkpoints.save(root, out, models, time.monotonic())["metrics"]["stall_seconds"]
        found = checkpoints.saved(out, wait=True)
        results[name] = {**found["metrics"], "stall_seconds": stall}
    manifest = publish(ledger, found["files"])
    began = time.monotonic()
    checkpoints.restore(root, manifest, models)
    return {**results, "load_seconds": time.monotonic() - began}
