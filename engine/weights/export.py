"""Write a checkpoint as a Hugging Face folder: `python -m engine.weights.export --run URI --step N --to DIR [--role critic]`.

Needs no pool, no Megatron and not the folder that the run began from: a checkpoint names rectangles of Hugging Face tensors, and
holds the configuration and the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.weights.architecture import Architecture, read_architecture
from engine.weights.map import weight_map
from storage.checkpoints import STAGE, index_entries, part_name, small_entries
from storage.integrity import read_verified
from storage.ledger import Ledger
from storage.manifest import Manifest
from storage.sharded import Index, ShardedReader, read_index

SHARD_BYTES = 4 * 10**9
"""Size at which the next model-….safetensors file is begun."""


class ExportError(ValueError):
    """There is no such checkpoint, or the target cannot take the model."""


def export(run_uri: str, step: int, target: Path, role: str = "actor") -> Path:
    """Write the weights after `step` updates, tokenizer and settings to `target`, which appears whole or not at all.

    Args:
        role: "actor" or "critic" (a sequence classifier).

    Raises:
        ExportError: no checkpoint of that step or no such model in it (the message lists those there are), or `target` is not
            empty.
        CorruptFile: a checkpoint file is not what was saved.
    """
    root, _, run = run_uri.rstrip("/").rpartition("/")
    ledger = Ledger(root or ".", run)
    manifest = ledger.get(STAGE, step)
    if manifest is None:
        there = ", ".join(map(str, ledger.committed(STAGE))) or "none"
        raise ExportError(f"run {run!r} has no checkpoint of step {step}; there are: {there}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target} is not empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_model(ledger, manifest, role, partial)
        partial.chmod(0o755)  # it was made for this user only
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def write_model(ledger: Ledger, manifest: Manifest, role: str, folder: Path) -> None:
    """Write one model of a checkpoint into a folder. Raises as `export`."""
    parts = _parts(ledger, manifest, role)
    for name, entry in small_entries(manifest, role).items():
        (folder / name).write_bytes(read_verified(ledger.store, manifest.folder, entry))
    reader = ShardedReader(ledger.store, manifest.folder, parts)
    dtype = getattr(torch, parts[0].about["dtype"])
    write_weights(tensors(read_architecture(folder), reader, dtype), folder)


def _parts(ledger: Ledger, manifest: Manifest, role: str) -> list[Index]:
    entries = index_entries(manifest)
    length = len(part_name("", 0)) + len(".json")
    mine = [entry for entry in entries if entry.path[:-length] == role]
    if not mine:
        there = ", ".join(sorted({entry.path[:-length] for entry in entries})) or "none that this release can read"
        raise ExportError(f"{manifest.uri} has no {role}; it has: {there}")
    return [read_index(ledger.store, manifest, entry) for entry in mine]


def tensors(arch: Architecture, reader: ShardedReader, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All Hugging Face tensors of a model, one after another."""
    for weight in weight_map(arch):
        for piece in weight.all_pieces():
            values = torch.from_numpy(reader.whole(piece.name, "param")[: piece.shape[0]])  # without the padding
            if not bool(values.isfinite().all()):
                raise ExportError(f"the checkpoint's {piece.name} holds numbers that are not finite")
            yield piece.name, values.reshape(piece.shape).to(dtype).contiguous()


def write_weights(named: Iterator[tuple[str, Tensor]], target: Path) -> None:
    """Write tensors as safetensors of at most about `SHARD_BYTES` each, with an index if there are several."""
    group: dict[str, Tensor] = {}
    files: list[Path] = []
    place: dict[str, int] = {}
    size = total = 0

    def finish() -> None:
        files.append(target / f"part-{len(files)}")
        save_file(group, files[-1], metadata={"format": "pt"})
        group.clear()

    for name, tensor in named:
        if group and size + tensor.nbytes > SHARD_BYTES:
            finish()
            size = 0
        group[name], place[name] = tensor, len(files)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    finish()
    if len(files) == 1:
        files[0].rename(target / "model.safetensors")
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for file, name in zip(files, names, strict=True):
        file.rename(target / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[number] for name, number in place.items()}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Command line; prints the folder, or one line that says why not (exit code 2)."""
    parser = argparse.ArgumentParser(prog="python -m engine.weights.export", description=__doc__)
    parser.add_argument("--run", required=True, help="folder or s3:// prefix of the run")
    parser.add_argument("--step", required=True, type=int, help="weight version: updates made")
    parser.add_argument("--to", required=True, type=Path, help="new or empty folder")
    parser.add_argument("--role", default="actor", help="actor or critic")
    options = parser.parse_args(arguments)
    try:
        print(export(options.run, options.step, options.to, options.role))
    except (ExportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
