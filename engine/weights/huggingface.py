"""Hugging Face folders in and out: every rank reads its own slices of the safetensors files, nothing more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine.weights.architecture import Architecture
from engine.weights.families import HEAD, SCORE
from engine.weights.map import Piece, Shard, Weight, weight_map

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
HEAD_NAME, SCORE_NAME = HEAD.huggingface[0][0], SCORE.huggingface[0][0]


class WeightsMismatch(ValueError):
    """The files do not hold the tensors that the architecture needs, or hold some that nothing would read."""


class SafetensorsFolder:
    """The tensors of a folder with `model.safetensors` or an index of several files.

    Raises:
        FileNotFoundError: neither is there (a folder with only .bin files is refused: pickles can run code).
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._file_of: dict[str, Path] = {name: folder / file for name, file in files.items()}
        elif (single := folder / "model.safetensors").is_file():
            with safe_open(single, framework="pt") as tensors:
                self._file_of = dict.fromkeys(tensors.keys(), single)
        else:
            raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def slice(self, name: str) -> Any:
        """A lazily read tensor; index it to read a part."""
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path].get_slice(name)


def check_names(arch: Architecture, names: Iterable[str]) -> None:
    """Raise WeightsMismatch unless the names are exactly those that the weight map reads.

    A head listed beside tied embeddings is left unread: the configuration decides, not a stale tensor. A score head may be
    missing (a critic begins from a language model, whose own head it does not use).
    """
    needed = {piece.name for weight in weight_map(arch) for piece in weight.all_pieces()}
    present = {name for name in names if not name.endswith(IGNORED_SUFFIXES)}
    if arch.tied_embeddings or arch.labels:
        present.discard(HEAD_NAME)
    if arch.labels:
        needed.discard(SCORE_NAME)
        present.discard(SCORE_NAME)
    missing, unknown = sorted(needed - present), sorted(present - needed)
    if missing or unknown:
        raise WeightsMismatch(
            f"the weights do not fit {arch.model_type}: missing {_some(missing)}; not used by it {_some(unknown)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"


def load_folder(
    parameters: Mapping[str, Tensor], arch: Architecture, folder: str | Path, shards: Mapping[str, Shard]
) -> None:
    """Copy a folder's weights into Megatron's parameters, in place (addresses stay).

    Args:
        parameters: name in the weight map to this rank's parameter; those of other pipeline stages are missing.
        folder: Hugging Face folder.
        shards: the same names to the part that this rank holds.

    Raises:
        FileNotFoundError, WeightsMismatch: see above.
    """
    files = SafetensorsFolder(folder)
    check_names(arch, files.names)
    with torch.no_grad():
        for weight in weight_map(arch):
            if weight.megatron not in parameters:
                continue
            if weight.pieces[0][0].name == SCORE_NAME and SCORE_NAME not in files.names:
                parameters[weight.megatron].zero_()  # every value is 0 until it is trained
            else:
                fill_shard(parameters[weight.megatron], weight, files.slice, shards[weight.megatron])


def fill_shard(target: Tensor, weight: Weight, slice_of: Any, shard: Shard) -> None:
    """Write one shard of `weight` into `target`; `slice_of(name)` gives an indexable whole tensor."""
    if target.shape != weight.shard_shape(shard):
        raise WeightsMismatch(
            f"{weight.megatron}: {tuple(target.shape)} in memory, {weight.shard_shape(shard)} in the weight map"
        )
    if weight.vocabulary:
        target.zero_()  # rows beyond the real vocabulary
    for number, expert in enumerate(weight.experts(shard)):
        part, start = (target[number] if weight.stacked else target), 0
        for piece in weight.pieces[expert]:
            tensor = slice_of(piece.name)
            _check_shape(tensor, piece)
            if weight.axis is None:
                part.copy_(tensor[:])
                continue
            a, b = weight.bounds(piece, shard)
            values = tensor[a:b] if weight.axis == 0 else tensor[:, a:b]  # ends at the real vocabulary
            part.narrow(weight.axis, start, values.shape[weight.axis]).copy_(values)
            start += b - a


def _check_shape(tensor: Any, piece: Piece) -> None:
    shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
    if shape != piece.shape:
        raise WeightsMismatch(f"{piece.name} has shape {shape} in the file, {piece.shape} by config.json")


def huggingface_tensors(weight: Weight, shards: Mapping[Shard, Tensor]) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of one parameter, from all its shards."""
    first = next(iter(shards.values()))
    out = {piece.name: first.new_empty(piece.shape) for piece in weight.all_pieces()}
    for shard, tensor in shards.items():
        for number, expert in enumerate(weight.experts(shard)):
            part, start = (tensor[number] if weight.stacked else tensor), 0
            for piece in weight.pieces[expert]:
                if weight.axis is None:
                    out[piece.name].copy_(part)
                    continue
                a, b = weight.bounds(piece, shard)
                real = min(b, piece.shape[weight.axis]) - min(a, piece.shape[weight.axis])
                out[piece.name].narrow(weight.axis, min(a, piece.shape[weight.axis]), real).copy_(
                    part.narrow(weight.axis, start, real)
                )
                start += b - a
    return out
