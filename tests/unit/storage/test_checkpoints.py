"""The newest complete checkpoint survives everything, and half a checkpoint is none."""

import hashlib
import json
import math
import uuid

import pytest

from storage import checkpoints
from storage.filesystem import Store
from storage.integrity import CorruptFile
from storage.ledger import Ledger
from storage.manifest import Manifest
from storage.sharded import write_file

NOW = "2026-01-01T00:00:00+00:00"


@pytest.fixture(params=["local", "memory"])
def ledger(request, tmp_path):
    return Ledger(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}", "demo")


def manifest(step, files, **changes):
    values = dict(run="demo", step=step, stage="checkpoint", fingerprint="f", files=files, weight_version=step,
                  started_at=NOW, finished_at=NOW)  # fmt: skip
    return Manifest(**{**values, **changes})


def write_parts(ledger, step, ranks=2):
    """What the ranks write, and what is left of it when nobody commits it."""
    folder = ledger.stage_path("checkpoint", step)
    return [
        write_file(ledger.store, folder, f"{checkpoints.part_name('actor', rank)}.safetensors", b"%d of %d" % (step, rank))
        for rank in range(ranks)
    ]  # fmt: skip


def save(ledger, step):
    return ledger.publish(manifest(step, write_parts(ledger, step)))


def test_every_file_is_verified(ledger):
    saved = save(ledger, 5)
    assert saved.files[1].model_dump() == {
        "path": "actor-00001.safetensors", "bytes": 6, "sha256": hashlib.sha256(b"5 of 1").hexdigest(), "rows": 0,
    }  # fmt: skip
    checkpoints.verify(ledger, saved)
    ledger.store.write(f"{saved.folder}/actor-00001.safetensors", b"5 of 2")
    with pytest.raises(CorruptFile, match=r"actor-00001\.safetensors"):
        checkpoints.verify(ledger, saved)


def test_names_tell_what_a_file_is():
    names = [
        "actor-00000.safetensors",
        "actor-00000.json",
        "critic-00012.json",
        "actor.config.json",
        "actor.x-00001.json",
    ]
    entries = [{"path": name, "bytes": 0, "sha256": "0" * 64} for name in names]
    saved = manifest(1, entries)
    assert [entry.path for entry in checkpoints.index_entries(saved)] == names[1:3]
    assert {name: e.path for name, e in checkpoints.small_entries(saved, "actor").items()} == {
        "config.json": "actor.config.json", "x-00001.json": "actor.x-00001.json",
    }  # fmt: skip
    assert checkpoints.small_entries(saved, "critic") == {}


def test_latest_is_the_newest_complete_one(ledger):
    assert checkpoints.latest(ledger) is None
    saved = {step: save(ledger, step) for step in (0, 4, 10)}
    write_parts(ledger, 12)
    assert checkpoints.latest(ledger) == saved[10]
    assert checkpoints.latest(ledger, at_most=10) == saved[10]
    assert checkpoints.latest(ledger, at_most=9) == saved[4]
    assert checkpoints.latest(ledger, at_most=3) == saved[0]


def test_a_save_that_fails_half_way_leaves_the_previous_one_and_can_be_done_again(ledger):
    before = save(ledger, 2)
    write_parts(ledger, 4, ranks=1)
    assert checkpoints.retain(ledger, keep_last=1) == []
    assert checkpoints.latest(ledger) == before
    assert save(ledger, 4) == checkpoints.latest(ledger)


def test_a_damaged_one_is_set_aside_and_does_not_count(ledger):
    good, damaged = save(ledger, 2), save(ledger, 4)
    checkpoints.set_aside(ledger, damaged, "a flipped bit")
    assert checkpoints.latest(ledger) == good
    assert checkpoints.retain(ledger, keep_last=1) == []
    record = json.loads(ledger.store.read(f"{damaged.folder}/{checkpoints.DAMAGED_NAME}"))
    assert record["why"] == "a flipped bit" and record["manifest"]["step"] == 4
    assert ledger.store.exists(f"{damaged.folder}/actor-00000.safetensors")
    save(ledger, 6)
    assert checkpoints.retain(ledger, keep_last=1) == [2, 4]


@pytest.mark.parametrize(
    ("scores", "lower", "step"),
    [
        ({0: 0.5, 1: 0.7, 2: 0.7, 3: None}, False, 2),  # the newer of equals; one without a score does not count
        ({0: 0.5, 1: 0.7, 2: 0.7, 3: math.nan}, True, 0),
        ({4: 0.5, 9: 0.5}, True, 9),
        ({1: None}, False, None),
        ({}, False, None),
    ],
)
def test_the_best(scores, lower, step):
    assert checkpoints.best(scores, lower_is_better=lower) == step


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, 0, [12]),
        (2, 0, [10, 12]),
        (3, 0, [8, 10, 12]),
        (99, 0, [0, 2, 4, 6, 8, 10, 12]),
        (1, 4, [0, 4, 8, 12]),
        (2, 5, [0, 10, 12]),
    ],
)
def test_retention(ledger, keep_last, keep_every, kept):
    steps = [0, 2, 4, 6, 8, 10, 12]
    for step in steps:
        save(ledger, step)
    removed = checkpoints.retain(ledger, keep_last, keep_every)
    assert removed == [step for step in steps if step not in kept]
    assert ledger.committed("checkpoint") == kept
    assert {file.split("/")[0] for file in ledger.store.files("demo/checkpoint")} == {
        f"step={step:06d}" for step in kept
    }
    checkpoints.verify(ledger, checkpoints.latest(ledger))
    assert checkpoints.retain(ledger, keep_last, keep_every) == []


def test_those_that_are_asked_for_are_kept(ledger):
    for step in (2, 4, 6, 8):
        save(ledger, step)
    assert checkpoints.retain(ledger, 1, keep=[4, 5]) == [2, 6]
    assert ledger.committed("checkpoint") == [4, 8]


def test_the_newest_is_never_removed(ledger):
    assert checkpoints.retain(ledger, 1) == []
    with pytest.raises(ValueError, match="at least the newest"):
        checkpoints.retain(ledger, 0)


def test_leftovers_below_the_newest_go_and_what_is_being_written_stays(ledger):
    write_parts(ledger, 3)
    save(ledger, 4)
    write_parts(ledger, 6)
    assert checkpoints.retain(ledger, 1) == [3]
    assert ledger.store.files("demo/checkpoint") == [
        "step=000004/_manifest.json", "step=000004/actor-00000.safetensors", "step=000004/actor-00001.safetensors",
        "step=000006/actor-00000.safetensors", "step=000006/actor-00001.safetensors",
    ]  # fmt: skip


def test_an_interrupted_removal_leaves_no_broken_checkpoint(ledger, monkeypatch):
    for step in (1, 2, 3):
        save(ledger, step)
    with monkeypatch.context() as broken:
        broken.setattr(Store, "remove_folder", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.retain(ledger, 1)
    assert ledger.committed("checkpoint") == [2, 3], "the one being removed lost its manifest first"
    assert checkpoints.retain(ledger, 1) == [1, 2]
    assert ledger.committed("checkpoint") == [3]
