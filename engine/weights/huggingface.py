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
from engine.weights.map import Piece, Weight, weight_map

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


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

    A head listed beside tied embeddings is left unread: the configuration decides, not a stale tensor.
    """
    needed = {piece.name for weight in weight_map(arch) for piece in weight.all_pieces()}
    present = {name for name in names if not name.endswith(IGNORED_SUFFIXES)}
    if arch.tied_embeddings:
        present.discard("lm_head.weight")
    missing, unknown = sorted(needed - present), sorted(present - needed)
    if missing or unknown:
        raise WeightsMismatch(
            f"the weights do not fit {arch.model_type}: missing {_some(missing)}; not used by it {_some(unknown)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"


def load_folder(
    parameters: Mapping[str, Tensor], arch: Architecture, folder: str | Path, tp: int, tp_rank: int
) -> None:
    """Copy a folder's weights into Megatron's parameters, in place (addresses stay).

    Args:
        parameters: Megatron name to this rank's parameter, every one of the weight map.
        folder: Hugging Face folder.
        tp, tp_rank: the tensor parallel size and this rank's place in it.

    Raises:
        FileNotFoundError, WeightsMismatch: see above.
    """
    files = SafetensorsFolder(folder)
    check_names(arch, files.names)
    with torch.no_grad():
        for weight in weight_map(arch):
            fill_shard(parameters[weight.megatron], weight, files.slice, tp, tp_rank)


def fill_shard(target: Tensor, weight: Weight, slice_of: Any, tp: int, tp_rank: int) -> None:
    """Write one rank's shard of `weight` into `target`; `slice_of(name)` gives an indexable whole tensor."""
    if target.shape != weight.shard_shape(tp):
        raise WeightsMismatch(
            f"{weight.megatron}: {tuple(target.shape)} in memory, {weight.shard_shape(tp)} in the weight map"
        )
    for number, row in enumerate(weight.pieces):
        part = target[number] if weight.stacked else target
        if weight.vocabulary:
            part.zero_()  # rows beyond the real vocabulary
        start = 0
        for piece in row:
            values = _read(slice_of(piece.name), piece, weight, tp, tp_rank)
            if weight.axis is None:
                part.copy_(values)
            else:
                part.narrow(weight.axis, start, values.shape[weight.axis]).copy_(values)
                start += values.shape[weight.axis]


def _read(tensor: Any, piece: Piece, weight: Weight, tp: int, tp_rank: int) -> Tensor:
    shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
    if shape != piece.shape:
        raise WeightsMismatch(f"{piece.name} has shape {shape} in the file, {piece.shape} by config.json")
    if weight.axis is None:
        return tensor[:]
    a, b = weight.piece_range(piece, tp, tp_rank)
    return tensor[a:b] if weight.axis == 0 else tensor[:, a:b]


def huggingface_tensors(weight: Weight, shards: list[Tensor]) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of one parameter, from its shard on every tensor parallel rank."""
    tp = len(shards)
    out: dict[str, Tensor] = {}
    for number, row in enumerate(weight.pieces):
        parts = [shard[number] for shard in shards] if weight.stacked else shards
        if weight.axis is None:
            out[row[0].name] = parts[0].clone()
            continue
        starts = [0] * tp
        for piece in row:
            columns = []
            for rank, part in enumerate(parts):
                a, b = weight.piece_range(piece, tp, rank)
                columns.append(part.narrow(weight.axis, starts[rank], b - a))
                starts[rank] += b - a
            out[piece.name] = torch.cat(columns, weight.axis).contiguous()
    return out
