"""What cannot work together, found before anything is started or written; all of it at once."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import ModelConfig
from engine.losses.config import LossConfig, loss_problems
from engine.tokenizer import Tokenizer, TokenizerError
from engine.weights.architecture import Architecture, UnsupportedModel, read_architecture
from engine.weights.sources import ModelNotFound, local_folder
from flows.config import PostTrainConfig, SFTConfig, TrainConfig
from flows.placement import group_of, parallel_of, placement_problems
from storage.filesystem import InvalidName, StorageError, Store, checked_name
from storage.manifest import fingerprint
from storage.prompts import DataConfig, DataError, Prompt, PromptSource, open_prompts
from tasks.advantages.requirements import problems
from tasks.plugins import UnknownFunction
from tasks.prompt import prompt_tokens
from tasks.rewards import bind

MEASURED = 100_000
MEASURED_OF_A_TASK = 256
"""Prompts whose length is checked beforehand, of files and of an endless task; every prompt is checked when it is drawn."""


@dataclass(frozen=True)
class Violation:
    """One reason why a configuration cannot run, and the dotted keys it is about."""

    keys: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{' and '.join(self.keys)}: {self.message}"


@dataclass(frozen=True)
class Companion:
    """A model beside the actor: its folder here, and what changes with its files."""

    folder: str
    identity: str


@dataclass(frozen=True)
class Prepared:
    """What checking had to open anyway, for the run to use."""

    folder: str
    identity: str
    architecture: Architecture
    tokenizer: Tokenizer
    context_tokens: int
    source: PromptSource
    held_out: PromptSource | None
    companions: dict[str, Companion]
    """"reference" and "critic", as far as the run needs them."""


def check(config: TrainConfig) -> tuple[Prepared | None, list[Violation]]:
    """Every violation of `config`; what was opened, if there is none."""
    violations = [*_rules(config), *_functions(config), *_places(config)]
    model, problems = _open_model(config)
    violations += problems
    source, problems = _open_source("data", config.data)
    violations += problems
    held_out: PromptSource | None = None
    if config.validation is not None:
        held_out, problems = _open_source("validation.data", config.validation.data)
        violations += problems
    if model is None:
        return None, violations
    folder, architecture, tokenizer = model
    context, problems = _context(config, architecture)
    violations += problems
    violations += _layout(config, architecture)
    companions, wrong = _companions(config, folder, architecture)
    violations += wrong
    if not problems:
        violations += _all_prompts_fit(config, source, held_out, tokenizer, context)
    if violations or source is None:
        return None, violations
    identity = model_identity(folder)
    return Prepared(folder, identity, architecture, tokenizer, context, source, held_out, companions), []


def _rules(config: TrainConfig) -> Iterator[Violation]:
    """Rules between the parts that need nothing but the configuration."""
    if isinstance(config, PostTrainConfig):
        yield from _post_train_rules(config)
    if isinstance(config, SFTConfig) and config.fit.mini_batch_size > config.demonstrations_per_step:
        yield Violation(
            ("fit.mini_batch_size",), f"is more than demonstrations_per_step ({config.demonstrations_per_step})"
        )
    if config.evaluate_every and config.validation is None:
        yield Violation(
            ("evaluate_every",), "needs validation.data, the prompts to evaluate on; 0 switches evaluation off"
        )
    for key, data in _data_sets(config):
        generated = (data.task or "").startswith("reasoning_gym:")
        if config.reward.function == "reasoning_gym" and not generated:
            yield Violation(
                ("reward.function", f"{key}.task"), "'reasoning_gym' scores only prompts of reasoning_gym:<data set>"
            )
    if config.validation is not None:
        if config.validation.data == config.data:
            yield Violation(
                ("validation.data",), "is the training data; held-out prompts need another file, or another seed"
            )
        if config.validation.temperature == 0 and config.validation.samples_per_prompt > 1:
            yield Violation(
                ("validation.samples_per_prompt", "validation.temperature"),
                "greedy answers to one prompt are all the same",
            )
    decay = config.optimizer.decay_steps
    if decay is not None and config.optimizer.warmup_steps >= decay:
        yield Violation(("optimizer.warmup_steps", "optimizer.decay_steps"), "the decay must end after the warm-up")
    if config.optimizer.schedule != "constant" and decay is None:
        yield Violation(("optimizer.decay_steps",), f"is needed by optimizer.schedule {config.optimizer.schedule!r}")


def _data_sets(config: TrainConfig) -> Iterator[tuple[str, DataConfig]]:
    """The prompts whose responses are scored."""
    if isinstance(config, PostTrainConfig):
        yield "data", config.data
    if config.validation is not None:
        yield "validation.data", config.validation.data


def _post_train_rules(config: PostTrainConfig) -> Iterator[Violation]:
    generation, algorithm = config.generation, config.algorithm
    for keys, message in problems(algorithm, generation, config.reward):
        yield Violation(keys, message)
    if generation.temperature == 0:
        yield Violation(("generation.temperature",), "must be above 0 for training: greedy samples are all the same")
    if generation.top_p != 1:
        yield Violation(
            ("generation.top_p",),
            "must be 1 for training: the log-probabilities of a truncated distribution are not those that the actor is trained on",
        )
    yield from _loss(config.loss)
    size = algorithm.mini_batch_size
    if size is not None and config.samples_per_step % size:
        yield Violation(
            ("algorithm.mini_batch_size",),
            f"{size} does not divide the {config.samples_per_step} samples of a step"
            f" ({config.prompts_per_step} prompts_per_step x {generation.samples_per_prompt} samples_per_prompt)",
        )


def _functions(config: TrainConfig) -> Iterator[Violation]:
    if isinstance(config, PostTrainConfig) or config.validation is not None:
        try:
            bind(config.reward.function)
        except UnknownFunction as error:
            yield Violation(("reward.function",), str(error))


def _places(config: TrainConfig) -> Iterator[Violation]:
    if config.experiment is not None:
        try:
            checked_name("run", config.experiment)
        except InvalidName as error:
            yield Violation(("experiment",), str(error))
    try:
        Store.open(config.root)
    except StorageError as error:
        yield Violation(("root",), str(error))


def _open_model(config: TrainConfig) -> tuple[tuple[str, Architecture, Tokenizer] | None, list[Violation]]:
    try:
        folder = str(local_folder(config.model.path))
        return (folder, read_architecture(folder), Tokenizer(folder)), []
    except (ModelNotFound, FileNotFoundError, UnsupportedModel, TokenizerError) as error:
        return None, [Violation(("model.path",), str(error))]


def model_identity(folder: str) -> str:
    """Changes with the model's settings and tokenizer, and with the names and sizes of its weight files.

    Their contents are not read: that would take minutes for a large model.
    """
    small = [sorted(Path(folder).glob(pattern)) for pattern in ("*.json", "*.jinja")]
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in itertools.chain(*small)]
    weights = [(path.name, path.stat().st_size) for path in sorted(Path(folder).glob("*.safetensors"))]
    return fingerprint(texts, weights)


def _open_source(key: str, data: DataConfig) -> tuple[PromptSource | None, list[Violation]]:
    try:
        return open_prompts(data), []
    except (DataError, StorageError) as error:
        return None, [Violation((key,), str(error))]


def _loss(loss: LossConfig) -> Iterator[Violation]:
    if loss.name == "sft":
        yield Violation(("loss.name",), "sft learns from demonstrations; `onecopy sft` does that")
    for problem in loss_problems(loss):
        keys, _, message = problem.partition(": ")
        yield Violation(tuple(f"loss.{key}" for key in keys.split(", ")), message)


def _context(config: TrainConfig, architecture: Architecture) -> tuple[int, list[Violation]]:
    """Tokens of prompt and response together, and what is wrong with them."""
    context = config.generation.context(architecture.max_positions)
    if context > architecture.max_positions:
        message = f"{context} is beyond the model's context of {architecture.max_positions} tokens"
        return context, [Violation(("generation.max_model_len",), message)]
    if config.generation.max_response_tokens >= context:
        message = (
            f"{config.generation.max_response_tokens} leaves no room for a prompt in a context of {context} tokens"
        )
        return context, [Violation(("generation.max_response_tokens",), message)]
    return context, []


def _open_companion(
    key: str, chosen: ModelConfig | None, config: TrainConfig, folder: str, architecture: Architecture
) -> tuple[Companion | None, list[Violation]]:
    """The model at `key`, which must read the same tokens as the actor and fit into its group's layout; else the run's own."""
    if chosen is None:
        chosen = config.model
    try:
        other = str(local_folder(chosen.path))
        theirs = read_architecture(other)
    except (ModelNotFound, UnsupportedModel, OSError) as error:
        return None, [Violation((f"{key}.model.path",), str(error))]
    parallel = parallel_of(config, group_of(config, key))
    wrong = theirs.training_problems(parallel.layout, parallel.sequence_parallel)
    if theirs.vocabulary != architecture.vocabulary:
        wrong.append(f"has a vocabulary of {theirs.vocabulary} tokens, the model one of {architecture.vocabulary}")
    labels = (0,) if key == "reference" else (0, 1)
    if theirs.labels not in labels:
        wrong.append(f"is a classifier with {theirs.labels} labels")
    return Companion(other, model_identity(other)), [Violation((f"{key}.model",), problem) for problem in wrong]


def _companions(
    config: TrainConfig, folder: str, architecture: Architecture
) -> tuple[dict[str, Companion], list[Violation]]:
    """Reference and critic, as far as the run needs them."""
    found: dict[str, Companion] = {}
    violations: list[Violation] = []
    if not isinstance(config, PostTrainConfig):
        return found, violations
    with contextlib.suppress(UnknownFunction):  # an unknown estimator is a violation of its own
        wanted = {"reference": config.needs_reference, "critic": config.needs_critic}
        needed = [key for key, is_wanted in wanted.items() if is_wanted]
        violations += [Violation((key,), message) for key, message in placement_problems(config, set(needed))]
        for key in needed:
            companion, problems = _open_companion(key, getattr(config, key).model, config, folder, architecture)
            violations += problems
            if companion is not None:
                found[key] = companion
    return found, violations


def _layout(config: TrainConfig, architecture: Architecture) -> list[Violation]:
    parallel = config.parallel
    training = architecture.training_problems(parallel.layout, parallel.sequence_parallel)
    violations = [Violation(("parallel",), problem) for problem in training]
    try:
        layout = config.generation.layout(parallel)
    except ValueError as error:
        return [*violations, Violation(("generation",), str(error))]
    problems = [] if layout == parallel.layout else architecture.layout_problems(layout)
    return violations + [Violation(("generation",), f"generation: {problem}") for problem in problems]


def _all_prompts_fit(
    config: TrainConfig, source: PromptSource | None, held_out: PromptSource | None, tokenizer: Tokenizer, context: int
) -> list[Violation]:
    violations: list[Violation] = []
    if source is not None:
        limit = context - _reserved(config)
        violations += _prompts_fit("data", source, config.data.overlong, tokenizer, limit)
    if held_out is not None and config.validation is not None:
        limit = context - config.generation.max_response_tokens
        violations += _prompts_fit("validation.data", held_out, config.validation.data.overlong, tokenizer, limit)
    return violations


def _reserved(config: TrainConfig) -> int:
    """Tokens that a training prompt must leave free. What a demonstration's own answer takes is checked when it is drawn."""
    return 1 if isinstance(config, SFTConfig) else config.generation.max_response_tokens


def _prompts_fit(key: str, source: PromptSource, overlong: str, tokenizer: Tokenizer, limit: int) -> list[Violation]:
    """Whether the prompts fit (under `overlong: error`), and whether the first one can be rendered at all."""
    try:
        too_long = list(_too_long(source, tokenizer, limit))
    except (DataError, TokenizerError) as error:
        return [Violation((key,), str(error))]
    if not too_long or overlong == "drop":
        return []
    prompt, length = max(too_long, key=lambda pair: pair[1])
    return [
        Violation(
            (key,),
            f"{len(too_long)} prompts do not fit into the {limit} tokens that the longest response leaves of the context;"
            f" the longest, {prompt.prompt_id}, has {length}; shorten them, lower generation.max_response_tokens,"
            f" or set {key}.overlong: drop",
        )
    ]


def _too_long(source: PromptSource, tokenizer: Tokenizer, limit: int) -> Iterator[tuple[Prompt, int]]:
    """Prompts of more than `limit` tokens, with their lengths; of a generated source, among its first ones."""
    first = source.entry(0, 0)
    first_length = len(prompt_tokens(tokenizer, first)[1])
    for index in range(min(source.size or MEASURED_OF_A_TASK, MEASURED)):
        prompt = source.entry(index, 0)
        # A token is at least one byte of text, and the template adds no more to a message than the whole first prompt is long:
        # most prompts are short enough by that alone, and a large file is checked in seconds.
        if _bytes(prompt) + first_length * max(len(prompt.messages or []), 1) <= limit:
            continue
        length = len(prompt_tokens(tokenizer, prompt)[1])
        if length > limit:
            yield prompt, length


def _bytes(prompt: Prompt) -> int:
    texts = [prompt.text or ""] if prompt.messages is None else [json.dumps(message) for message in prompt.messages]
    return sum(len(text.encode()) for text in texts)
