"""The gradient of every loss, term and aggregation is the same however the mini-batch is cut: float64, real Megatron layouts."""

import math

import pytest

from engine.losses.config import DESCRIPTIONS, LossConfig, loss_problems
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model

pytestmark = pytest.mark.integration

PROGRAMS = "tests.integration.engine.loss_programs"
SEQUENCE = "seq-mean-token-mean"
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
TERMS = dict(
    entropy_coef=0.1,
    nll_coef=0.2,
    nll_above=0.2,
    kl=dict(coef=0.3),
    correction=dict(weights="token-truncate", high=1.2),
)
SELECTING = {"fraction": 0.2, "low": -0.5}


def _loss(name):
    found = dict(name=name, aggregation=SEQUENCE if DESCRIPTIONS[name].sequence else "token-mean")
    return found | (dict(covariance=SELECTING) if DESCRIPTIONS[name].statistics else {})


def _corrected(name="ppo", **correction):
    return dict(name=name, correction=correction)


CASES = {
    **{name: dict(loss=_loss(name)) for name in DESCRIPTIONS if name != "gpg"},
    **{f"all terms, {mode}": dict(loss=dict(aggregation=mode, **TERMS)) for mode in AGGREGATIONS},
    **{f"kl {kind}": dict(loss=dict(kl=dict(coef=1.0, estimator=kind))) for kind in ("k2", "k3", "abs", "k1+")},
    "kl weighted": dict(loss=dict(kl=dict(coef=1.0, estimator="k1", weighted=True))),
    "token mask, normalised": dict(loss=_corrected(weights="token-mask", low=0.7, high=1.4, normalize=True)),
    "sequence truncate": dict(loss=_corrected(weights="sequence-truncate", high=2.0)),
    "sequence mask, normalised": dict(loss=_corrected(weights="sequence-mask", low=0.02, high=50.0, normalize=True)),
    "one step, geometric": dict(
        loss=_corrected(weights="token-truncate", geometric_low=0.64, geometric_high=0.73), mini_batch_size=None
    ),
    "bypass": dict(loss=_corrected(bypass=True)),
    "bypass, weighted": dict(loss=_corrected("reinforce", bypass=True, weights="token-truncate", normalize=True)),
    "one step, normalised": dict(loss=_corrected(weights="token-truncate", normalize=True), mini_batch_size=None),
    "one step, clip_cov": dict(loss=_loss("clip_cov"), mini_batch_size=None),
}
POISONED = {f"nan, {name}": CASES[name] | {"poison": math.nan} for name in ("gmpo", "all terms, token-mean")}
POISONED |= {f"inf, {name}": CASES[name] | {"poison": math.inf} for name in ("kl_cov", "sequence mask, normalised")}

LAYOUTS = {
    1: {"alone": dict(tp=1, pp=1)},
    2: {"dp2": dict(tp=1, pp=1), "tp2": dict(tp=2, pp=1), "pp2": dict(tp=1, pp=2)},
    4: {"dp4": dict(tp=1, pp=1), "tp2, pp2": dict(tp=2, pp=2)},
}
BUDGETS = {1: [16, 50, 4096], 2: [16, 4096], 4: [50]}
"""Ranks to tokens of a micro-batch: mostly a sample each, some packed, all packed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16)
    return str(make_model("qwen3", root / "model", **sizes))


@pytest.fixture(scope="module")
def results(folder):
    """Case to way of cutting to gradients and metrics; every rank of every layout reports the same way."""
    found = {name: {} for name in CASES | POISONED}
    for world, layouts in LAYOUTS.items():
        arguments = dict(folder=folder, layouts=layouts, cases=CASES | POISONED, budgets=BUDGETS[world])
        for number, rank in enumerate(run_ranks(f"{PROGRAMS}:gradients", world, arguments)):
            for name, ways in rank.items():
                found[name] |= {f"{way}, rank {number}": result for way, result in ways.items()}
    return found


def _flat(result):
    return [number for step in result["gradients"] for row in step.values() for number in row]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_do_not_depend_on_how_the_mini_batch_is_cut(results, name):
    assert loss_problems(LossConfig(**CASES[name]["loss"])) == []
    first, *others = results[name].values()
    assert len(others) == 1 * 1 * 3 + 3 * 2 * 2 + 2 * 4 * 1 - 1  # layouts x ranks x budgets, less the first
    assert len(first["gradients"]) == (1 if "one step" in name else 2)
    for step in first["gradients"]:
        assert math.hypot(*(number for row in step.values() for number in row)) > 1e-3
    for other in others:
        assert max(abs(a - b) for a, b in zip(_flat(first), _flat(other), strict=True)) <= 1e-8
        assert other["metrics"] == pytest.approx(first["metrics"], rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("name", POISONED)
def test_what_stands_at_masked_tokens_changes_nothing(results, name):
    clean = next(iter(results[name.split(", ", 1)[1]].values()))
    for other in results[name].values():
        assert max(abs(a - b) for a, b in zip(_flat(clean), _flat(other), strict=True)) <= 1e-8
        assert other["metrics"] == pytest.approx(clean["metrics"], rel=1e-8, abs=1e-8)


def test_the_cases_do_what_they_are_for(results):
    """A correction that drops nothing, or a clip that never takes hold, would prove nothing."""
    metrics = {name: next(iter(ways.values()))["metrics"] for name, ways in results.items()}
    for name in ("ppo", "gspo", "gmpo", "cispo", "clip_cov", "kl_cov"):
        assert 0 < metrics[name]["clip_fraction"] < 1
    for name in ("token mask, normalised", "sequence mask, normalised", "one step, geometric"):
        assert 0 < metrics[name]["correction_dropped"] < 1
        assert 0 < metrics[name]["correction_ess"] < 1
    gap = sum(value for name, value in metrics["ppo"].items() if name.startswith("rollout_gap/"))
    assert gap == pytest.approx(1)
    assert metrics["all terms, token-mean"]["kl_coef"] == 0.3


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("runs"))
    (found,) = run_ranks(f"{PROGRAMS}:on_one_rank", 1, {"folder": folder, "root": root})
    return found


def test_temperature_is_applied_to_log_probabilities_and_entropies(alone):
    assert alone["temperatures"]["0.5"] == pytest.approx([-0.020581, 0.106921], abs=1e-5)
    assert alone["temperatures"]["1.0"] == pytest.approx([-0.169846, 0.524267], abs=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k3+"])
def test_the_kl_term_pulls_towards_the_reference(alone, estimator):
    divergences = [metrics["reference_kl"] for metrics in alone["penalised"][estimator]]
    assert divergences == sorted(divergences, reverse=True) and divergences[-1] < divergences[0]


def test_recomputed_old_log_probabilities_are_those_of_the_training_pass(alone):
    for metrics in alone["still"]:
        assert metrics["optimizer_steps"] == 2
        assert metrics["approx_kl"] <= 1e-10 and abs(metrics["approx_kl_k1"]) <= 1e-6
        assert metrics["clip_fraction"] == metrics["dual_clip_fraction"] == 0.0


def test_a_staged_reference_reaches_the_update(alone):
    assert alone["staged"] == {"reference": [[-8.0, -9.0], [-5.0, -6.0]], "rewards": [2.0, -1.0], "without": None}


def test_a_mini_batch_without_a_trained_token_changes_no_weight(folder):
    for found in run_ranks(f"{PROGRAMS}:all_masked", 2, {"folder": folder}, timeout_s=120):
        assert found["unchanged"] and found["steps"] == [1]
        assert found["masked"]["optimizer_steps"] == 0 and "entropy" not in found["masked"]
        assert found["moved"] and found["partly"]["optimizer_steps"] == 5  # one of six responses is masked
        assert all(math.isfinite(value) for value in [*found["masked"].values(), *found["partly"].values()])
