"""Dynamic sampling in whole runs: what is drawn, what is used, where it stops, and how it resumes."""

import functools

import pyarrow as pa
import pyarrow.dataset
import pytest

from flows.post_train import post_train
from storage.ledger import Ledger
from tasks.dynamic_sampling import TooFewGroups, informative_groups

from .algorithm_runs import answering, changed, ledger_of, rows_of
from .conftest import FakePool, Killed, target


@pytest.fixture
def with_values(config):
    return functools.partial(changed, config)


def first_summand(prompt):
    return (int(prompt["answer"]) - 1) // 2


def only_even_sums_teach(prompt, index):
    """Right and wrong answers to every other prompt, right ones only to the others."""
    return prompt["answer"] if index == 0 or first_summand(prompt) % 2 else "x"


@pytest.fixture
def dynamic(with_values):
    return with_values({"dynamic_sampling": True})


def digests(config):
    ledger = ledger_of(config)
    stages = ("prompt", "rollout", "reward", "advantage", "update")
    return {(stage, step): ledger.get(stage, step).digest for stage in stages for step in ledger.committed(stage)}


def test_groups_that_teach_nothing_are_replaced(dynamic, pool, monkeypatch):
    """A27: exactly the configured number of groups, and what was not used is counted and readable."""
    answering(monkeypatch, only_even_sums_teach)
    assert post_train.fn(dynamic).steps == 3
    ledger, drawn = ledger_of(dynamic), []
    for step in range(3):
        advantages = ledger.get("advantage", step).metrics
        assert (advantages["groups"], advantages["zero_variance_groups"], advantages["samples"]) == (3, 0, 6)
        prompts, rewards = ledger.get("prompt", step).metrics, ledger.get("reward", step).metrics
        batches = int(prompts["rollout_batches"])
        assert prompts["informative_groups"] - prompts["surplus_groups"] == 3
        assert prompts["groups"] == 3 * batches
        assert rewards["reward"] == 0.5 < rewards["candidate_reward"]
        tokens = [ledger.get(f"candidate-rollout-{index}", step).metrics["tokens"] for index in range(batches)]
        assert ledger.get("rollout", step).metrics["tokens"] == sum(tokens)
        ids = {row["group_id"] for row in rows_of(dynamic, "prompt", step)}
        for stage in ("rollout", "reward", "advantage"):
            assert {row["group_id"] for row in rows_of(dynamic, stage, step)} == ids
        for index in range(batches):
            drawn += [row["prompt_id"] for row in rows_of(dynamic, f"candidate-prompt-{index}", step)]
    assert len(drawn) > 9 and len(set(drawn[:20])) == min(
        len(drawn), 20
    )  # no prompt twice in an epoch, none passed over
    everything = pyarrow.dataset.dataset(f"{ledger.uri}/rollout", partitioning="hive").to_table()
    assert everything.num_rows == 3 * 6


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("pool_survives", [True, False])
@pytest.mark.parametrize("about", ["candidate-rollout-0/step=000000", "candidate-rollout-1/step=000001"])
def test_dynamic_sampling_goes_on_where_it_was_killed(dynamic, pool, monkeypatch, about, when, pool_survives):
    answering(monkeypatch, only_even_sums_teach)
    other = dynamic.model_copy(update={"root": f"{dynamic.root}-undisturbed"})
    post_train.fn(other)
    trained, pool.current = pool.current.trained, FakePool()

    def kill(op, args, at):
        if (op, target(args), at) == ("generate", about, when):
            first.on_operation = lambda *_: None
            raise Killed

    first = pool.current
    first.on_operation = kill
    with pytest.raises(Killed):
        post_train.fn(dynamic)
    if not pool_survives:
        pool.current = FakePool()
    post_train.fn(dynamic)
    assert digests(dynamic) == digests(other)
    assert pool.current.trained == trained
    if pool_survives:
        assert set(first.executed.values()) - {1} <= {first.executed["describe", None]}


@pytest.mark.parametrize("stage", ["candidate-reward-0", "candidate-reward-1", "prompt", "rollout", "reward"])
def test_dynamic_sampling_killed_before_a_stage_is_committed(dynamic, pool, monkeypatch, stage):
    answering(monkeypatch, only_even_sums_teach)
    other = dynamic.model_copy(update={"root": f"{dynamic.root}-undisturbed"})
    post_train.fn(other)
    pool.current = FakePool()
    publish = Ledger.publish

    def killing(self, manifest):
        if (manifest.stage, manifest.step) == (stage, 1):
            raise Killed
        return publish(self, manifest)

    monkeypatch.setattr(Ledger, "publish", killing)
    with pytest.raises(Killed):
        post_train.fn(dynamic)
    monkeypatch.setattr(Ledger, "publish", publish)
    post_train.fn(dynamic)
    assert digests(dynamic) == digests(other)


def test_constant_rewards_stop_at_the_bound_and_a_higher_bound_goes_on(with_values, pool, monkeypatch):
    answering(monkeypatch, lambda prompt, index: prompt["answer"])
    config = with_values({"dynamic_sampling": True, "max_rollout_batches": 2})
    for _ in range(2):  # again, and nothing is generated again
        with pytest.raises(TooFewGroups, match=r"step 0: after 2 rollout batches .* 0 of 6 groups .* 3 are needed"):
            post_train.fn(config)
        assert sum(n for (op, _), n in pool.current.executed.items() if op == "generate") == 2
    assert ledger_of(config).next_step() == 0
    answering(monkeypatch, lambda prompt, index: prompt["answer"] if index else "x")
    config = with_values({"dynamic_sampling": True, "max_rollout_batches": 3})
    assert post_train.fn(config).steps == 3
    assert ledger_of(config).get("prompt", 0).metrics["rollout_batches"] == 3
    assert ledger_of(config).get("prompt", 1).metrics["next_batch"] == 4
    lower = with_values({"dynamic_sampling": True, "max_rollout_batches": 1})
    assert post_train.fn(lower.model_copy(update={"total_steps": 4})).steps == 4


def test_what_was_chosen_stays_chosen_whatever_the_bound_is_now(with_values, pool, monkeypatch):
    """Killed after the choice among two batches, and resumed with another bound and another rule for too few."""
    answering(monkeypatch, only_even_sums_teach)
    config = with_values({"dynamic_sampling": True, "max_rollout_batches": 1, "when_too_few": "continue"})
    publish = Ledger.publish

    def killing(self, manifest):
        if manifest.stage == "rollout":
            raise Killed
        return publish(self, manifest)

    monkeypatch.setattr(Ledger, "publish", killing)
    with pytest.raises(Killed):
        post_train.fn(config)
    monkeypatch.setattr(Ledger, "publish", publish)
    chosen = ledger_of(config).get("prompt", 0)
    assert chosen.rows < 3
    post_train.fn(with_values({"dynamic_sampling": True, "max_rollout_batches": 9}))
    assert ledger_of(config).get("prompt", 0) == chosen
    assert ledger_of(config).get("rollout", 0).rows == 2 * chosen.rows
    assert ledger_of(config).get("prompt", 1).rows == 3


def test_going_on_with_too_few_groups_needs_at_least_one(with_values, pool, monkeypatch):
    answering(monkeypatch, lambda prompt, index: "x")
    config = with_values({"dynamic_sampling": True, "max_rollout_batches": 1, "when_too_few": "continue"})
    with pytest.raises(TooFewGroups, match="0 of 3 groups"):
        post_train.fn(config)


def test_dynamic_sampling_looks_at_the_reward_before_the_penalty(with_values, pool, monkeypatch):
    """A27: answers of different lengths, all wrong, are penalised differently and still teach nothing."""
    answering(monkeypatch, lambda prompt, index: "x" * (5 + index))
    config = with_values({"dynamic_sampling": True, "max_rollout_batches": 1}, reward={"overlong_buffer": 4})
    with pytest.raises(TooFewGroups, match="0 of 3 groups have samples of different reward"):
        post_train.fn(config)
    assert {row["reward"] for row in rows_of(config, "candidate-reward-0", 0)} == {-0.25, -0.5}


def rewards_table(*rows):
    columns = ("group_id", "reward", "components")
    return pa.table({name: [row[index] for row in rows] for index, name in enumerate(columns)})


def test_which_groups_teach_something():
    table = rewards_table(
        ("b", 0.0, '{"acc": 1}'), ("b", 1.0, '{"acc": 1}'),
        ("a", -0.1, '{"acc": 0, "unshaped_reward": 0}'), ("a", -0.3, '{"acc": 1, "unshaped_reward": 0}'),
        ("c", None, "{}"), ("c", 1.0, '{"acc": true}'),
    )  # fmt: skip
    assert informative_groups(table, "reward") == ["b"]
    assert informative_groups(table, "acc") == ["a"]
    with pytest.raises(ValueError, match="component 'accuracy' .* the rewards have: acc, unshaped_reward"):
        informative_groups(table, "accuracy")
