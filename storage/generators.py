"""Prompts made by a program: reasoning_gym's procedural datasets, and a user's own function.

A generator is a function of (index, seed) and keeps no state, so any prompt of a run can be made again at any time.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from storage.data_config import DataConfig
from storage.normalise import Prompt, json_value, make_prompt, prompt_from_row
from storage.rows import DataError

REASONING_GYM = "reasoning_gym"
_BLOCK = 1024
"""reasoning_gym wants the size in advance, and some datasets get slow with it: an endless one is many blocks."""


def open_generator(config: DataConfig) -> Callable[[int, int], Prompt]:
    """The function (index, seed) → Prompt for `config.task`. Raises DataError if there is no such task."""
    module, _, name = str(config.task).partition(":")
    if not module or not name:
        raise DataError(f"task {config.task!r} must look like reasoning_gym:<dataset> or module:function")
    if module == REASONING_GYM:
        return _reasoning_gym(config, name)
    return _user_function(config, module, name)


def mixed_seed(*parts: Any) -> int:
    """A seed below 2^31 from several values.

    Generators like to add the index to the seed, so seeds 0 and 1 would give nearly the same prompts, and a held-out
    set the prompts trained on; mixed seeds lie far apart.
    """
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _user_function(config: DataConfig, module: str, name: str) -> Callable[[int, int], Prompt]:
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"task {config.task!r}: {error}; it must be importable where onecopy is started") from error
    if not callable(function):
        raise DataError(f"task {config.task!r} is a {type(function).__name__}, it must be a function")

    def entry(index: int, seed: int) -> Prompt:
        place = f"task {config.task}, index {index}"
        try:
            row = function(index, mixed_seed(config.seed, seed), **config.task_options)
        except Exception as error:
            raise DataError(f"{place}: {type(error).__name__}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{place}: the function must return a row as a dict, not {type(row).__name__}")
        missing = [column for column in (config.prompt_column, config.answer_column) if column and column not in row]
        if missing:
            raise DataError(f"{place}: the row has no {missing}, only {sorted(row)}")
        return prompt_from_row(config, str(config.task), row, place)

    return entry


def _reasoning_gym(config: DataConfig, name: str) -> Callable[[int, int], Prompt]:
    if importlib.util.find_spec(REASONING_GYM) is None:
        raise DataError(f"task {config.task!r} needs the package reasoning-gym: pip install reasoning-gym")

    @lru_cache(maxsize=4)
    def block(number: int, seed: int) -> Any:
        import reasoning_gym

        try:
            mixed = mixed_seed(config.seed, seed, number)
            return reasoning_gym.create_dataset(name, seed=mixed, size=_BLOCK, **config.task_options)
        except Exception as error:
            raise DataError(f"task {config.task!r} with options {config.task_options}: {error}") from error

    def entry(index: int, seed: int) -> Prompt:
        item = block(index // _BLOCK, seed)[index % _BLOCK]
        messages = [{"role": "user", "content": item["question"]}]
        return make_prompt(config, str(config.task), messages, item["answer"], item, f"{config.task}, index {index}")

    _check_verifier(config, block(0, 0))
    return entry


def _check_verifier(config: DataConfig, dataset: Any) -> None:
    """Refuse a dataset whose verifier cannot work on an entry that was stored as JSON (some compare Python tuples)."""
    item = dataset[0]
    answer = item["answer"]
    if dataset.score_answer(answer, json_value(item)) != dataset.score_answer(answer, item):
        raise DataError(f"task {config.task!r}: its verifier does not work on stored entries; choose another dataset")
