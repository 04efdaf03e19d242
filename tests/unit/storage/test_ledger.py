"""A stage is finished when its manifest exists, whatever crashed before; nothing finished ever changes."""

import json
import pickle
import shutil
import uuid

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from storage.datasets import DEMONSTRATION, read, write_part
from storage.filesystem import InvalidName, StorageError, Store
from storage.ledger import Ledger, LedgerError, RunRecord, StageConflict, list_runs
from storage.manifest import FileEntry, Manifest

NOW = "2026-01-01T00:00:00+00:00"


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid.uuid4().hex}/runs"


@pytest.fixture
def ledger(root):
    return Ledger(root, "demo")


def record(name="demo", seed=1):
    return RunRecord(
        name=name, flow="post_train", config={"lr": 0.1}, seed=seed, versions={"vllm": "1"}, created_at=NOW
    )


def manifest(step, files=(), stage="update", mark="aaaa", **changes):
    return Manifest(
        run="demo", step=step, stage=stage, fingerprint=mark, files=list(files), weight_version=step,
        rows=sum(file.rows for file in files), started_at=NOW, finished_at=NOW, **changes,
    )  # fmt: skip


def table(*ids):
    rows = [{"sample_id": name, "prompt_tokens": [1, 2], "response_tokens": [3], "length": 3} for name in ids]
    return pa.Table.from_pylist(rows, schema=DEMONSTRATION)


def write(ledger, step, index, *ids):
    return write_part(ledger.store, ledger.stage_path("demonstration", step), index, table(*ids), DEMONSTRATION)


def finish(ledger, step, *ids, mark="aaaa"):
    return ledger.publish(manifest(step, [write(ledger, step, 0, *ids)], "demonstration", mark))


def test_a_run_is_created_once_and_continued_afterwards(ledger):
    assert ledger.record() is None
    assert ledger.create(record(seed=1)) == record(seed=1)
    assert ledger.create(record(seed=2)) == record(seed=1), "a second start gets what the first one wrote"
    assert ledger.record() == record(seed=1)


def test_a_record_of_another_run_is_refused(ledger):
    with pytest.raises(LedgerError, match="'other'.*'demo'"):
        ledger.create(record("other"))


@pytest.mark.parametrize("name", ["", "../x", "a/b", "_x", "CON"])
def test_run_and_stage_names_that_escape_are_refused(root, name):
    with pytest.raises(InvalidName):
        Ledger(root, name)
    with pytest.raises(InvalidName):
        Ledger(root, "demo").get(name, 0)
    with pytest.raises(ValueError, match="steps count from 0"):
        Ledger(root, "demo").stage_path("update", -1)


def test_parts_become_visible_with_their_manifest(ledger):
    entries = [write(ledger, 3, 0, "a", "b"), write(ledger, 3, 1, "c")]
    path = ledger.stage_path("demonstration", 3)
    assert path == "demo/demonstration/step=000003"
    assert ledger.store.list(path) == ["_part-00000.parquet", "_part-00001.parquet"]
    assert ledger.get("demonstration", 3) is None
    published = ledger.publish(manifest(3, entries, "demonstration"))
    assert ledger.store.list(path) == ["_manifest.json", "part-00000.parquet", "part-00001.parquet"]
    assert ledger.get("demonstration", 3) == published
    assert published.uri == ledger.stage_uri("demonstration", 3) and published.rows == 3
    assert read(ledger.store, published)["sample_id"].to_pylist() == ["a", "b", "c"]


def test_pyarrow_alone_reads_all_finished_steps_and_no_unfinished_one(tmp_path):
    ledger = Ledger(str(tmp_path / "runs"), "demo")
    finish(ledger, 0, "a", "b")
    finish(ledger, 12, "c")
    write(ledger, 13, 0, "half")
    found = ds.dataset(f"{tmp_path}/runs/demo/demonstration", partitioning="hive").to_table()
    rows = found.select(["sample_id", "step"]).sort_by("sample_id").to_pylist()
    assert rows == [{"sample_id": "a", "step": 0}, {"sample_id": "b", "step": 0}, {"sample_id": "c", "step": 12}]


def test_a_crash_between_rename_and_manifest_is_an_unfinished_stage(ledger, monkeypatch):
    entry = write(ledger, 0, 0, "a")
    with monkeypatch.context() as broken:
        broken.setattr(Store, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.publish(manifest(0, [entry], "demonstration"))
    path = ledger.stage_path("demonstration", 0)
    assert ledger.store.list(path) == ["part-00000.parquet"]
    assert ledger.get("demonstration", 0) is None and ledger.committed("demonstration") == []
    # Either the stage is done again …
    assert ledger.prepare("demonstration", 0) == path
    assert ledger.store.files(path) == []
    # … or what was renamed already is published again as it is.
    entry = write(ledger, 0, 0, "b")
    ledger.store.move(f"{path}/_part-00000.parquet", f"{path}/part-00000.parquet")
    assert read(ledger.store, ledger.publish(manifest(0, [entry], "demonstration")))["sample_id"].to_pylist() == ["b"]


def test_publishing_drops_strangers_and_prefers_the_newer_attempt(ledger):
    path = ledger.stage_path("demonstration", 0)
    write(ledger, 0, 0, "old")
    ledger.store.move(f"{path}/_part-00000.parquet", f"{path}/part-00000.parquet")
    write(ledger, 0, 7, "stranger")
    ledger.store.write(f"{path}/deeper/junk", b"")
    entry = write(ledger, 0, 0, "new", "er")
    stored = ledger.publish(manifest(0, [entry], "demonstration"))
    assert ledger.store.files(path) == ["_manifest.json", "part-00000.parquet"]
    assert read(ledger.store, stored)["sample_id"].to_pylist() == ["new", "er"]


def test_nothing_finished_is_changed(ledger):
    first = finish(ledger, 0, "a")
    assert finish(ledger, 0, "b", "c") == first, "the same work again returns what is stored"
    assert read(ledger.store, first)["sample_id"].to_pylist() == ["a"]
    with pytest.raises(LedgerError, match="is finished and will not be overwritten"):
        ledger.prepare("demonstration", 0)
    with pytest.raises(StageConflict, match=r"step 0 .*aaaa.*bbbb.*run\.json"):
        finish(ledger, 0, "d", mark="bbbb")
    with pytest.raises(StageConflict, match=r"aaaa.*bbbb"):
        ledger.get("demonstration", 0, fingerprint="bbbb")
    assert ledger.get("demonstration", 0, fingerprint="aaaa") == first


def test_missing_shortened_and_doubled_files_are_not_published(ledger):
    entry = write(ledger, 0, 0, "a")
    absent = entry.model_copy(update={"path": "part-00001.parquet"})
    with pytest.raises(LedgerError, match="part-00001.parquet.*were not written"):
        ledger.publish(manifest(0, [entry, absent], "demonstration"))
    with pytest.raises(LedgerError, match="twice"):
        ledger.publish(manifest(0, [entry, entry], "demonstration"))
    ledger.store.write(f"{ledger.stage_path('demonstration', 0)}/_part-00000.parquet", b"short")
    with pytest.raises(LedgerError, match=f"has 5 bytes where {entry.bytes} were written"):
        ledger.publish(manifest(0, [entry], "demonstration"))
    assert ledger.get("demonstration", 0) is None


@pytest.mark.parametrize("path", ["../run.json", "_part-00000.parquet", "/etc/passwd"])
def test_a_manifest_cannot_name_files_elsewhere(ledger, path):
    with pytest.raises(InvalidName):
        ledger.publish(manifest(0, [FileEntry(path=path, bytes=0, sha256="0" * 64)]))


def test_a_manifest_of_another_run_is_refused(root):
    with pytest.raises(LedgerError, match="'demo'.*'else'"):
        Ledger(root, "else").publish(manifest(0))


def test_only_a_missing_file_means_not_done(ledger, monkeypatch):
    def outage(*_args, **_kwargs):
        raise TimeoutError("read timed out")

    monkeypatch.setattr(type(ledger.store.filesystem), "cat_file", outage)
    monkeypatch.setattr(type(ledger.store.filesystem), "info", outage)
    for question in (ledger.record, ledger.next_step, lambda: ledger.get("update", 0)):
        with pytest.raises(StorageError, match="timed out"):
            question()


@pytest.mark.parametrize("data", [b"", b"{", b'{"schema_version": 2}', b"\xff\xfe"])
def test_a_broken_manifest_is_an_error_that_names_the_file(ledger, data):
    ledger.store.write("demo/update/step=000000/_manifest.json", data)
    with pytest.raises(LedgerError, match=r"update/step=000000/_manifest\.json cannot be understood"):
        ledger.get("update", 0)
    ledger.store.write("demo/run.json", data)
    with pytest.raises(LedgerError, match=r"demo/run\.json cannot be understood"):
        ledger.record()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9, 31, 100])
def test_next_step_looks_few_times(tmp_path, monkeypatch, count):
    ledger = Ledger(str(tmp_path), "demo")
    for step in range(count):
        path = tmp_path / ledger.stage_path("update", step) / "_manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text(manifest(step).model_dump_json())
    looks = []
    exists = Store.exists
    monkeypatch.setattr(Store, "exists", lambda store, path: looks.append(path) or exists(store, path))
    monkeypatch.setattr(Store, "list", lambda *_: pytest.fail("listed"))
    assert ledger.next_step() == count
    assert len(looks) <= 2 * count.bit_length() + 2


def test_committed_steps_are_those_with_a_manifest(ledger):
    for step in (11, 0, 2):
        ledger.publish(manifest(step))
    ledger.store.write("demo/update/step=000005/_part-00000.parquet", b"unfinished")
    ledger.store.write("demo/update/notes.txt", b"a stranger")
    ledger.store.write("demo/update/step=x/_manifest.json", b"a stranger")
    ledger.publish(manifest(1234567))
    assert ledger.committed("update") == [0, 2, 11, 1234567]
    assert ledger.committed("reward") == []


def test_runs_are_listed_by_name_and_other_folders_passed_over(root):
    for name in ("b", "a"):
        Ledger(root, name).create(record(name))
    store = Store.open(root)
    store.write("not a run/file", b"")
    store.write("empty/file", b"")
    store.write("loose-file", b"")
    assert [run.name for run in list_runs(root)] == ["a", "b"]
    assert list_runs(f"{root}/nowhere") == []


def test_a_moved_run_folder_says_where_it_is_now(tmp_path):
    old = Ledger(str(tmp_path / "old"), "demo")
    finish(old, 0, "a")
    shutil.move(tmp_path / "old", tmp_path / "new")
    new = Ledger(str(tmp_path / "new"), "demo")
    moved = new.get("demonstration", 0)
    assert moved.uri == f"{tmp_path}/new/demo/demonstration/step=000000"
    assert read(Store.open(moved.root_uri), moved).num_rows == 1


def test_a_ledger_can_be_shown_and_pickled(ledger):
    assert repr(ledger) == f"Ledger('{ledger.root_uri}/demo')" and ledger.uri == f"{ledger.root_uri}/demo"
    ledger.publish(manifest(0))
    assert pickle.loads(pickle.dumps(ledger)).next_step() == 1


def test_run_json_is_plain_json(tmp_path):
    Ledger(str(tmp_path), "demo").create(record())
    stored = json.loads((tmp_path / "demo" / "run.json").read_text())
    assert stored["config"] == {"lr": 0.1} and stored["seed"] == 1 and stored["schema_version"] == 1
