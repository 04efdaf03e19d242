"""What a loss can be told, and which settings belong together. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.losses.names import DESCRIPTIONS, LossDescription, LossName, user_function_problem

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Estimator = Literal["k1", "k2", "k3", "abs", "full", "k1+", "k3+"]
WeightRule = Literal["none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]


class KLConfig(BaseModel):
    """A penalty on the divergence from the reference policy, as a term of the loss.

    Gradients, for samples of the trained policy p and reference q: k2, k1+ and k3+ have that of KL(p || q), k3 has that of
    KL(q || p), abs has that of the total variation (twice), k1 has none.
    """

    model_config = ConfigDict(extra="forbid")

    coef: float = Field(0.0, ge=0, title="Coefficient", description="0: no reference model is needed.")
    estimator: Estimator = Field(
        "k3+",
        title="Estimator",
        description="k3+ is k3's value with the gradient of KL(policy || reference). k3 alone has that of KL(reference || policy).",
    )
    weighted: bool = Field(
        False,
        title="Weight by the ratio",
        description="Times policy / old policy: value and gradient then hold for the old policy's samples, with every estimator.",
    )
    target: float | None = Field(
        None,
        gt=0,
        title="Target",
        description="Adapt the coefficient to hold the measured divergence here; unset is fixed.",
    )
    horizon: int = Field(
        10_000, ge=1, title="Horizon", description="Samples over which an adaptive coefficient moves by a fifth."
    )

    def next_coef(self, coef: float, measured: float, samples: int) -> float:
        """The coefficient after an update on `samples` samples measured a divergence (Ziegler, arXiv 1909.08593, section 2.2).

        coef * (1 + clip(measured / target - 1, -0.2, 0.2) * samples / horizon); never below 0.
        """
        if self.target is None:
            return coef
        error = min(0.2, max(-0.2, measured / self.target - 1))
        return max(0.0, coef * (1 + error * samples / self.horizon))


class CorrectionConfig(BaseModel):
    """Correction for what generated the samples not being, in every bit, the policy that is trained.

    The raw weight of a token is trainer's / rollout's probability of it (of its whole response for the sequence rules). A
    token of weight 0 gives no gradient and stays in the denominators: it was sampled.
    """

    model_config = ConfigDict(extra="forbid")

    bypass: bool = Field(
        False,
        title="Bypass",
        description="Take the rollout's log-probabilities for the old policy's: no extra forward pass.",
    )
    weights: WeightRule = Field(
        "none",
        title="Weights",
        description="truncate: at most the upper bound (TIS). mask: 0 outside the bounds (MIS; with a lower bound IcePop).",
    )
    low: float | None = Field(None, gt=0, title="Lower bound", description="For mask. IcePop: 0.5.")
    high: float = Field(2.0, gt=0, title="Upper bound", description="Of the weight. IcePop: 5.")
    normalize: bool = Field(
        False,
        title="Normalise",
        description="Divide the weights by their mean over the mini-batch; one forward pass more.",
    )
    geometric_low: float | None = Field(
        None, gt=0, title="Sequence mask below", description="Drop responses whose geometric mean weight is lower."
    )
    geometric_high: float | None = Field(
        None, gt=0, title="Sequence mask above", description="Drop responses whose geometric mean weight is higher."
    )

    @property
    def active(self) -> bool:
        """Whether any token's weight can differ from 1."""
        return self.weights != "none" or self.geometric_low is not None or self.geometric_high is not None

    @property
    def needs_rollout(self) -> bool:
        return self.bypass or self.active


class CovarianceConfig(BaseModel):
    """Which tokens clip_cov and kl_cov take: by (log-probability - mean) * (advantage - mean), over the whole mini-batch."""

    model_config = ConfigDict(extra="forbid")

    fraction: float = Field(2e-4, gt=0, le=1, title="Fraction", description="Of the mini-batch's tokens; at least one.")
    low: float = Field(1.0, title="Lowest covariance", description="clip_cov only.")
    high: float = Field(5.0, title="Highest covariance", description="clip_cov only.")
    coef: float = Field(1.0, ge=0, title="Penalty", description="kl_cov: coefficient of |log-ratio|.")


class LossConfig(BaseModel):
    """A policy (or supervised) loss, its further terms, and how tokens become one number."""

    model_config = ConfigDict(extra="forbid")

    name: LossName = Field(
        "ppo", title="Loss", description="`onecopy algorithms` describes them; or your own as `module:function`."
    )
    aggregation: Aggregation = Field(
        "token-mean", title="Aggregation", description="How token losses become one number."
    )
    clip_ratio_low: float = Field(
        0.2, ge=0, lt=1, title="Clip below", description="The ratio is held above 1 - this. dppo: highest divergence."
    )
    clip_ratio_high: float = Field(
        0.2,
        ge=0,
        title="Clip above",
        description="The ratio is held below 1 + this (DAPO: 0.28). dppo: highest divergence.",
    )
    clip_ratio_c: float | None = Field(
        3.0, gt=1, title="Dual clip", description="Bound of the loss for negative advantages. dppo: highest ratio (20)."
    )
    sapo_tau_positive: float = Field(1.0, gt=0, title="SAPO gate", description="Its sharpness for advantages above 0.")
    sapo_tau_negative: float = Field(1.05, gt=0, title="SAPO gate below", description="Its sharpness for the others.")
    dro_beta: float = Field(0.05, gt=0, title="DRO penalty", description="Of the squared log-ratio.")
    covariance: CovarianceConfig = Field(default_factory=CovarianceConfig, title="Covariance")
    entropy_coef: float = Field(0.0, title="Entropy bonus")
    nll_coef: float = Field(
        0.0, ge=0, title="Likelihood of good samples", description="VAPO's imitation term (0.1); 0 is off."
    )
    nll_above: float = Field(0.0, title="Good is above", description="Reward above which a sample is imitated.")
    kl: KLConfig = Field(default_factory=KLConfig, title="KL to the reference")
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig, title="Train/rollout correction")

    @property
    def description(self) -> LossDescription:
        """Of a user's own loss nothing is known: it is taken to have a ratio."""
        return DESCRIPTIONS.get(self.name, LossDescription("your own", self.name))

    @property
    def needs_reference(self) -> bool:
        """Whether the update needs the REFERENCE dataset."""
        return self.kl.coef > 0

    @property
    def needs_statistics(self) -> bool:
        """Whether a mini-batch needs a forward pass before the one that is trained on."""
        return self.description.statistics or (self.correction.normalize and self.correction.weights != "none")


def loss_problems(config: LossConfig) -> list[str]:
    """What of a loss's settings cannot work or would do nothing; each message begins with the keys it is about."""
    found = _name_problems(config) + _kl_problems(config.kl) + _correction_problems(config)
    if config.description.sequence and config.aggregation != "seq-mean-token-mean":
        found.append(
            f"aggregation: {config.name} has one number a sequence, whose mean is its objective: "
            f"seq-mean-token-mean, not {config.aggregation}"
        )
    if config.name == "clip_cov" and config.covariance.low >= config.covariance.high:
        found.append("covariance.low, covariance.high: no covariance lies between them")
    return found


def _name_problems(config: LossConfig) -> list[str]:
    if config.name == "sft":
        given = {
            "kl.coef": config.kl.coef,
            "correction": config.correction.needs_rollout,
            "nll_coef": config.nll_coef,
        }
        return [f"{key}: needs samples of a policy, sft has demonstrations" for key, value in given.items() if value]
    if ":" in config.name:
        problem = user_function_problem(*config.name.split(":", 1))
        return [f"name: {problem}"] if problem else []
    return []


def _kl_problems(kl: KLConfig) -> list[str]:
    found = []
    if kl.coef == 0 and kl.target is not None:
        found.append("kl.target: adapts a coefficient that is 0 and stays 0; set kl.coef to where it begins")
    if kl.coef > 0 and kl.estimator == "full":
        found.append(
            "kl.estimator: full needs the whole distribution of policy and reference at every token; an update has the "
            "log-probabilities of the sampled tokens only. k3+ has the same expectation and gradient"
        )
    if kl.coef > 0 and kl.estimator == "k1" and not kl.weighted:
        found.append(
            "kl.estimator: the expected gradient of k1 is 0, so it would only add noise; take k2, k1+ or k3+, or kl.weighted"
        )
    if kl.weighted and kl.estimator.endswith("+"):
        found.append(
            f"kl.weighted: is for k1, k2, k3 and abs; {kl.estimator} is straight-through, and its weight would get a gradient"
        )
    return found


def _correction_problems(config: LossConfig) -> list[str]:
    correction, found = config.correction, []
    if correction.low is not None and correction.low >= correction.high:
        found.append("correction.low, correction.high: no weight lies between them")
    if correction.low is not None and not correction.weights.endswith("mask"):
        found.append(f"correction.low: only a mask has a lower bound, not {correction.weights}")
    if correction.normalize and correction.weights == "none":
        found.append("correction.normalize: there are no weights to normalise")
    low, high = correction.geometric_low, correction.geometric_high
    if low is not None and high is not None and low >= high:
        found.append("correction.geometric_low, correction.geometric_high: no weight lies between them")
    if correction.bypass and correction.weights != "none" and config.description.ratio:
        found.append(
            f"correction.bypass, correction.weights: with bypass the ratio of {config.name} is the weight already, and would "
            "be counted twice; keep one of them (reinforce, gpg and dro have no ratio)"
        )
    return found
