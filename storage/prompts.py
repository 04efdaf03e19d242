"""Prompts: where they come from, and which of them a step takes.

`PromptSource.batch(step, size, seed)` depends on its arguments alone, never on what was asked before, so a resumed run
goes on with exactly the prompts that an uninterrupted one would have taken.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from storage.data_config import DataConfig
from storage.generators import open_generator
from storage.manifest import fingerprint
from storage.normalise import Prompt, prompt_from_row, read_field
from storage.rows import DataError, RowFile, find_files, read_rows

__all__ = ["DataConfig", "DataError", "Prompt", "PromptSource", "open_prompts"]


@dataclass(frozen=True)
class PromptSource:
    """An ordered set of prompts, finite or endless.

    `size` is the number of prompts in an epoch, None if endless. `fingerprint` changes with the data, so a run can
    tell that its files were edited. `entry(index, seed)` makes one prompt; use `batch`.
    """

    config: DataConfig
    fingerprint: str
    size: int | None
    entry: Callable[[int, int], Prompt]

    def batch(self, step: int, size: int, seed: int) -> list[Prompt]:
        """The `size` prompts of step `step` (from 0) of a run with this seed.

        A finite source is shuffled anew each epoch, and no prompt comes twice within one; a batch may span two
        epochs. An endless source makes new prompts for every position. Raises DataError for a row that cannot be used.
        """
        if step < 0 or size < 1:
            raise ValueError(f"a batch needs step >= 0 and size >= 1, not step {step} and size {size}")
        positions = range(step * size, (step + 1) * size)
        if self.size is None:
            return [self.entry(position, seed) for position in positions]
        # The run's seed orders a finite source; it must not change which prompts there are.
        return [self.entry(_shuffled_index(position, self.size, seed), 0) for position in positions]


def open_prompts(config: DataConfig) -> PromptSource:
    """Open and check the configured prompts. Raises DataError, naming file and row, before anything is started.

    Every prompt in files is checked, so that a run does not stop at a bad row hours later.
    """
    return _open_files(config) if config.path is not None else _open_task(config)


def _open_task(config: DataConfig) -> PromptSource:
    generator = open_generator(config)
    generator(0, 0)
    identity = config.model_dump(mode="json", exclude={"overlong"})
    return PromptSource(config, fingerprint(identity), config.size, generator)


def _open_files(config: DataConfig) -> PromptSource:
    names, parts, digests = [], [], []
    for store, name in find_files(str(config.path)):
        data = store.read(name)
        part = read_rows(store.uri(name), data)
        _check_columns(part, store.uri(name), config)
        names.append(name)
        parts.append(part)
        digests.append(hashlib.sha256(data).hexdigest())
    ends = np.cumsum([len(part) for part in parts])
    size = min(int(ends[-1]), config.size or int(ends[-1]))

    def entry(index: int, seed: int) -> Prompt:
        which = int(np.searchsorted(ends, index, side="right"))
        part = parts[which]
        row = index - (int(ends[which - 1]) if which else 0)
        return prompt_from_row(config, names[which], part.row(row), part.place(row))

    identity = config.model_dump(mode="json", exclude={"overlong", "path"})
    return PromptSource(config, fingerprint(identity, list(zip(names, digests, strict=True))), size, entry)


def _check_columns(part: RowFile, uri: str, config: DataConfig) -> None:
    """Fail now for a column that a whole file lacks or a prompt that cannot be used."""
    for setting, column in (("prompt_column", config.prompt_column), ("answer_column", config.answer_column)):
        if column is not None and column not in part.columns and column.split(".")[0] not in part.columns:
            has = sorted(part.columns)
            raise DataError(f"{uri} has no column {column!r}, only {has}; set {setting} to one of them")
    top = config.prompt_column if config.prompt_column in part.columns else config.prompt_column.split(".")[0]
    only_prompt = config.model_copy(update={"answer_column": None})
    for index, value in enumerate(part.values(top)):
        prompt_from_row(only_prompt, uri, {top: value}, part.place(index))
    if config.answer_column is not None:
        read_field(part.row(0), config.answer_column, part.place(0))


def _shuffled_index(position: int, size: int, seed: int) -> int:
    epoch, offset = divmod(position, size)
    return int(_permutation(size, seed, epoch)[offset])


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(size) that is the same in every release of Python and NumPy.

    The indices are sorted by a hash of (seed, epoch, index): the SplitMix64 finalizer over a start taken from SHA-256.
    """
    start = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "little")
    mixed = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")
