"""Algorithms in whole runs: greedy baselines, penalties for length, truncated and single samples, KL in the reward."""

import functools
import json

import pyarrow as pa
import pytest

from flows.loading import ConfigError
from flows.post_train import post_train
from storage.datasets import REFERENCE, write_part
from storage.manifest import Manifest
from tasks.advantage import NothingToLearn, advantage

from .algorithm_runs import answering, changed, ledger_of, rows_of


@pytest.fixture
def with_values(config):
    return functools.partial(changed, config)


def test_remax_compares_with_a_greedy_answer(with_values, pool, monkeypatch):
    answering(monkeypatch, lambda prompt, index: prompt["answer"] if index == 0 else "x")
    config = with_values({"estimator": "remax"})
    post_train.fn(config)
    greedy = [args for op, _, args in pool.current.requests if op == "generate" and "greedy-rollout" in args["out"]]
    assert {(args["sampling"]["temperature"], args["sampling"]["samples_per_prompt"]) for args in greedy} == {(0.0, 1)}
    assert len(greedy) == 3
    rows = rows_of(config, "advantage", 0)
    assert [row["advantages"][0] for row in rows] == [0.0, -1.0] * 3
    before = dict(pool.current.executed)
    post_train.fn(config)
    assert dict(pool.current.executed) == before


def test_the_penalty_for_length_is_in_the_training_reward_and_not_in_the_accuracy(with_values, pool, monkeypatch):
    answering(monkeypatch, lambda prompt, index: prompt["answer"] + " " * (6 + index - len(prompt["answer"])))
    config = with_values(reward={"overlong_buffer": 4}, evaluate_every=3)
    summary = post_train.fn(config)
    metrics = ledger_of(config).get("reward", 0).metrics
    assert (metrics["reward"], metrics["success"]) == (1 - 0.625, 1.0)
    assert metrics["component/overlong_penalty"] == -0.625
    assert (metrics["response_tokens"], metrics["response_tokens_max"], metrics["truncated"]) == (6.5, 7, 0)
    assert summary.accuracy_last == 1.0
    assert all(row["reward"] == 1 for row in rows_of(config, "evaluation-reward", 0))


def test_truncated_samples_are_left_out_of_the_data_and_stay_in_their_groups_statistics(with_values, pool, monkeypatch):
    """A13: what is not in the dataset is in no denominator."""
    answering(monkeypatch, lambda prompt, index: "x" * 8 if index == 1 else prompt["answer"])
    config = with_values({"mask_truncated": True, "estimator": "dr_grpo"})
    post_train.fn(config)
    rows = rows_of(config, "advantage", 0)
    assert [row["sample_id"].rpartition("/")[2] for row in rows] == ["0"] * 3
    assert {row["advantages"][0] for row in rows} == {0.5}
    assert ledger_of(config).get("advantage", 0).metrics["left_out"] == 3


def test_nothing_but_truncated_samples_is_nothing_to_learn(with_values, pool, monkeypatch):
    answering(monkeypatch, lambda prompt, index: "x" * 8)
    with pytest.raises(NothingToLearn, match="none of the 6 samples"):
        post_train.fn(with_values({"mask_truncated": True}))


@pytest.mark.parametrize("source", ["reinforce", "mine.py:raw"])
def test_single_samples_are_trained_on_where_nothing_is_compared(with_values, pool, tmp_path, monkeypatch, source):
    (tmp_path / "mine.py").write_text("def raw(batch, config):\n    return batch.rewards\n")
    monkeypatch.chdir(tmp_path)
    config = with_values({"estimator": source}, generation={"samples_per_prompt": 1})
    post_train.fn(config)
    rows = rows_of(config, "advantage", 0)
    assert [row["advantages"][0] for row in rows] == [1.0] * 3
    assert ledger_of(config).get("advantage", 0).metrics["left_out"] == 0


def test_gdpo_reads_the_components(with_values, pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text(
        "def score(response, answer):\n"
        "    return {'reward': float(response == answer), 'right': response == answer, 'note': 'text'}\n"
    )
    config = with_values({"estimator": "gdpo", "gdpo_weights": {"right": 1.0}}, reward={"function": "two.py:score"})
    post_train.fn(config)
    values = [row["advantages"][0] for row in rows_of(config, "advantage", 0)]
    assert [value > 0 for value in values] == [True, False] * 3


def test_advantage_metrics(config, pool):
    post_train.fn(config)
    metrics = ledger_of(config).get("advantage", 0).metrics
    assert metrics["advantage_max"] == pytest.approx(0.7071, abs=1e-3)
    assert metrics["advantage_min"] == pytest.approx(-0.7071, abs=1e-3)
    assert 0 < metrics["advantage_positive"] < 1
    assert (metrics["zero_variance_rate"], ledger_of(config).get("advantage", 3).metrics["zero_variance_rate"]) == (
        0,
        1,
    )


def staged_reference(config, step):
    """What a reference role would stage: one row a sample."""
    ledger = ledger_of(config)
    rows = [
        {"sample_id": row["sample_id"], "reference_logprobs": [-1.5] * len(row["response_tokens"])}
        for row in rows_of(config, "rollout", step)
    ]
    path = ledger.stage_path("reference", step)
    entry = write_part(ledger.store, path, 0, pa.Table.from_pylist(rows, schema=REFERENCE), REFERENCE)
    now = "2024-01-01T00:00:00"
    rollout = ledger.get("rollout", step)
    return ledger.publish(
        Manifest(
            **rollout.model_dump(include={"run", "step", "fingerprint", "weight_version"}),
            stage="reference", files=[entry], rows=len(rows), started_at=now, finished_at=now,
        )
    )  # fmt: skip


def test_a_kl_penalty_with_an_adaptive_coefficient_survives_a_resume(with_values, pool):
    """The flows refuse it until there is a reference; the stage takes whatever stages the column."""
    config = with_values()
    post_train.fn(config)
    ledger, wanted = ledger_of(config), {"kl_coef": 0.1, "kl_target": 0.5, "kl_horizon": 60}
    for step in range(3):
        ledger.store.remove_folder(ledger.stage_path("advantage", step))
    coefficients = []
    for step in range(3):
        ctx = context(ledger, with_values({**wanted, "estimator": "reinforce"}))  # a new process every step
        done = advantage.task.fn(
            ctx, step, ledger.get("rollout", step), ledger.get("reward", step), staged_reference(config, step)
        )
        assert done.metrics["kl"] == pytest.approx(1.0)  # -0.5 - -1.5 at every token
        coefficients.append(done.metrics["kl_coef"])
    assert coefficients == pytest.approx([0.1, 0.1 * 1.02, 0.1 * 1.02**2])
    tokens = [row["advantages"] for row in rows_of(config, "advantage", 0)]
    assert min(map(len, tokens)) >= 1
    assert all(row["advantages"][-1] == pytest.approx(row["reward"] - 0.1) for row in rows_of(config, "advantage", 0))


def context(ledger, config):
    class Context:
        pass

    ctx = Context()
    ctx.ledger, ctx.algorithm = ledger, config.algorithm
    return ctx


def test_changed_algorithms_are_refused_and_the_bound_is_not_one(with_values, pool, monkeypatch):
    post_train.fn(with_values())
    with pytest.raises(ConfigError) as caught:
        post_train.fn(with_values({"estimator": "rloo", "max_rollout_batches": 3, "when_too_few": "continue"}))
    assert [line.split(":")[0] for line in caught.value.violations] == ["algorithm.estimator"]
    assert json.loads(ledger_of(with_values()).get("advantage", 0).inputs["settings"])["gamma"] == 1.0


def test_a_reference_is_asked_once_a_step_and_reaches_reward_and_loss(with_values, pool):
    """The fake reference is 0.25 below the sampler everywhere."""
    config = with_values({"kl_coef": 0.2}, loss={"kl": {"coef": 0.1}})
    post_train.fn(config)
    spec = next(args["spec"] for op, _, args in pool.current.requests if op == "load")
    assert spec["reference"]["path"] == spec["model"]["path"]
    asked = [args["out"] for op, _, args in pool.current.requests if op == "annotate"]
    assert len(asked) == 3
    assert ledger_of(config).get("advantage", 0).metrics["kl"] == pytest.approx(0.25)
    updates = [args for op, _, args in pool.current.requests if op == "update"]
    assert all(set(args["datasets"]) == {"rollout", "advantage", "reference"} for args in updates)
    before = dict(pool.current.executed)
    post_train.fn(config)
    assert dict(pool.current.executed) == before


def test_a_penalty_in_the_reward_alone_needs_no_reference_in_the_update(with_values, pool):
    config = with_values({"kl_coef": 0.2})
    post_train.fn(config)
    updates = [args for op, _, args in pool.current.requests if op == "update"]
    assert all(set(args["datasets"]) == {"rollout", "advantage"} for args in updates)


def test_without_a_penalty_no_reference_is_loaded(with_values, pool):
    post_train.fn(with_values())
    assert next(args["spec"] for op, _, args in pool.current.requests if op == "load")["reference"] is None
    assert not [op for op, _, _ in pool.current.requests if op == "annotate"]


def test_a_run_with_a_reference_is_recovered_from_its_datasets(with_values, pool):
    """The pool is lost after the second update: a new one replays both with their references, and asks for none again."""
    config = with_values(loss={"kl": {"coef": 0.1}}, checkpoint_every=100)

    def die(op, args, when):
        if op == "generate" and when == "before" and "step=000002" in args["out"]:
            raise KeyboardInterrupt

    pool.current.on_operation = die
    with pytest.raises(KeyboardInterrupt):
        post_train.fn(config)
    first = pool.current
    pool.current = type(first)()
    post_train.fn(config)
    replayed = [args for op, _, args in pool.current.requests if op == "update"]
    assert [sorted(args["datasets"]) for args in replayed] == [["advantage", "reference", "rollout"]] * 3
    assert len([op for op, _, _ in pool.current.requests if op == "annotate"]) == 1


def test_ppo_with_a_critic(with_values, pool):
    """The fake critic predicts 0.25 everywhere; gamma and lambda are 1, so a token's return is the sample's reward."""
    config = with_values({"estimator": "gae", "gamma": 1.0, "lam": 1.0}, critic={"optimizer": {"lr": 0.5}})
    post_train.fn(config)
    spec = next(args["spec"] for op, _, args in pool.current.requests if op == "load")
    assert spec["critic"]["model"]["path"] == spec["model"]["path"] and spec["critic"]["optimizer"]["lr"] == 0.5
    for row in rows_of(config, "advantage", 0):
        assert row["returns"] == pytest.approx([row["reward"]] * len(row["advantages"]))
    assert rows_of(config, "values", 0)[0]["values"][0] == 0.25
    updates = [args for op, _, args in pool.current.requests if op == "update"]
    assert all(set(args["datasets"]) == {"rollout", "advantage", "values"} for args in updates)
    assert all(args["critic"]["optimizer"]["lr"] == 0.5 for args in updates)
    before = dict(pool.current.executed)
    post_train.fn(config)
    assert dict(pool.current.executed) == before


def test_without_a_critic_there_are_no_returns_and_none_learns(with_values, pool):
    config = with_values()
    post_train.fn(config)
    assert all(row["returns"] is None for row in rows_of(config, "advantage", 0))
    assert all(args["critic"] is None for op, _, args in pool.current.requests if op == "update")
