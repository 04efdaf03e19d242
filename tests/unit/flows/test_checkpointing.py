"""When a run begins, commits, keeps and falls back to checkpoints."""

import pytest

from flows.config import RunConfig
from flows.post_train import post_train
from storage.checkpoints import DAMAGED_NAME
from storage.ledger import Ledger
from tasks.checkpoint import CheckpointFailed

from .conftest import FakePool, Killed


def train(config, **changes):
    return post_train.fn(config.model_copy(update=changes))


def ledger_of(config):
    return Ledger(config.root, config.experiment)


def about_checkpoints(pool):
    """(operation, version) of every request that saves or asks for what was saved, a wait with an exclamation mark."""
    return [
        (op + ("!" if args.get("wait") else ""), int(args["out"][-6:]))
        for op, _, args in pool.requests if op in ("save", "saved")
    ]  # fmt: skip


class Slow(FakePool):
    """Writes a checkpoint until it is waited for."""

    def _saved(self, rank, out, wait):
        found = super()._saved(rank, out, wait)
        if found["state"] == "done" and not wait and not self.finished:
            return {"state": "running", "problems": [], "news": []}
        return found

    finished = False


def test_training_goes_on_while_a_checkpoint_is_written(config, pool):
    pool.current = Slow()
    train(config, total_steps=5)
    ledger = ledger_of(config)
    assert about_checkpoints(pool.current) == [
        ("saved", 2), ("save", 2),  # nothing is there yet, so it is begun
        ("saved", 2),  # before step 3: still being written
        ("saved", 2), ("saved!", 2), ("saved", 4), ("save", 4),  # the next one waits for it
        ("saved", 4), ("saved!", 4), ("saved", 5), ("save", 5), ("saved", 5), ("saved!", 5),
    ]  # fmt: skip
    assert ledger.committed("checkpoint") == [4, 5]
    finished = {stage: ledger.get(stage, 3).finished_at for stage in ("rollout", "update")}
    assert finished["rollout"] < finished["update"] < ledger.get("checkpoint", 4).finished_at
    metrics = ledger.get("checkpoint", 4).metrics
    assert metrics["stall_seconds"] == 0.1 and metrics["seconds"] == 0.5 and metrics["bytes"] > 0


def test_a_checkpoint_is_committed_as_soon_as_it_is_written(config, pool):
    """Not when the next one is due: with `checkpoint_every` large, all work in between would be lost with the pool."""

    def kill(op, args, when):
        if (op, args.get("version"), when) == ("update", 3, "before"):
            raise Killed

    pool.current.on_operation = kill
    with pytest.raises(Killed):
        train(config, checkpoint_every=2, total_steps=20)
    assert ledger_of(config).committed("checkpoint") == [2]


def test_a_flow_that_takes_over_commits_what_the_pool_has_written(config, pool):
    def kill(op, args, when):
        if (op, args.get("version"), when) == ("update", 2, "before"):
            raise Killed

    pool.current = Slow()
    pool.current.on_operation = kill
    with pytest.raises(Killed):
        train(config)
    assert ledger_of(config).committed("checkpoint") == []
    pool.current.on_operation = lambda *_: None
    pool.current.finished = True
    train(config)
    assert ledger_of(config).committed("checkpoint") == [2, 4]
    assert pool.current.executed["save", "checkpoint/step=000002"] == 1


def test_a_checkpoint_whose_files_were_removed_before_it_was_one_is_written_again(config, pool, monkeypatch):
    publish = Ledger.publish

    def killing(self, manifest):
        if manifest.stage == "checkpoint":
            raise Killed
        return publish(self, manifest)

    monkeypatch.setattr(Ledger, "publish", killing)
    with pytest.raises(Killed):
        train(config, total_steps=2)
    monkeypatch.setattr(Ledger, "publish", publish)
    ledger = ledger_of(config)
    ledger.store.remove_folder(ledger.stage_path("checkpoint", 2))
    train(config, total_steps=2)
    assert ledger.committed("checkpoint") == [2]
    assert pool.current.executed["save", "checkpoint/step=000002"] == 2


def test_an_update_that_failed_is_recovered_from_a_checkpoint_that_was_just_written(config, pool):
    """The pool has forgotten its weights, not the checkpoint that it was writing."""

    def fail(op, args, when):
        if (op, args.get("version"), when) == ("update", 2, "before"):
            pool.current.version = None
            pool.current.on_operation = lambda *_: None
            raise Killed

    pool.current = Slow()
    pool.current.on_operation = fail
    with pytest.raises(Killed):
        train(config)
    train(config)
    assert [args["manifest"]["step"] for op, _, args in pool.current.requests if op == "restore"] == [2]
    assert pool.current.executed["update", 0] == 1


class Failing(FakePool):
    """Cannot write the checkpoints of `failing`; hands the failure over when it is waited for, as the ranks do."""

    failing = ("000002",)

    def _saved(self, rank, out, wait):
        found = super()._saved(rank, out, wait)
        if found["state"] != "done" or not out.endswith(self.failing):
            return found
        news, found["news"] = found.get("untold", ["StorageError: disk full"]), []
        found["untold"] = []
        if wait:
            del self.writing[out]
        return {"state": "failed", "problems": ["StorageError: disk full"], "news": news}


def test_a_checkpoint_that_cannot_be_written_fails_the_next_boundary_and_the_run_goes_on_after_that(
    config, pool, capsys
):
    pool.current = Failing()
    with pytest.raises(CheckpointFailed, match=r"checkpoint of version 2 was not written: rank 0: .*disk full"):
        train(config)
    ledger = ledger_of(config)
    assert ledger.next_step("update") == 4 and ledger.committed("checkpoint") == []
    told = [line for line in capsys.readouterr().err.splitlines() if "writing the checkpoint" in line]
    assert told == ["writing the checkpoint of version 2 failed (rank 0: StorageError: disk full)"]
    train(config)
    assert ledger.committed("checkpoint") == [4]
    assert pool.current.executed["update", 3] == 1


def test_the_last_checkpoint_is_waited_for(config, pool):
    pool.current = Failing()
    pool.current.failing = ("000004",)
    with pytest.raises(CheckpointFailed, match="version 4"):
        train(config)
    pool.current.failing = ("none",)
    assert train(config).steps == 4
    assert ledger_of(config).committed("checkpoint") == [2, 4]


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_replayed(config, pool, capsys):
    train(config)
    trained = list(pool.current.trained)
    pool.current = FakePool()
    pool.current.damaged = [4]
    train(config, total_steps=5, keep_last_checkpoints=1)
    assert [args["manifest"]["step"] for op, _, args in pool.current.requests if op == "restore"] == [4, 2]
    assert pool.current.executed["update", 2] == pool.current.executed["update", 3] == 1
    assert pool.current.trained[:4] == trained
    assert "version 4 is damaged and was set aside: step 4 has a flipped bit" in capsys.readouterr().err
    assert ledger_of(config).committed("checkpoint") == [4, 5]  # 4 was due again; the best, too


def test_the_only_good_checkpoint_survives_a_damaged_newer_one(config, pool):
    train(config)
    ledger, seen = ledger_of(config), []
    aside = f"{ledger.stage_path('checkpoint', 4)}/{DAMAGED_NAME}"

    def look(op, args, when):
        if op == "update":
            seen.append((ledger.committed("checkpoint"), ledger.store.exists(aside)))

    pool.current = FakePool()
    pool.current.damaged, pool.current.on_operation = [4], look
    train(config, total_steps=6, checkpoint_every=100, keep_last_checkpoints=1, keep_best=None)
    assert seen and set(map(str, seen)) == {"([2], True)"}
    assert (ledger.committed("checkpoint"), ledger.store.exists(aside)) == ([6], False)


def test_without_an_undamaged_checkpoint_everything_is_replayed(config, pool):
    train(config)
    trained = list(pool.current.trained)
    pool.current = FakePool()
    pool.current.damaged = [2, 4]
    train(config, total_steps=5)
    assert pool.current.trained[:4] == trained
    assert pool.current.executed["load", None] == 1


def test_another_layout_goes_on_with_the_run(config, pool):
    train(config)
    pool.current = FakePool(ranks=2)
    wide = config.parallel.model_copy(update={"data_parallel_size": 2})
    assert train(config, total_steps=5, parallel=wide).steps == 5
    assert [args["manifest"]["step"] for op, _, args in pool.current.requests if op == "restore"] == [4]


def with_accuracy(accuracies):
    """Held-out answers of each version that are all right (1) or all wrong (0)."""
    generate, sample = FakePool._generate, FakePool._sample

    def evaluated(self, rank, out, weight_version, **rest):
        self.right = "evaluation" not in out or accuracies.get(weight_version, 1)
        return generate(self, rank, out=out, weight_version=weight_version, **rest)

    def answered(self, prompt, index, version):
        row = sample(self, prompt, index, version)
        return row if self.right else {**row, "text": "x"}

    return evaluated, answered


@pytest.mark.parametrize(
    ("accuracies", "changes", "kept"),
    [
        ([0, 1, 0, 0, 0], {}, [2, 5]),
        ([0, 1, 1, 0, 1], {}, [3, 5]),  # the newer of equals; 5 is evaluated after it was saved
        ([0, 1, 0, 0, 0], {"keep_best": None}, [5]),
        ([1, 0, 0, 0, 0], {"keep_best": None, "keep_checkpoint_every": 3}, [3, 5]),
        ([1, 1, 0, 1, 1], {"keep_best": "-success"}, [3, 5]),
        ([0, 1, 0, 0, 0], {"keep_best": "no such figure", "keep_last_checkpoints": 2}, [4, 5]),
    ],
)
def test_which_checkpoints_are_kept(config, pool, monkeypatch, accuracies, changes, kept):
    generate, sample = with_accuracy(dict(enumerate(accuracies, 1)))
    monkeypatch.setattr(FakePool, "_generate", generate)
    monkeypatch.setattr(FakePool, "_sample", sample)
    settings = {"total_steps": 5, "checkpoint_every": 1, "evaluate_every": 1, "keep_last_checkpoints": 1, **changes}
    train(config, **settings)
    assert ledger_of(config).committed("checkpoint") == kept


@pytest.mark.parametrize(
    ("every", "total", "due", "last"),
    [
        (2, 5, [2, 4, 5], [0, 0, 2, 2, 4, 5]),
        (2, 4, [2, 4], [0, 0, 2, 2, 4]),
        (10, 3, [3], [0, 0, 0, 3]),
    ],
)
def test_when_a_checkpoint_is_due(config, every, total, due, last):
    config = config.model_copy(update={"checkpoint_every": every, "total_steps": total})
    versions = range(total + 1)
    assert [version for version in versions if RunConfig.checkpoint_due(config, version)] == due
    assert [RunConfig.last_checkpoint_due(config, version) for version in versions] == last
