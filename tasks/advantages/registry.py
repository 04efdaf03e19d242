"""The registry of advantage estimators, what one needs, and how its result is read.

An estimator is a function `(batch, config)`. It returns one float64 a sample, which every trained token of the sample then has,
or an `Estimate` with one a token:

    # my_estimators.py, in the configuration `estimator: my_estimators.py:half`
    from tasks.advantages import estimator

    @estimator("half", group=True, source="made up")
    def half(batch, config):
        \"\"\"Half of what the sample is better than its group.\"\"\"
        return batch.centred() / 2

An undecorated function works too: it needs nothing, and groups of one are fine with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.advantages.batch import Batch, Bools, Floats
from tasks.advantages.config import AlgorithmConfig
from tasks.plugins import Registry, UnknownFunction

NEEDS = {
    "rollout_logprobs": "log-probabilities of the sampled tokens; every rollout has them",
    "greedy_rewards": "one more rollout a step, of greedy answers; staged by itself",
    "components": "parts of the reward, named in algorithm.gdpo_weights",
    "values": "a critic",
    "reference_logprobs": "a reference model",
    "sum_pi_squared": "the sum of squared probabilities at every token, from the actor",
}
"""What an estimator may need of a batch beside rewards and masks: attribute of the batch, and where it comes from."""

ABSENT = ("sum_pi_squared",)
"""Needs that nothing stages yet. A stage that does only has to hand its dataset, with that column, to `tasks.advantage`."""


class BadEstimate(ValueError):
    """An estimator lacks something it needs, or did not return one finite number a sample or a token."""


@dataclass(frozen=True)
class Estimate:
    """One number a token.

    Attributes:
        advantages: (tokens,)
        returns: (tokens,) what a critic is to learn; None without one.
    """

    advantages: Floats
    returns: Floats | None = None


EstimatorFunction = Callable[[Batch, AlgorithmConfig], Floats | Estimate]


@dataclass(frozen=True)
class Estimator:
    """A registered function and what it needs. Calling it calls the function.

    Attributes:
        needs: keys of NEEDS.
        group: whether it compares the samples of a group, so that a group of one means nothing to it.
        source: the paper.
    """

    name: str
    function: EstimatorFunction
    needs: tuple[str, ...] = ()
    group: bool = False
    source: str = ""

    def __call__(self, batch: Batch, config: AlgorithmConfig) -> Floats | Estimate:
        return self.function(batch, config)

    @property
    def summary(self) -> str:
        """First line of the docstring, without its full stop."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0].removesuffix(".")

    def usable(self, batch: Batch) -> Bools:
        """(samples,) True for samples that get an advantage: scored, trained on, and comparable if that matters."""
        return (batch.comparable if self.group else batch.scored) & (batch.token_counts > 0)

    def estimate(self, batch: Batch, config: AlgorithmConfig) -> Estimate:
        """The result a token: 0 where the mask is False and in samples that are not `usable`.

        Raises:
            BadEstimate: the batch lacks something, or the function's result has another shape or is not finite.
        """
        for need in self.needs:
            required(batch, need)
        result = self.function(batch, config)
        if not isinstance(result, Estimate):
            result = Estimate(batch.spread(self._shaped(result, batch.outcomes.shape, "samples")))
        trained = batch.mask & self.usable(batch)[batch.sample_of_token]

        def masked(values: Floats) -> Floats:
            values = self._shaped(values, batch.mask.shape, "tokens")
            broken = int((~np.isfinite(values[trained])).sum())
            if broken:
                raise BadEstimate(f"{self.name} gave {broken} of {trained.sum()} tokens a number that is not finite")
            return np.where(trained, values, 0.0)

        return Estimate(masked(result.advantages), None if result.returns is None else masked(result.returns))

    def _shaped(self, values: Floats, shape: tuple[int, ...], what: str) -> Floats:
        values = np.asarray(values, dtype=np.float64)
        if values.shape != shape:
            hint = "; for one number a token return Estimate(advantages)" if what == "samples" else ""
            raise BadEstimate(f"{self.name} returned shape {values.shape} for {shape[0]} {what}{hint}")
        return values


def required(batch: Batch, need: str) -> Any:
    """The batch's attribute `need`.

    Raises:
        BadEstimate: the batch does not have it.
    """
    found = getattr(batch, need)
    if found is None:
        raise BadEstimate(f"the batch has no {need}: it needs {NEEDS[need]}")
    return found


ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")


def estimator(
    name: str, *, needs: Sequence[str] = (), group: bool = False, source: str = ""
) -> Callable[[EstimatorFunction], Estimator]:
    """Decorator that makes a function selectable by `name`.

    Args:
        needs, group, source: see `Estimator`; a configuration that cannot give them is refused before anything starts.
    """
    unknown = sorted(set(needs) - NEEDS.keys())
    if unknown:
        raise ValueError(f"estimator {name!r} needs {', '.join(unknown)}; there is only {', '.join(NEEDS)}")

    def add(function: EstimatorFunction) -> Estimator:
        return ESTIMATORS.register(name)(Estimator(name, function, tuple(needs), group, source))

    return add


def find_estimator(name: str) -> Estimator:
    """The registered estimator, or the user's as `module:function` or `file.py:function`.

    Raises:
        UnknownFunction: there is none, or it does not take `(batch, config)`.
    """
    found = ESTIMATORS.find(name)
    found = found if isinstance(found, Estimator) else Estimator(name, found)
    try:
        inspect.signature(found.function).bind(None, None)
    except TypeError as error:
        raise UnknownFunction(
            f"advantage estimator {name!r} must be callable as (batch, config), but: {error}"
        ) from error
    return found
