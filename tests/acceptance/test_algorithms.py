"""Algorithms beside the default one, on real engines: each makes its steps and leaves finite numbers."""

from __future__ import annotations

import json
import math

import pytest

RUNS = {
    "gspo": ["loss.name=gspo", "loss.aggregation=seq-mean-token-mean", "algorithm.estimator=grpo"],
    "dapo": [
        "algorithm.dynamic_sampling=true",
        "algorithm.when_too_few=continue",
        "loss.clip_ratio_high=0.28",
        "reward.overlong_buffer=2",
    ],
    "reinforce++": ["loss.name=reinforce", "algorithm.estimator=reinforce_plus_plus", "loss.correction.weights=token-truncate"],
    "remax": ["loss.name=cispo", "algorithm.estimator=remax"],
    # the entropy bonus moves the weights whatever the rewards are
    "kl to a reference": ["loss.kl.coef=0.05", "loss.kl.target=0.1", "algorithm.kl_coef=0.05", "loss.entropy_coef=0.1"],
    "ppo": ["algorithm.estimator=gae", "algorithm.gamma=1.0", "algorithm.lam=0.95", "critic.optimizer.lr=1e-3"],
    "ppo, placed apart": [
        "algorithm.estimator=gae",
        "critic.optimizer.lr=1e-3",
        "loss.kl.coef=0.01",
        "placement.values.roles=[critic]",
        "placement.frozen.roles=[reference]",
    ],
    "kl-cov, two epochs": ["loss.name=kl_cov", "algorithm.epochs=2", "algorithm.mini_batch_size=8", "algorithm.estimator=rloo"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_an_algorithm_trains(name, onecopy, recipe, place):
    run = f"algorithm-{list(RUNS).index(name)}"
    settings = [part for override in [*RUNS[name], "total_steps=2"] for part in ("--set", override)]
    done = onecopy("post-train", "--config", recipe(run, evaluate_every=0), *settings)
    assert done.returncode == 0, done.stderr
    updates = sorted((place / "runs" / run).glob("update/step=*/_manifest.json"))
    assert len(updates) == 2
    for path in updates:
        metrics = json.loads(path.read_text())["metrics"]
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["rollout_logprob_gap"] <= 1e-3 or metrics["optimizer_steps"] == 0
    if name.startswith("ppo"):
        first, second = (json.loads(path.read_text())["metrics"] for path in updates)
        assert first["value_grad_norm"] >= 0 and "value_loss" in second
        saved = sorted(
            path.name for path in (place / "runs" / run / "checkpoint" / "step=000002").glob("*.safetensors")
        )
        assert saved == ["actor-00000.safetensors", "critic-00000.safetensors"]
    if "loss.kl.coef=0.05" in RUNS[name]:
        first, second = (json.loads(path.read_text())["metrics"] for path in updates)
        assert first["reference_kl"] <= 1e-6 < second["reference_kl"]  # it begins as the reference, and leaves it
        assert first["kl_coef"] == 0.05 > second["kl_coef"]  # below the target, so the coefficient falls


def test_algorithms_are_listed(onecopy):
    listed = onecopy("algorithms", "--json")
    assert listed.returncode == 0
    names = {entry["name"] for entry in json.loads(listed.stdout)}
    assert {"grpo", "gae", "remax", "ppo", "gspo", "token-mean", "k3+"} <= names
