"""A run's folder on a real S3 server (SeaweedFS, started here): staged, published, read with pyarrow alone, resumed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

from storage.boxes import Box
from storage.checkpoints import index_entries, latest, part_name, retain
from storage.datasets import REWARD, CorruptFile, read, write_part
from storage.filesystem import StorageError, Store
from storage.ledger import Ledger, RunRecord
from storage.manifest import Manifest, fingerprint, utc_now
from storage.sharded import ShardedReader, Slice, Wanted, read_index, write_sharded

pytestmark = pytest.mark.integration

START_TIMEOUT_S = 60
KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`s3://runs` on a fresh server, with credentials in the environment as users give them."""
    folder = tmp_path_factory.mktemp("weed")
    credentials = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    identity = {"name": "test", "credentials": [credentials], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    s3, master, volume, filer = free_ports(4)
    grpc = free_ports(4)
    command = [
        str(Path(sys.executable).with_name("weed")), "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3",
        f"-s3.port={s3}", f"-s3.port.grpc={grpc[3]}", f"-s3.config={folder / 's3.json'}",
        f"-master.port={master}", f"-master.port.grpc={grpc[0]}", f"-volume.port={volume}",
        f"-volume.port.grpc={grpc[1]}", f"-filer.port={filer}", f"-filer.port.grpc={grpc[2]}",
    ]  # fmt: skip
    with (folder / "log.txt").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}"}.items():
            patch.setenv(name, value)
        try:
            _wait(server, folder / "log.txt")
            yield "s3://runs"
        finally:
            server.kill()
            server.wait(10)


def _wait(server: subprocess.Popen[bytes], log: Path) -> None:
    """Until a bucket can be made and written to."""
    import s3fs

    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            filesystem = s3fs.S3FileSystem(skip_instance_cache=True, endpoint_url=os.environ["AWS_ENDPOINT_URL"])
            filesystem.mkdirs("runs", exist_ok=True)
            filesystem.pipe_file("runs/probe", b"x")
            return
        except Exception as error:
            assert time.monotonic() < deadline, f"no S3 server within {START_TIMEOUT_S} s: {error}"
            time.sleep(0.5)


def rewards(count: int) -> pa.Table:
    rows = [
        {"sample_id": f"s{i}", "group_id": "g", "reward": i / 10, "components": "{}", "error": None}
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=REWARD)


def publish(ledger: Ledger, step: int, files: list, stage: str = "reward") -> Manifest:
    return ledger.publish(
        Manifest(
            run=ledger.run, step=step, stage=stage, fingerprint=fingerprint(stage, step), files=files,
            rows=sum(f.rows for f in files), weight_version=step, started_at=utc_now(), finished_at=utc_now(),
        )
    )  # fmt: skip


def test_a_stage_is_invisible_until_published_and_read_with_pyarrow_alone(bucket):
    ledger = Ledger(bucket, "first")
    record = RunRecord(name="first", flow="post-train", config={}, seed=0, versions={}, created_at=utc_now())
    assert ledger.create(record) == ledger.create(record)
    entries = [write_part(ledger.store, ledger.stage_path("reward", 0), i, rewards(5), REWARD) for i in range(2)]
    assert ledger.get("reward", 0) is None
    assert pyarrow.dataset.dataset("runs/first/reward", filesystem=s3()).files == []
    manifest = publish(ledger, 0, entries)
    table = pyarrow.dataset.dataset("runs/first/reward", filesystem=s3(), partitioning="hive").to_table()
    assert table.num_rows == 10 and set(table["step"].to_pylist()) == {0}
    other = Ledger(bucket, "first")  # another process: nothing is cached between them
    assert other.get("reward", 0) == manifest and other.next_step("reward") == 1
    assert read(other.store, manifest).num_rows == 10


def s3():
    """pyarrow's own S3 client, as a user without onecopy would make it."""
    import pyarrow.fs

    return pyarrow.fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"], region="us-east-1")


def test_an_overwritten_part_is_noticed(bucket):
    ledger = Ledger(bucket, "damaged")
    manifest = publish(ledger, 0, [write_part(ledger.store, ledger.stage_path("reward", 0), 0, rewards(3), REWARD)])
    path = f"{ledger.stage_path('reward', 0)}/part-00000.parquet"
    data = ledger.store.read(path)
    ledger.store.write(path, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptFile, match="part-00000"):
        read(Store.open(bucket), manifest)


MATRIX = np.arange(2_500_000, dtype=np.float32).reshape(2500, 1000)
"""10 MB, so two blocks of a checkpoint's part."""


def save_part(ledger: Ledger, step: int) -> list:
    folder, pieces = ledger.stage_path("checkpoint", step), [Slice("a", Box(0, 0, 2500, 1000))]
    return write_sharded(
        ledger.store, folder, part_name("actor", 0), pieces, MATRIX.reshape(1, -1), states=["param"],
        shapes={"a": MATRIX.shape}, owner="actor", about={},
    )  # fmt: skip


def reader_of(ledger: Ledger, manifest: Manifest) -> ShardedReader:
    parts = [read_index(ledger.store, manifest, entry) for entry in index_entries(manifest)]
    return ShardedReader(ledger.store, manifest.folder, parts)


def test_a_rank_reads_its_rows_of_a_checkpoint_and_a_damaged_object_is_named(bucket):
    ledger = Ledger(bucket, "ranged")
    manifest = publish(ledger, 1, save_part(ledger, 1), "checkpoint")
    out = np.empty((100, 500), np.float32)
    reader_of(ledger, manifest).read([Wanted("param", "a", Box(2050, 500, 100, 500), out)])  # in both blocks
    assert (out == MATRIX[2050:2150, 500:]).all()
    path = f"{manifest.folder}/actor-00000.safetensors"
    data = ledger.store.read(path)
    for broken in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        ledger.store.write(path, broken)
        with pytest.raises(CorruptFile, match=r"actor-00000\.safetensors"):
            reader_of(ledger, manifest).read([Wanted("param", "a", Box(2400, 0, 100, 500), out)])


def test_checkpoints_are_found_and_retained(bucket):
    ledger = Ledger(bucket, "saved")
    for step in (1, 2, 3):
        publish(ledger, step, save_part(ledger, step), "checkpoint")
    assert retain(ledger, keep_last=1) == [1, 2]
    assert latest(ledger).step == 3
    assert ledger.committed("checkpoint") == [3]


def test_a_server_that_refuses_is_an_error_and_not_an_absent_stage(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageError):
        Ledger(bucket, "first").get("reward", 0)
    monkeypatch.undo()
    s3fs.S3FileSystem.clear_instance_cache()


def test_what_is_being_uploaded_has_no_name_that_could_stay(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = Store.open(f"{bucket}/scratch")
    with store.open_output("x") as file:
        file.write(b"1" * 70_000)
        assert os.listdir(tmp_path) == []
    assert store.read("x") == b"1" * 70_000
