"""The files of a model folder beside its weights: configuration, tokenizer, chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.weights.sources import SMALL_FILES

CONFIG = "config.json"
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,80}")


def small_files(folder: Path, dtype: str, labels: int = 0) -> dict[str, bytes]:
    """Name to content, with a configuration that says what the weights are that are kept beside them.

    Files with blanks or other unusual characters in their names are nothing that a tokenizer reads, and are left out.

    Args:
        dtype: number format of the weights, as "bfloat16".
        labels: of a score head (critic, reward model); 0: a language model.

    Raises:
        FileNotFoundError: there is no config.json.
    """
    found = {
        file.name: file.read_bytes()
        for pattern in SMALL_FILES
        for file in sorted(folder.glob(pattern))
        if file.is_file() and not file.name.endswith(".index.json") and _PLAIN.fullmatch(file.name)
    }
    if CONFIG not in found:
        raise FileNotFoundError(f"{folder / CONFIG} is missing")
    config = json.loads(found[CONFIG])
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if labels:
        config |= _classifier(config, labels)
    return found | {CONFIG: json.dumps(config, indent=2).encode()}


def _classifier(config: dict[str, Any], labels: int) -> dict[str, Any]:
    """What transformers needs to load a score head on the same backbone."""
    names = {str(number): f"LABEL_{number}" for number in range(labels)}
    kinds = [re.sub(r"For\w+$", "ForSequenceClassification", name) for name in config.get("architectures") or []]
    changes: dict[str, Any] = {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
    return changes | {"architectures": kinds, "tie_word_embeddings": False}
