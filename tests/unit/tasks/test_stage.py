"""The decorator that makes a stage idempotent, without a flow around it."""

import errno
from types import SimpleNamespace

import pytest
from prefect.states import Failed, State
from pydantic import BaseModel

from storage.filesystem import StorageError
from storage.integrity import CorruptFile
from storage.ledger import Ledger, StageConflict
from tasks.stage import StageOutput, _is_hiccup, flat, stage


class Settings(BaseModel):
    lr: float = 0.1
    name: str = "a"


@pytest.fixture
def ctx(tmp_path):
    return SimpleNamespace(ledger=Ledger(str(tmp_path), "run"), settings=Settings())


@pytest.fixture
def counted():
    """A stage and the steps it has worked on."""
    done = []

    @stage("count", settings=lambda ctx, step: flat(optimizer=ctx.settings))
    def count(work, *upstream):
        """Count."""
        done.append(work.step)
        return StageOutput(weight_version=work.step, metrics={"n": len(done)})

    return count, done


def test_work_is_done_once_and_then_resumed(ctx, counted):
    count, done = counted
    first = count.task.fn(ctx, 3)
    again = count.task.fn(ctx, 3)
    assert (first.stage, first.step, first.metrics) == ("count", 3, {"n": 1})
    assert isinstance(again, State) and again.name == "Resumed" and again.data == first
    assert done == [3]
    assert ctx.ledger.get("count", 3) == first


def test_other_settings_are_refused_and_named(ctx, counted):
    count, done = counted
    count.task.fn(ctx, 0)
    ctx.settings = Settings(lr=0.2, name="b")
    with pytest.raises(StageConflict, match=r"optimizer.lr was 0.1, now 0.2; optimizer.name was 'a', now 'b'"):
        count.task.fn(ctx, 0)
    assert done == [0]


def test_other_inputs_are_refused_and_named(ctx, counted):
    count, _ = counted
    upstream = count.task.fn(ctx, 0)
    count.task.fn(ctx, 1, upstream)
    other = upstream.model_copy(update={"fingerprint": "0" * 16})
    with pytest.raises(StageConflict, match="its input count is not the one it was made from"):
        count.task.fn(ctx, 1, other)


def test_a_failing_body_commits_nothing(ctx):
    @stage("broken", settings=lambda ctx, step: {})
    def broken(work):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        broken.task.fn(ctx, 0)
    assert ctx.ledger.get("broken", 0) is None


def test_tasks_are_named_by_step_and_not_cached_by_prefect(counted):
    count, _ = counted
    assert count.task.name == "count"
    assert count.task.task_run_name == "count-{step:06d}"
    assert count.task.persist_result is False


@pytest.mark.parametrize(
    "error, again",
    [
        (StorageError(0, "connection reset"), True),
        (StorageError(errno.ENOSPC, "disk full"), False),
        (StorageError(errno.EACCES, "forbidden"), False),
        (CorruptFile("changed"), False),
        (RuntimeError("rank 0 raised"), False),
    ],
)
def test_only_an_unreachable_storage_is_tried_again(error, again):
    assert _is_hiccup(None, None, Failed(data=error)) is again


def test_flat_names_every_key():
    assert flat(a=Settings(), b=1, c={"d": {"e": None}}) == {"a.lr": 0.1, "a.name": "a", "b": 1, "c.d.e": None}
