"""What a user reads afterwards: runs, their course, and samples with their figures."""

import pyarrow as pa
import pytest

from storage.datasets import PROMPT, REWARD, ROLLOUT, write_part
from storage.ledger import Ledger, LedgerError, RunRecord
from storage.manifest import Manifest
from storage.query import run_summary, runs_table, samples

NOW = "2026-01-01T00:00:0{}+00:00"


def stage(ledger, name, step, rows, schema, at=0, **metrics):
    files = []
    if schema is not None:
        table = pa.Table.from_pylist(rows, schema=schema)
        files = [write_part(ledger.store, ledger.stage_path(name, step), 0, table, schema)]
    return ledger.publish(
        Manifest(
            run=ledger.run,
            step=step,
            stage=name,
            fingerprint="f",
            files=files,
            rows=len(rows),
            metrics=metrics,
            weight_version=step,
            seconds=0.5,
            started_at=NOW.format(at),
            finished_at=NOW.format(at),
        )  # fmt: skip
    )


def rollout(sample_id, group_id, logprobs, mask, text):
    return dict(
        sample_id=sample_id, group_id=group_id, prompt_id="p", weight_version=0, prompt_tokens=[1],
        response_tokens=[5] * len(mask), response_mask=mask, rollout_logprobs=logprobs, finish_reason="stop", text=text,
    )  # fmt: skip


def prompt(group_id, text):
    return dict(
        prompt_id="p", group_id=group_id, source="s", prompt_text=text, prompt_tokens=[1], answer="1", extra="{}"
    )


def reward(sample_id, value, error=None):
    return dict(sample_id=sample_id, group_id=sample_id[0], reward=value, components="{}", error=error)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(str(tmp_path), "demo")
    ledger.create(RunRecord(name="demo", flow="post_train", config={}, seed=7, versions={}, created_at=NOW.format(0)))
    stage(ledger, "prompt", 0, [prompt("a", "one?"), prompt("b", "two?")], PROMPT, at=1)
    rows = [
        rollout("a0", "a", [-0.5, -1.5, -9.0], [1, 1, 0], "a zero"),
        rollout("a1", "a", [-0.25], [1], "a one"),
        rollout("b0", "b", [], [], ""),
        rollout("b1", "b", [-2.0], [0], "tool only"),
    ]
    stage(ledger, "rollout", 0, rows, ROLLOUT, at=2)
    scores = [reward("b1", 0.5), reward("b0", None, "scorer timed out"), reward("a1", 1.0), reward("a0", 0.5)]
    stage(ledger, "reward", 0, scores, REWARD, at=3, reward_mean=0.5)
    stage(ledger, "update", 0, [], None, at=4, loss=0.25)
    return ledger


def ids(found):
    return [sample["sample_id"] for sample in found]


def test_samples_are_ranked_by_reward_and_none_comes_twice(ledger):
    assert ids(samples(ledger, 0, best=2, worst=1)) == ["a1", "a0", "b0"], "equal rewards in order of their ids"
    assert ids(samples(ledger, 0, best=0, worst=2)) == ["b1", "b0"], "no reward is lower than any"
    assert ids(samples(ledger, 0, best=3, worst=3)) == ["a1", "a0", "b1", "b0"]
    assert ids(samples(ledger, 0, best=9, worst=9)) == ["a1", "a0", "b1", "b0"]
    assert samples(ledger, 0, best=0, worst=0) == []


def test_a_sample_comes_with_its_prompt_and_figures(ledger):
    found = {sample["sample_id"]: sample for sample in samples(ledger, 0, 4, 0)}
    assert found["a0"] == {
        "sample_id": "a0", "group_id": "a", "prompt": "one?", "response": "a zero", "reward": 0.5, "error": None,
        "finish_reason": "stop", "length": 3, "logprob_min": -1.5, "logprob_mean": -1.0, "logprob_sum": -2.0,
    }  # fmt: skip
    assert found["b0"]["prompt"] == "two?" and found["b0"]["error"] == "scorer timed out"
    for empty in ("b0", "b1"):
        assert found[empty]["logprob_min"] is found[empty]["logprob_mean"] is found[empty]["logprob_sum"] is None


def test_a_step_without_rewards_says_which_have_them(ledger):
    with pytest.raises(LedgerError, match="'rollout' of step 3 is not finished.*steps 0 to 0"):
        samples(ledger, 3, 1, 1)


def test_runs_table(ledger):
    other = RunRecord(name="new", flow="sft", config={}, seed=1, versions={}, created_at=NOW.format(9))
    Ledger(ledger.root_uri, "new").create(other)
    assert runs_table(ledger.root_uri) == [
        {
            "name": "demo",
            "flow": "post_train",
            "created_at": NOW.format(0),
            "seed": 7,
            "updates": 1,
            "metrics": {"loss": 0.25},
        },
        {"name": "new", "flow": "sft", "created_at": NOW.format(9), "seed": 1, "updates": 0, "metrics": {}},
    ]
    assert runs_table(f"{ledger.root_uri}/nowhere") == []


def test_run_summary(ledger):
    stage(ledger, "prompt", 1, [prompt("a", "one?")], PROMPT, at=5)
    summary = run_summary(ledger)
    assert summary["record"]["seed"] == 7 and summary["updates"] == 1 and summary["checkpoints"] == []
    rows = [(row["step"], row["stage"], row["rows"]) for row in summary["steps"]]
    assert rows == [(0, "prompt", 2), (0, "rollout", 4), (0, "reward", 4), (0, "update", 0), (1, "prompt", 1)]
    assert summary["steps"][2]["metrics"] == {"reward_mean": 0.5} and summary["steps"][2]["seconds"] == 0.5


def test_an_unknown_run_names_those_there_are(ledger):
    with pytest.raises(LedgerError, match="no run 'dmeo'.*runs there: demo"):
        run_summary(Ledger(ledger.root_uri, "dmeo"))
