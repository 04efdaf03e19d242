"""One run under the real Prefect engine: what its server gets to see."""

import time

import pytest
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness

from flows.environment import without_heartbeat
from flows.post_train import post_train
from storage.filesystem import StorageError
from storage.ledger import list_runs

from .algorithm_runs import answering, changed
from .conftest import FakePool


@pytest.fixture
def stages_without_prefect():
    """Not here."""


@pytest.fixture(scope="module")
def server():
    with prefect_test_harness(server_startup_timeout=120), without_heartbeat():
        yield


def task_runs(wanted, count):
    """State names of the task runs whose name begins with `wanted`; they reach the server as events, a little later."""
    deadline = time.monotonic() + 20
    while True:
        with get_client(sync_client=True) as client:
            found = sorted((run.name, run.state.name) for run in client.read_task_runs() if run.name.startswith(wanted))
        if len(found) == count or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


@pytest.mark.integration
def test_runs_and_resumed_stages_are_shown(server, config, pool, monkeypatch):
    short = config.model_copy(update={"total_steps": 1, "validation": None, "evaluate_every": 0, "experiment": None})
    generate, failures = FakePool._generate, [StorageError(0, "connection reset")]

    def unreachable_once(self, rank, **args):
        if failures:
            raise failures.pop()
        return generate(self, rank, **args)

    monkeypatch.setattr(FakePool, "_generate", unreachable_once)
    with monkeypatch.context() as dying:
        dying.setattr("flows.post_train.advantage", die)
        with pytest.raises(ZeroDivisionError):
            post_train(short)
    (record,) = list_runs(config.root)
    assert record.name.startswith("post-train-")
    assert task_runs("rollout-", 1) == [("rollout-000000", "Completed")]  # at its second attempt
    summary = post_train(short.model_copy(update={"experiment": record.name}))
    assert (summary.steps, summary.reward_last) == (1, 0.5)
    for stage in ("prompt", "rollout", "reward"):
        assert task_runs(f"{stage}-", 2) == [(f"{stage}-000000", "Completed"), (f"{stage}-000000", "Resumed")]
    assert task_runs("update-", 1) == [("update-000000", "Completed")]


def die(*args):
    raise ZeroDivisionError


@pytest.mark.integration
def test_every_batch_of_dynamic_sampling_is_shown(server, config, pool, monkeypatch):
    """The first batch's prompts are all answered rightly."""
    answering(
        monkeypatch, lambda prompt, index: "x" if index and prompt["group_id"] > "000000-00002" else prompt["answer"]
    )
    post_train(changed(config, {"dynamic_sampling": True}, total_steps=1, validation=None, experiment="dynamic"))
    for stage in ("candidate-prompt", "candidate-rollout", "candidate-reward"):
        assert task_runs(stage, 2) == [(f"{stage}-{index}-000000", "Completed") for index in range(2)]
