"""The whole loop against a real run folder: what is committed is never done again, wherever the process dies."""

import shutil

import pyarrow.dataset
import pytest
from prefect.states import State

from engine.pool.errors import PoolBusy
from flows.loading import ConfigError
from flows.post_train import post_train
from flows.run import open_run
from flows.sft import sft
from storage.checkpoints import latest
from storage.datasets import read
from storage.ledger import Ledger, StageConflict
from tasks.prompt import prompt

from .conftest import FakePool, Killed, target

STAGES = ("prompt", "rollout", "reward", "advantage", "update", "checkpoint", "evaluation-reward")


def train(config):
    return post_train.fn(config)


def ledger_of(config):
    return Ledger(config.root, config.experiment)


def operations(pool, name):
    """How often the operation ran at each version."""
    return {version: count for (op, version), count in pool.executed.items() if op == name}


def test_a_run_from_start_to_end(config, pool):
    summary = train(config)
    ledger = ledger_of(config)
    assert {stage: ledger.committed(stage) for stage in STAGES} == {
        **dict.fromkeys(("prompt", "rollout", "reward", "advantage", "update"), [0, 1, 2, 3]),
        "checkpoint": [2, 4],
        "evaluation-reward": [0, 2, 4],
    }
    assert (summary.steps, summary.reward_first, summary.reward_last) == (4, 0.5, 1.0)
    assert (summary.accuracy_first, summary.accuracy_last) == (1.0, 1.0)
    rollouts = pyarrow.dataset.dataset(f"{ledger.uri}/rollout", partitioning="hive").to_table()
    assert rollouts.num_rows == 4 * 6
    assert rollouts["step"].to_pylist() == rollouts["weight_version"].to_pylist()
    assert pool.current.released == [1]
    assert not pool.current.cancelled


def test_advantages_follow_the_rewards(config, pool):
    train(config)
    ledger = ledger_of(config)
    rows = read(ledger.store, ledger.get("advantage", 0)).to_pylist()
    assert {round(row["advantages"][0], 3) for row in rows} == {0.707, -0.707}
    assert all(
        row["length"] == 4 + len(row["advantages"]) or row["length"] == 6 + len(row["advantages"]) for row in rows
    )
    assert ledger.get("advantage", 3).metrics["zero_variance_groups"] == 3


def test_two_ranks_write_two_parts(config, pool):
    pool.current = FakePool(ranks=2)
    train(config)
    manifest = ledger_of(config).get("rollout", 0)
    assert [entry.path for entry in manifest.files] == ["part-00000.parquet", "part-00001.parquet"]
    assert manifest.rows == 6


def test_the_same_command_again_does_nothing(config, pool):
    train(config)
    before = dict(pool.current.executed)
    assert train(config).steps == 4
    assert dict(pool.current.executed) == before
    pool.current = FakePool()
    assert train(config).accuracy_last == 1.0
    assert not pool.current.executed


def test_more_steps_go_on_where_the_run_ended(config, pool):
    train(config)
    assert train(config.model_copy(update={"total_steps": 5})).steps == 5
    assert operations(pool.current, "update") == dict.fromkeys(range(5), 1)
    assert operations(pool.current, "load") == {None: 1}
    assert ledger_of(config).committed("checkpoint") == [4, 5]


OPERATIONS = [
    ("load", None),
    ("generate", "evaluation-rollout/step=000000"),
    ("generate", "rollout/step=000000"),
    ("generate", "rollout/step=000001"),
    ("update", 0),
    ("update", 1),
    ("save", "checkpoint/step=000002"),
]


@pytest.mark.parametrize("op, about", OPERATIONS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("pool_survives", [True, False])
def test_killed_at_an_operation(config, pool, expected, op, about, when, pool_survives):
    """What the pool finished for the dead attempt is taken over; what it lost is replayed from the datasets."""

    def kill(running, args, at):
        if (running, target(args), at) == (op, about, when):
            first.on_operation = lambda *_: None
            raise Killed

    first = pool.current
    first.on_operation = kill
    with pytest.raises(Killed):
        train(short(config))
    if not pool_survives:
        pool.current = FakePool()
    train(short(config))
    assert digests(config) == expected["digests"]
    assert pool.current.trained == expected["trained"]
    work = {key: n for key, n in first.executed.items() if key[0] != "describe"}
    if pool_survives:
        assert set(work.values()) == {1}
    else:
        both = first.executed + pool.current.executed
        repeated = {key for key, n in both.items() if n > 1 and key[0] in ("generate", "save")}
        assert repeated <= {(op, about)}  # finished, but committed by nobody


@pytest.mark.parametrize(
    "stage", ["prompt", "rollout", "reward", "advantage", "update", "checkpoint", "evaluation-rollout"]
)
@pytest.mark.parametrize("pool_survives", [True, False])
def test_killed_before_a_stage_is_committed(config, pool, expected, monkeypatch, stage, pool_survives):
    """The work is done, its manifest is not written."""
    publish = Ledger.publish

    def killing(self, manifest):
        if (manifest.stage, manifest.step) in ((stage, 1), (stage, 2)):
            raise Killed
        return publish(self, manifest)

    monkeypatch.setattr(Ledger, "publish", killing)
    first = pool.current
    with pytest.raises(Killed):
        train(short(config))
    monkeypatch.setattr(Ledger, "publish", publish)
    if not pool_survives:
        pool.current = FakePool()
    train(short(config))
    wanted = dict(expected["digests"])
    if stage == "checkpoint" and not pool_survives:
        del wanted["checkpoint", 2]  # lost with the pool before it was one; the run went on from the replay
    assert digests(config) == wanted
    assert pool.current.trained == expected["trained"]
    if pool_survives:
        assert set(operations(first, "update").values()) == {1}
        assert operations(first, "load") == {None: 1}


def short(config):
    """As many steps as there are kinds of steps."""
    return config.model_copy(update={"total_steps": 3})


@pytest.fixture(scope="module")
def undisturbed():
    """Results of runs without interruption, by configuration: made once, whatever folder they were made in."""
    return {}


@pytest.fixture
def expected(config, pool, undisturbed):
    """What a run without interruption comes to; leaves a fresh pool and no run behind."""
    if not undisturbed:
        other = short(config).model_copy(update={"root": f"{config.root}-undisturbed"})
        train(other)
        undisturbed.update(digests=digests(other), trained=pool.current.trained)
        pool.current = FakePool()
    return undisturbed


def digests(config):
    ledger = ledger_of(config)
    return {(stage, step): ledger.get(stage, step).digest for stage in STAGES for step in ledger.committed(stage)}


def test_a_lost_pool_restores_the_checkpoint_and_replays(config, pool):
    train(config)
    pool.current = FakePool()
    train(config.model_copy(update={"total_steps": 5}))
    assert [op for op, _, _ in pool.current.requests][1:4] == ["describe", "restore", "generate"]
    pool.current = FakePool()
    train(config.model_copy(update={"total_steps": 6, "checkpoint_every": 100}))
    assert [op for op, _, _ in pool.current.requests][1:3] == ["describe", "restore"]
    assert latest(ledger_of(config)).step == 6


def test_another_runs_weights_are_not_taken_for_ours(config, pool):
    train(config)
    train(config.model_copy(update={"experiment": "other", "total_steps": 4}))
    train(config.model_copy(update={"total_steps": 5}))
    assert operations(pool.current, "load") == {None: 2}
    assert [args["manifest"]["step"] for op, _, args in pool.current.requests if op == "restore"] == [4]


def test_changed_settings_are_refused_with_the_difference(config, pool):
    train(config)
    before = dict(pool.current.executed)
    changed = config.model_copy(
        update={
            "seed": 7,
            "generation": config.generation.model_copy(update={"temperature": 0.5, "kv_cache_gib": 3.0}),
        }
    )
    with pytest.raises(ConfigError) as caught:
        train(changed)
    assert [line.split(";")[0] for line in caught.value.violations] == [
        "generation.temperature: was 1.0 when run 'sums' was started, now 0.5",
        "seed: was 0 when run 'sums' was started, now 7",
    ]
    assert dict(pool.current.executed) == before


def test_changed_prompts_are_refused(config, pool, prompt_file):
    train(config)
    prompt_file.write_text(prompt_file.read_text().replace("0+1=", "9+9="))
    with pytest.raises(ConfigError, match="data: the files are not those that run 'sums' was started with"):
        train(config)


def test_a_changed_model_is_refused(config, pool, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    train(config)
    (folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match="model: the files are not those that run 'sums' was started with"):
        train(config)


def test_another_flow_under_the_same_name_is_refused(config, sft_config, pool):
    train(config)
    with pytest.raises(ConfigError, match="'sums' is a post-train run"):
        sft.fn(sft_config)


def test_a_stage_made_from_other_inputs_is_refused(config, pool, monkeypatch):
    """Somebody removed a rollout by hand: what was computed from it must not be mixed with a new one."""
    publish = Ledger.publish

    def killing(self, manifest):
        if (manifest.stage, manifest.step) == ("update", 0):
            raise Killed
        return publish(self, manifest)

    monkeypatch.setattr(Ledger, "publish", killing)
    with pytest.raises(Killed):
        train(config)
    ledger = ledger_of(config)
    ledger.store.remove_folder(ledger.stage_path("rollout", 0))
    monkeypatch.setattr(FakePool, "_sample", lambda self, *a: {**_SAMPLE(self, *a), "finish_reason": "length"})
    pool.current = FakePool()
    with pytest.raises(StageConflict, match="reward of step 0 .* its input rollout is not the one it was made from"):
        train(config)


_SAMPLE = FakePool._sample


def test_a_busy_pool_leaves_no_run_behind(config, pool):
    def busy(run, holder, wait_s):
        raise PoolBusy("held by another run")

    pool.current.lease = busy
    with pytest.raises(PoolBusy):
        train(config)
    assert ledger_of(config).record() is None


def test_a_failing_operation_is_cancelled_and_the_pool_given_back(config, pool):
    def fail(op, args, when):
        if op == "generate":
            raise RuntimeError("rank 0 raised")

    pool.current.on_operation = fail
    with pytest.raises(RuntimeError, match="rank 0 raised"):
        train(config)
    assert len(pool.current.cancelled) == 1
    assert pool.current.released == [1]


def test_too_few_samples_are_refused(config, pool, monkeypatch):
    monkeypatch.setattr(FakePool, "_generate", lambda self, rank, **args: {"files": [], "metrics": {}})
    with pytest.raises(RuntimeError, match="the pool wrote 0 samples for 1 prompts, 1 were asked for"):
        train(config)


def test_warm_start_uses_one_update_a_step(sft_config, pool):
    summary = sft.fn(sft_config)
    ledger = ledger_of(sft_config)
    assert summary.steps == 4
    assert ledger.committed("demonstration") == [0, 1, 2, 3]
    (first, *_) = [args for op, _, args in pool.current.requests if op == "update"]
    assert (first["loss"]["name"], first["mini_batch_size"], first["epochs"]) == ("sft", 2, 2)
    rows = read(ledger.store, ledger.get("demonstration", 0)).to_pylist()
    assert len(rows) == 6
    assert all(row["response_tokens"][-1] == 0 and 0 not in row["response_tokens"][:-1] for row in rows)


def test_a_warm_start_resumes_and_replays(sft_config, pool):
    expected = sft.fn(sft_config.model_copy(update={"root": f"{sft_config.root}-undisturbed"}))
    trained, pool.current = pool.current.trained, FakePool()

    def kill(op, args, when):
        if (op, args.get("version"), when) == ("update", 3, "after"):
            raise Killed

    pool.current.on_operation = kill
    with pytest.raises(Killed):
        sft.fn(sft_config)
    pool.current = FakePool()
    assert sft.fn(sft_config).accuracy_last == expected.accuracy_last
    assert pool.current.trained == trained


def test_resumed_stages_say_so(config, pool):
    """Prefect shows the state's name and message."""
    train(config)
    with open_run(config, "post-train") as run:
        state = prompt.task.fn(run, 0)
    assert isinstance(state, State)
    assert (state.name, state.data.stage) == ("Resumed", "prompt")
    assert state.message.startswith("prompt of step 0 was finished at 2")


def test_a_pool_with_engines_for_another_model_is_started_anew_before_anything_is_written(config, pool, capsys):
    pool.current.misfit = "another architecture"
    train(config)
    assert pool.current.stopped == 1
    assert pool.current.released == [2]  # the first lease ended with the pool it was for
    assert "another architecture" in capsys.readouterr().err


def test_a_stage_whose_files_were_removed_is_generated_again_by_a_pool_that_remembers_it(config, pool):
    def kill(op, args, when):
        if (op, target(args), when) == ("generate", "rollout/step=000000", "after"):
            pool.current.on_operation = lambda *_: None
            raise Killed

    pool.current.on_operation = kill
    with pytest.raises(Killed):
        train(config)
    ledger = ledger_of(config)
    ledger.store.remove_folder(ledger.stage_path("rollout", 0))
    assert train(config).steps == 4
    assert operations(pool.current, "generate")["rollout/step=000000"] == 2
