"""A model with random weights, written as a Hugging Face folder: `python -m engine.weights.initialise CONFIG.json FOLDER SEED`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.weights.architecture import architecture_of
from engine.weights.map import weight_map

STANDARD_DEVIATION = 0.02
"""Of every matrix, as transformers' `initializer_range`."""


def write_random_model(
    config: dict[str, Any], folder: Path, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Path:
    """Write `config` (the content of a config.json) and random weights to `folder`; norms are 1, biases 0.

    The same seed gives the same numbers on one kind of device.

    Raises:
        UnsupportedModel: the configuration asks for something that the engine does not support.
    """
    arch = architecture_of(config)
    generator = torch.Generator(device).manual_seed(seed)
    deviation = config.get("initializer_range", STANDARD_DEVIATION)
    tensors = {}
    for weight in weight_map(arch):
        for piece in weight.all_pieces():
            if len(piece.shape) > 1:
                drawn = torch.randn(piece.shape, generator=generator, device=device) * deviation
                tensors[piece.name] = drawn.to("cpu", dtype)
            else:
                tensors[piece.name] = torch.full(piece.shape, 0.0 if piece.name.endswith(".bias") else 1.0, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


if __name__ == "__main__":
    write_random_model(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]), int(sys.argv[3]))
