"""Write a checkpoint as a Hugging Face folder: `python -m engine.weights.export --run URI --step N --to DIR`.

Needs no pool and no Megatron: the ranks' files say which part of what they hold, and the weight map says how the parts make
up the tensors that transformers and vLLM load.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.layout import Layout
from engine.weights.architecture import read_architecture
from engine.weights.huggingface import huggingface_tensors
from engine.weights.map import Shard, Weight, weight_map
from engine.weights.sources import copy_small_files
from storage.checkpoints import is_critic
from storage.filesystem import Store
from storage.integrity import verify_file
from storage.ledger import Ledger
from storage.manifest import Manifest

SHARD_BYTES = 4 * 10**9
"""Size at which the next model-….safetensors file is begun."""


class ExportError(ValueError):
    """There is no such checkpoint, or the target cannot take the model."""


def export(run_uri: str, step: int, target: Path) -> Path:
    """Write the weights after `step` updates, tokenizer and settings to `target`.

    Raises:
        ExportError: no checkpoint of that step (the message lists those there are), or `target` is not empty.
        CorruptFile: a checkpoint file is not what its manifest says.
    """
    root, _, run = run_uri.rstrip("/").rpartition("/")
    ledger = Ledger(root or ".", run)
    manifest = ledger.get("checkpoint", step)
    if manifest is None:
        there = ", ".join(map(str, ledger.committed("checkpoint"))) or "none"
        raise ExportError(f"run {run!r} has no checkpoint of step {step}; there are: {there}")
    if target.exists() and any(target.iterdir()):
        raise ExportError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="onecopy-") as scratch:
        entries = [entry for entry in manifest.files if not is_critic(entry.path)]
        files = [_fetch(ledger.store, manifest, entry, Path(scratch)) for entry in entries]
        checkpoint = CheckpointFiles(files)
        source = Path(checkpoint.model_folder)
        write_weights(checkpoint, target)
    copy_small_files(source, target)
    _set_dtype(target / "config.json", checkpoint.dtype)
    return target


def _fetch(store: Store, manifest: Manifest, entry: Any, scratch: Path) -> Path:
    verify_file(store, manifest.folder, entry)
    path = f"{manifest.folder}/{entry.path}"
    if store.is_local:
        return Path(store.uri(path))
    with store.open_input(path) as source, (scratch / entry.path).open("wb") as copy:
        while piece := source.read(1 << 24):
            copy.write(piece)
    return scratch / entry.path


class CheckpointFiles:
    """All ranks' files of one checkpoint, read tensor by tensor."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [safe_open(path, framework="pt").__enter__() for path in paths]
        self._headers = [json.loads(file.metadata()["onecopy"]) for file in self._files]
        first = self._headers[0]
        self.layout = Layout.from_json(first["layout"])
        self.dtype: str = first["dtype"]
        self.model_folder: str = first["model_folder"]

    def shards(self, weight: Weight) -> dict[Shard, Tensor]:
        """The fp32 master weights of one parameter, by the part of it that they are."""
        places = [weight.shard(self.layout, self.layout.coordinates(rank)) for rank in range(self.layout.world_size)]
        flat = {shard: torch.full((math.prod(weight.shard_shape(shard)),), float("nan")) for shard in places}
        for file, header in zip(self._files, self._headers, strict=True):
            if weight.megatron in header["ranges"]:
                start, stop = header["ranges"][weight.megatron]
                flat[places[header["rank"]]][start:stop] = file.get_tensor(f"{weight.megatron}|param")
        if any(bool(values.isnan().any()) for values in flat.values()):
            raise ExportError(
                f"the checkpoint does not hold all of {weight.megatron}, or holds numbers that are not finite"
            )
        return {shard: values.view(weight.shard_shape(shard)) for shard, values in flat.items()}


def write_weights(checkpoint: CheckpointFiles, target: Path) -> None:
    """Write the model's safetensors files to the folder `target`.

    Raises:
        ExportError: the checkpoint's files do not hold all of the model.
    """
    arch = read_architecture(checkpoint.model_folder)
    dtype = getattr(torch, checkpoint.dtype)
    groups: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for weight in weight_map(arch):
        for name, tensor in huggingface_tensors(weight, checkpoint.shards(weight)).items():
            converted = tensor.to(dtype).contiguous()
            if sizes[-1] and sizes[-1] + converted.nbytes > SHARD_BYTES:
                groups.append({})
                sizes.append(0)
            groups[-1][name] = converted
            sizes[-1] += converted.nbytes
    if len(groups) == 1:
        save_file(groups[0], target / "model.safetensors", metadata={"format": "pt"})
        return
    names: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, target / file, metadata={"format": "pt"})
        names |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": names}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _set_dtype(path: Path, dtype: str) -> None:
    """The exported folder says the number format that its files have."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Command line; prints the folder, or one line that says why not (exit code 2)."""
    parser = argparse.ArgumentParser(prog="python -m engine.weights.export", description=__doc__)
    parser.add_argument("--run", required=True, help="folder or s3:// prefix of the run")
    parser.add_argument("--step", required=True, type=int, help="weight version: updates made")
    parser.add_argument("--to", required=True, type=Path, help="new or empty folder")
    options = parser.parse_args(arguments)
    try:
        print(export(options.run, options.step, options.to))
    except (ExportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
