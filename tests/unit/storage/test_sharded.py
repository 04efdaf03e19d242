"""Matrices in slices over files: any cut can be read back as any other, and no wrong byte is used."""

import json
import pickle
import tempfile
import threading
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from storage import sharded
from storage.boxes import Box
from storage.filesystem import StorageError, Store
from storage.integrity import CorruptFile
from storage.manifest import Manifest
from storage.sharded import Abandoned, Missing, ShardedReader, Slice, Wanted, read_index, write_sharded

STATES = ("param", "exp_avg")
NOW = "2026-01-01T00:00:00+00:00"


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return Store.open(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def cut(box):
    return slice(box.row, box.row + box.rows), slice(box.column, box.column + box.columns)


def save(store, whole, pieces, name="actor-00000", **more):
    """One part with rectangles of `whole`: {state: {tensor: matrix}}."""
    values = [np.concatenate([whole[s][t][cut(b)].reshape(-1) for t, b in pieces]) for s in whole]
    shapes = {tensor: whole["param"][tensor].shape for tensor, _ in pieces}
    return write_sharded(
        store, "run/checkpoint/step=000001", name, pieces, np.stack(values), states=list(whole), shapes=shapes, owner="actor",
        about={"optimizer_steps": 3}, **more,
    )  # fmt: skip


def open_reader(store, entries):
    manifest = Manifest(run="run", step=1, stage="checkpoint", fingerprint="f", files=entries, weight_version=1,
                        started_at=NOW, finished_at=NOW)  # fmt: skip
    parts = [read_index(store, manifest, entry) for entry in entries if entry.path.endswith(".json")]
    return ShardedReader(store, manifest.folder, parts)


def random_matrices(shapes, seed=0):
    draw = np.random.default_rng(seed)
    return {state: {n: draw.standard_normal(s).astype(np.float32) for n, s in shapes.items()} for state in STATES}


@st.composite
def cuttings(draw, rows, columns):
    """A matrix cut along random lines into rectangles that cover it once."""
    row_edges = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    boxes = []
    for top, bottom in zip(row_edges[:-1], row_edges[1:], strict=True):
        edges = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=2))})
        boxes += [Box(top, a, bottom - top, b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return boxes


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_cut_is_read_back_as_any_other(data):
    shapes = {
        "a": (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))),
        "b": (data.draw(st.integers(1, 20)), 1),
    }
    whole = random_matrices(shapes)
    pieces = [Slice(name, box) for name, shape in shapes.items() for box in data.draw(cuttings(*shape))]
    pieces = data.draw(st.permutations(pieces))
    files = data.draw(st.integers(1, 3))
    # blocks of 16 bytes: rectangles begin and end anywhere in them
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(sharded, "BLOCK_BYTES", 16)
        store = Store.open(folder)
        entries = []
        for number in range(files):
            if mine := pieces[number::files]:
                entries += save(store, whole, mine, f"actor-{number:05d}")
        reader = open_reader(store, entries)
        wanted = [
            Wanted(state, name, box, np.full((box.rows, box.columns), np.nan, np.float32))
            for state in STATES for name, shape in shapes.items() for box in data.draw(cuttings(*shape))
        ]  # fmt: skip
        reader.read(wanted)
        for each in wanted:
            assert (each.out == whole[each.state][each.tensor][cut(each.box)]).all()
        assert all((reader.whole(name, s) == whole[s][name]).all() for s in STATES for name in shapes)


def two_parts(store, **more):
    whole = random_matrices({"a": (6, 5)})
    first = save(store, whole, [Slice("a", Box(0, 0, 4, 5))], "actor-00000", **more)
    return whole, [*first, *save(store, whole, [Slice("a", Box(4, 0, 2, 5))], "actor-00001", **more)]


def test_the_files_are_plain_safetensors(tmp_path):
    whole, entries = two_parts(Store.open(str(tmp_path)))
    assert [entry.path for entry in entries] == [
        "actor-00000.safetensors", "actor-00000.json", "actor-00001.safetensors", "actor-00001.json",
    ]  # fmt: skip
    found = load_file(tmp_path / "run/checkpoint/step=000001/actor-00001.safetensors")
    assert set(found) == {"a[4:6,0:5]|param", "a[4:6,0:5]|exp_avg"}
    assert (found["a[4:6,0:5]|exp_avg"] == whole["exp_avg"]["a"][4:]).all()


def spoil(store, path, change):
    store.write(path, change(store.read(path)))


DAMAGES = {
    "a flipped bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "a flipped bit in the head": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "cut off": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("file", ["actor-00001.safetensors", "actor-00001.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(store, file, damage):
    _, entries = two_parts(store)
    spoil(store, f"run/checkpoint/step=000001/{file}", DAMAGES[damage])
    with pytest.raises(CorruptFile, match=file.replace(".", r"\.")):
        open_reader(store, entries).whole("a", "param")
        open_reader(store, entries).whole("a", "exp_avg")  # the last bytes of the file


def test_a_missing_file_is_damage(store):
    _, entries = two_parts(store)
    store.remove("run/checkpoint/step=000001/actor-00000.safetensors")
    with pytest.raises(CorruptFile, match=r"actor-00000\.safetensors .*is missing"):
        open_reader(store, entries).whole("a", "param")


def test_only_the_blocks_that_are_needed_are_read(store, monkeypatch):
    monkeypatch.setattr(sharded, "BLOCK_BYTES", 64)
    draw = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
    entries = save(store, {"param": {"a": draw}}, [Slice("a", Box(0, 0, 100, 8))])
    reader = open_reader(store, entries)
    asked = []
    plain = Store.read_range
    monkeypatch.setattr(Store, "read_range", lambda self, *where: asked.append(where) or plain(self, *where))
    out = np.empty((10, 8), np.float32)
    reader.read([Wanted("param", "a", Box(40, 0, 10, 8), out)])
    assert (out == draw[40:50]).all()
    # 320 bytes are wanted; they touch at most six blocks of 64
    assert len(asked) == len(set(asked)) <= 6 and all(stop - start == 64 for _, start, stop in asked)


def test_a_block_that_the_connection_spoiled_is_read_again(store, monkeypatch):
    whole, entries = two_parts(store)
    reader, plain, first = open_reader(store, entries), Store.read_range, []

    def spoiled_once(self, path, start, stop):
        data = plain(self, path, start, stop)
        if first:
            return data
        first.append(path)
        return data[:-1] + bytes([data[-1] ^ 1])

    monkeypatch.setattr(Store, "read_range", spoiled_once)
    assert (reader.whole("a", "param") == whole["param"]["a"]).all() and first


def test_what_is_not_there_is_named(store):
    _, entries = two_parts(store)
    reader = open_reader(store, entries)
    with pytest.raises(Missing, match="has no b"):
        reader.whole("b", "param")
    with pytest.raises(Missing, match=r"holds 0 of 30 numbers of a \(exp_avg_sq\)"):
        reader.whole("a", "exp_avg_sq")
    half = open_reader(store, entries[:2])
    with pytest.raises(Missing, match="holds 20 of 30 numbers of a"):
        half.whole("a", "param")


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something-else"},
        {"slices": [["a", [0, 0, 7, 5]]]},
        {"slices": [["a", [-1, 0, 4, 5]]]},
        {"slices": [["b", [0, 0, 1, 1]]]},
        {"blocks": []},
        {"more": 1},
    ],
    ids=str,
)
def test_an_index_of_another_release_or_of_nonsense_is_refused(store, change):
    _, entries = two_parts(store)
    data = json.loads(store.read("run/checkpoint/step=000001/actor-00000.json")) | change
    entry = sharded.write_file(store, "run/checkpoint/step=000001", "actor-00000.json", json.dumps(data).encode())
    with pytest.raises(StorageError, match=r"actor-00000\.json is not an index of"):
        open_reader(store, [entries[0], entry])


class Hostile:
    def __reduce__(self):
        return (pytest.fail, ("a checkpoint ran code",))


def test_a_pickle_in_place_of_an_index_is_not_loaded(store):
    entry = sharded.write_file(store, "run/checkpoint/step=000001", "actor-00000.json", pickle.dumps(Hostile()))
    with pytest.raises(StorageError, match="is not an index of"):
        open_reader(store, [entry])


def test_writing_that_is_given_up_leaves_nothing(store):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Abandoned):
        two_parts(store, abandoned=stop.is_set)
    assert store.files() == []
