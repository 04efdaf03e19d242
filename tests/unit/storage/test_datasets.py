"""Parts hold exactly their schema, and what is read is what was written or an error that names the file."""

import errno
import hashlib
import os
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.datasets import (
    ADVANTAGE,
    PROMPT,
    REWARD,
    ROLLOUT,
    CorruptFile,
    DatasetError,
    join,
    open_part,
    read,
    write_part,
)
from storage.filesystem import StorageError, Store
from storage.integrity import verify_file
from storage.ledger import Ledger
from storage.manifest import Manifest

NOW = "2026-01-01T00:00:00+00:00"


@pytest.fixture(params=["local", "memory"])
def ledger(request, tmp_path):
    return Ledger(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}", "demo")


def rewards(*rows):
    return pa.table(
        {
            "sample_id": [row[0] for row in rows],
            "group_id": ["g"] * len(rows),
            "reward": pa.array([row[1] for row in rows], pa.float64()),
            "components": ["{}"] * len(rows),
            "error": pa.array([None] * len(rows), pa.string()),
        },
        schema=REWARD,
    )


def publish(ledger, *tables):
    path = ledger.stage_path("reward", 0)
    files = [write_part(ledger.store, path, index, table, REWARD) for index, table in enumerate(tables)]
    return ledger.publish(
        Manifest(
            run="demo",
            step=0,
            stage="reward",
            fingerprint="f",
            files=files,
            rows=sum(file.rows for file in files),
            weight_version=0,
            started_at=NOW,
            finished_at=NOW,
        )  # fmt: skip
    )


def rollout_row(name="s0", **changes):
    row = dict(
        sample_id=name, group_id="g", prompt_id="p", weight_version=2**40, prompt_tokens=[1, 2], response_tokens=[7],
        response_mask=[1], rollout_logprobs=[-0.25], finish_reason="stop", text="né 🙂",
    )  # fmt: skip
    return {**row, **changes}


def test_entry_describes_the_file_that_was_written(ledger):
    entry = write_part(ledger.store, "demo/reward/step=000000", 4, rewards(("a", 1.0), ("b", None)), REWARD)
    data = ledger.store.read("demo/reward/step=000000/_part-00004.parquet")
    assert entry.path == "part-00004.parquet" and entry.rows == 2
    assert entry.bytes == len(data) and entry.sha256 == hashlib.sha256(data).hexdigest()
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_the_same_table_gives_the_same_bytes(ledger):
    first, second = (write_part(ledger.store, f"demo/x/{i}", 0, rewards(("a", 1.0)), REWARD) for i in (1, 2))
    assert first.sha256 == second.sha256


def test_a_stage_opened_at_its_own_uri_is_written_without_a_path(ledger):
    write_part(Store.open(ledger.stage_uri("reward", 0)), "", 0, rewards(("a", 1.0)), REWARD)
    assert ledger.store.list(ledger.stage_path("reward", 0)) == ["_part-00000.parquet"]


def test_round_trip_of_ragged_lists_and_nulls(ledger):
    rows = [rollout_row("s0"), rollout_row("s1", response_tokens=[], response_mask=[], rollout_logprobs=[], text="")]
    table = pa.Table.from_pylist(rows, schema=ROLLOUT)
    entry = write_part(ledger.store, ledger.stage_path("rollout", 0), 0, table, ROLLOUT)
    stored = ledger.publish(
        Manifest(
            run="demo",
            step=0,
            stage="rollout",
            fingerprint="f",
            files=[entry],
            rows=2,
            weight_version=0,
            started_at=NOW,
            finished_at=NOW,
        )  # fmt: skip
    )
    assert read(ledger.store, stored).to_pylist() == rows
    assert read(ledger.store, stored, ["text", "sample_id"]).column_names == ["text", "sample_id"]


def test_parts_are_read_in_order_also_when_one_is_empty_or_all_null(ledger):
    stored = publish(ledger, rewards(("a", None), ("b", None)), rewards(), rewards(("c", 0.5)))
    table = read(ledger.store, stored)
    assert table.schema.field("reward").type == pa.float64() and table.schema.field("error").type == pa.string()
    assert table["sample_id"].to_pylist() == ["a", "b", "c"] and table["reward"].to_pylist() == [None, None, 0.5]


def test_writing_in_pieces(ledger):
    with open_part(ledger.store, "demo/reward/step=000000", 0, REWARD) as part:
        part.write(rewards(("a", 1.0)))
        part.write(rewards(("b", 2.0), ("c", 3.0)))
    assert part.entry.rows == 3
    verify_file(ledger.store, "demo/reward/step=000000", part.entry.model_copy(update={"path": "_part-00000.parquet"}))


def test_a_writer_that_fails_half_way_leaves_nothing(ledger):
    with pytest.raises(KeyError), open_part(ledger.store, "demo/reward/step=000000", 0, REWARD) as part:
        part.write(rewards(("a", 1.0)))
        raise KeyError("after the first of two batches")
    assert ledger.store.files() == []


def test_a_disk_that_fills_up_leaves_nothing_and_names_the_file(tmp_path, monkeypatch):
    class Full:
        """A temporary file on a disk with 100 bytes left."""

        def __init__(self, file):
            self.file, self.left = file, 100

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

    monkeypatch.setattr("builtins.open", lambda path, mode, real=open: Full(real(path, mode)))
    with pytest.raises(StorageError, match=r"_part-00000\.parquet: No space left on device; free some space"):
        write_part(Store.open(str(tmp_path)), "s", 0, rewards(*((str(i), float(i)) for i in range(1000))), REWARD)
    assert os.listdir(tmp_path / "s") == []


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_part_is_named(ledger, damage):
    stored = publish(ledger, rewards(("a", 1.0)), rewards(("b", 2.0)), rewards(("c", 3.0)))
    path = f"{stored.folder}/part-00001.parquet"
    data = bytearray(ledger.store.read(path))
    if damage == "gone":
        ledger.store.remove(path)
    else:
        data[len(data) // 2] ^= 1
        ledger.store.write(path, {"cut": bytes(data[:-10]), "flip": bytes(data), "empty": b""}[damage])
    reason = {"cut": f"{len(data) - 10} bytes instead of {len(data)}", "flip": "SHA-256", "empty": "0 bytes instead"}
    with pytest.raises(CorruptFile, match=rf"part-00001\.parquet.*{reason.get(damage, 'missing')}.*stage done again"):
        read(ledger.store, stored)
    with pytest.raises(CorruptFile, match=r"part-00001\.parquet"):
        verify_file(ledger.store, stored.folder, stored.files[1])
    verify_file(ledger.store, stored.folder, stored.files[0])


def test_a_row_count_that_differs_from_the_manifest_is_found(ledger):
    stored = publish(ledger, rewards(("a", 1.0)))
    wrong = stored.model_copy(update={"files": [stored.files[0].model_copy(update={"rows": 2})]})
    with pytest.raises(CorruptFile, match="has 1 rows, its manifest says 2"):
        read(ledger.store, wrong)


def test_a_stage_without_parts_has_no_dataset(ledger):
    stored = ledger.publish(
        Manifest(run="demo", step=0, stage="update", fingerprint="f", weight_version=1, started_at=NOW, finished_at=NOW)
    )
    with pytest.raises(DatasetError, match="'update' of step 0 has no dataset"):
        read(ledger.store, stored)


def test_columns_and_types_are_those_of_the_schema(tmp_path):
    store = Store.open(str(tmp_path))
    good = rewards(("a", 1.0))
    with pytest.raises(DatasetError, match=r"missing \['error'\], unknown \[\]"):
        write_part(store, "s", 0, good.drop_columns(["error"]), REWARD)
    with pytest.raises(DatasetError, match=r"unknown \['note'\]"):
        write_part(store, "s", 0, good.append_column("note", pa.array(["x"])), REWARD)
    with pytest.raises(DatasetError, match="'sample_id' may not be null, and is in row 1"):
        write_part(
            store, "s", 0, pa.table({**rewards(("a", 1.0), ("b", 2.0)).to_pydict(), "sample_id": ["a", None]}), REWARD
        )
    big = pa.Table.from_pylist([rollout_row()]).set_column(5, "response_tokens", pa.array([[2**31]]))
    with pytest.raises(DatasetError, match="'response_tokens' does not fit its type"):
        write_part(store, "s", 0, big, ROLLOUT)
    assert store.files() == []


def test_narrower_types_and_another_column_order_are_taken(tmp_path):
    store = Store.open(str(tmp_path))
    loose = pa.table(
        {
            "length": [3],
            "sample_id": ["a"],
            "group_id": ["g"],
            "advantages": [[0.5]],
            "returns": [None],
            "reward": [1.0],
        }
    )
    write_part(store, "s", 0, loose, ADVANTAGE)
    stored = pq.read_table(tmp_path / "s" / "_part-00000.parquet")
    assert stored.schema.equals(ADVANTAGE)


def test_join_is_by_id_and_not_by_position():
    left = pa.table({"sample_id": ["a", "b", "c"], "x": [1, 2, 3]})
    right = pa.table({"y": [[30], [10], []], "sample_id": ["c", "a", "b"]})
    assert join(left, right).to_pydict() == {"sample_id": ["a", "b", "c"], "x": [1, 2, 3], "y": [[10], [], [30]]}


def test_join_works_on_tables_in_several_pieces():
    left = pa.concat_tables([pa.table({"sample_id": ["a"]}), pa.table({"sample_id": ["b"]})])
    right = pa.concat_tables([pa.table({"sample_id": ["b"], "y": [2]}), pa.table({"sample_id": ["a"], "y": [1]})])
    assert join(left, right).to_pydict() == {"sample_id": ["a", "b"], "y": [1, 2]}
    assert join(left.slice(0, 0), right.slice(0, 0)).num_rows == 0


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (["a", "b"], ["a"], "1 samples are missing in the right table, first 'b'"),
        (["a"], ["a", "z"], "1 samples are missing in the left table, first 'z'"),
        (["a", "a"], ["a"], "more than once in the left table, first a"),
        (["a"], ["a", "a"], "more than once in the right table, first a"),
    ],
)
def test_join_refuses_ids_that_are_missing_or_doubled(left, right, message):
    with pytest.raises(DatasetError, match=message):
        join(pa.table({"sample_id": left}), pa.table({"sample_id": right}))


def test_join_refuses_columns_that_contradict_each_other():
    left = pa.table({"sample_id": ["a", "b"], "group_id": ["g", "h"]})
    same = pa.table({"sample_id": ["b", "a"], "group_id": ["h", "g"]})
    assert join(left, same).column_names == ["sample_id", "group_id"]
    with pytest.raises(DatasetError, match="'group_id' is in both tables and differs"):
        join(left, pa.table({"sample_id": ["b", "a"], "group_id": ["g", "h"]}))


def test_schemas_are_those_of_the_documentation():
    assert PROMPT.names == [
        "prompt_id", "group_id", "source", "prompt_text", "prompt_tokens", "answer", "extra",
    ]  # fmt: skip
    assert [field.name for field in REWARD if field.nullable] == ["reward", "error"]
    assert str(ROLLOUT.field("rollout_logprobs").type) == "list<item: float>"
    assert str(ROLLOUT.field("response_mask").type) == "list<item: int8>"
