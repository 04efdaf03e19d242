"""The newest complete checkpoint survives everything, and half a checkpoint is none."""

import hashlib
import uuid

import pytest

from storage import checkpoints
from storage.filesystem import Store
from storage.integrity import CorruptFile
from storage.ledger import Ledger, LedgerError
from storage.manifest import Manifest

NOW = "2026-01-01T00:00:00+00:00"


@pytest.fixture(params=["local", "memory"])
def ledger(request, tmp_path):
    return Ledger(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}", "demo")


def manifest(step, files, **changes):
    values = dict(run="demo", step=step, stage="checkpoint", fingerprint="f", files=files, weight_version=step,
                  started_at=NOW, finished_at=NOW)  # fmt: skip
    return Manifest(**{**values, **changes})


def write_shards(ledger, step, ranks=2):
    uri = checkpoints.begin(ledger, step)
    entries = []
    for rank in range(ranks):
        with checkpoints.open_shard(uri, checkpoints.shard_name(rank)) as shard:
            shard.file.write(f"weights {step} of rank ".encode())
            shard.file.write(memoryview(bytes([rank])))
        entries.append(shard.entry)
    return entries


def save(ledger, step):
    return checkpoints.commit(ledger, manifest(step, write_shards(ledger, step)))


def test_saved_shards_are_described_and_verified(ledger):
    saved = save(ledger, 5)
    assert saved.folder == "demo/checkpoint/step=000005"
    data = b"weights 5 of rank \x01"
    assert saved.files[1].model_dump() == {
        "path": "rank-00001.safetensors", "bytes": 19, "sha256": hashlib.sha256(data).hexdigest(), "rows": 0,
    }  # fmt: skip
    assert ledger.store.read(f"{saved.folder}/rank-00001.safetensors") == data
    checkpoints.verify(ledger, saved)
    ledger.store.write(f"{saved.folder}/rank-00001.safetensors", b"weights 5 of rank \x02")
    with pytest.raises(CorruptFile, match=r"rank-00001\.safetensors"):
        checkpoints.verify(ledger, saved)


def test_latest_is_the_newest_complete_one(ledger):
    assert checkpoints.latest(ledger) is None
    saved = {step: save(ledger, step) for step in (0, 4, 10)}
    write_shards(ledger, 12)
    assert checkpoints.latest(ledger) == saved[10]
    assert checkpoints.latest(ledger, at_most=10) == saved[10]
    assert checkpoints.latest(ledger, at_most=9) == saved[4]
    assert checkpoints.latest(ledger, at_most=3) == saved[0]


def test_a_save_that_fails_half_way_leaves_the_previous_one_and_can_be_done_again(ledger):
    before = save(ledger, 2)
    uri = checkpoints.begin(ledger, 4)
    with pytest.raises(OSError, match="gone"), checkpoints.open_shard(uri, checkpoints.shard_name(0)) as shard:
        shard.file.write(b"half")
        raise OSError("the disk is gone")
    assert checkpoints.latest(ledger) == before and ledger.store.list("demo/checkpoint/step=000004") == []
    checkpoints.retain(ledger, keep_last=1)
    assert checkpoints.latest(ledger) == before
    assert save(ledger, 4) == checkpoints.latest(ledger)


def test_a_checkpoint_is_not_saved_over_itself_or_under_another_version(ledger):
    save(ledger, 2)
    with pytest.raises(LedgerError, match="is finished"):
        checkpoints.begin(ledger, 2)
    files = write_shards(ledger, 3)
    with pytest.raises(LedgerError, match="step 3 would hold weight version 4"):
        checkpoints.commit(ledger, manifest(3, files, weight_version=4))
    for changes in ({"stage": "update"}, {"files": []}):
        with pytest.raises(LedgerError, match="a checkpoint is"):
            checkpoints.commit(ledger, manifest(3, files).model_copy(update=changes))


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


def test_the_newest_is_never_removed(ledger):
    assert checkpoints.retain(ledger, 1) == []
    with pytest.raises(ValueError, match="at least the newest"):
        checkpoints.retain(ledger, 0)


def test_leftovers_below_the_newest_go_and_what_is_being_written_stays(ledger):
    write_shards(ledger, 3)
    save(ledger, 4)
    write_shards(ledger, 6)
    assert checkpoints.retain(ledger, 1) == [3]
    assert ledger.store.files("demo/checkpoint") == [
        "step=000004/_manifest.json", "step=000004/rank-00000.safetensors", "step=000004/rank-00001.safetensors",
        "step=000006/rank-00000.safetensors", "step=000006/rank-00001.safetensors",
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
