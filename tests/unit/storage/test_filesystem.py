"""Files appear whole or not at all, names stay below the root, and errors say what to do."""

import errno
import os
import pickle
import resource
import subprocess
import sys
import uuid

import pytest

from storage.filesystem import InvalidName, StorageError, Store, checked_name


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    """The same behaviour on local disk and with object-store semantics (no rename, no folders)."""
    return Store.open(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("name", ["a", "run-1", "Qwen2.5_grpo.v3", "9" * 100, "console", "com10"])
def test_plain_names_are_accepted(name):
    assert checked_name("run", name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../x", "/abs", "a/b", "a\\b", "a b#?%2F", "x" * 101, "CON", "nul.txt", "Com1", "lpt9.log"]
    + [
        "_hidden",
        ".hidden",
        "-flag",
        "a=b",
        "a\n",
        "a\x00",
        "tab\t",
        "emoji-🙂",
        "naïve",
        "trailing.",
        "~",
        "a:b",
        "$x",
    ],
)
def test_names_that_could_escape_are_refused(name):
    with pytest.raises(InvalidName, match="run name"):
        checked_name("run", name)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "a\\b", "a/", "a\0b"])
def test_paths_that_leave_the_root_are_refused(store, path):
    for operation in (store.read, store.exists, store.remove, store.remove_folder, store.list, store.uri):
        with pytest.raises(InvalidName):
            operation(path)
    with pytest.raises(InvalidName):
        store.write(path, b"x")
    with pytest.raises(InvalidName):
        store.move("a", path)


def test_write_read_replace_list_and_remove(store):
    assert store.list() == [] and store.files() == [] and not store.exists("a/b.txt") and store.size("a/b.txt") is None
    store.write("a/b.txt", b"one")
    store.write("a/b.txt", b"three")
    store.write("a/c/d.txt", b"")
    assert store.read("a/b.txt") == b"three"
    assert store.size("a/b.txt") == 5 and store.size("a/c/d.txt") == 0
    assert store.list("a") == ["b.txt", "c"]
    assert store.files("a") == ["b.txt", "c/d.txt"]
    assert store.glob("a/*.txt") == ["a/b.txt"] and store.glob("**/*.txt") == ["a/b.txt", "a/c/d.txt"]
    assert not store.exists("a"), "a folder is not a file"
    store.remove("a/b.txt")
    store.remove("a/b.txt")
    assert store.files() == ["a/c/d.txt"]
    store.remove_folder("a")
    store.remove_folder("a")
    assert store.files() == []


def test_missing_files_are_told_apart_from_failures(store):
    with pytest.raises(FileNotFoundError):
        store.read("none")
    with pytest.raises(FileNotFoundError):
        store.move("none", "other")
    with pytest.raises(FileNotFoundError), store.open_input("none"):
        pass


def test_move_replaces_the_target(store):
    store.write("a", b"new")
    store.write("b", b"old")
    store.move("a", "b")
    assert store.read("b") == b"new" and store.files() == ["b"]


def test_streams(store):
    with store.open_output("x/y.bin") as file:
        file.write(b"12")
        assert not store.exists("x/y.bin"), "not visible before it is whole"
        file.write(b"345")
    with store.open_input("x/y.bin") as file:
        assert file.read(2) == b"12" and file.read() == b"345"


def test_an_exception_while_writing_publishes_nothing_and_keeps_the_old_file(store):
    store.write("f", b"old")
    with pytest.raises(KeyError), store.open_output("f") as file:
        file.write(b"half of the new")
        raise KeyError("caller's own")
    assert store.read("f") == b"old" and store.files() == ["f"]


def test_a_callers_own_missing_file_is_not_called_a_storage_failure(store, tmp_path):
    with pytest.raises(FileNotFoundError) as caught, store.open_output("f"):
        (tmp_path / "not there").read_bytes()
    assert not isinstance(caught.value, StorageError)


def test_what_another_process_wrote_is_seen_at_once(store):
    other = pickle.loads(pickle.dumps(store))
    assert store.list("s") == []
    other.write("s/1", b"a")
    assert store.list("s") == ["1"]
    other.write("s/1", b"longer")
    other.write("s/2", b"")
    assert store.list("s") == ["1", "2"] and store.size("s/1") == 6 and store.read("s/1") == b"longer"


def test_uris(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Store.open("runs").uri("a/b") == f"{tmp_path}/runs/a/b"
    assert Store.open(f"file://{tmp_path}/runs/").uri() == f"{tmp_path}/runs"
    assert Store.open("s3://bucket/pre/fix/").uri("a") == "s3://bucket/pre/fix/a"
    assert Store.open("memory://m").uri("a") == "memory://m/a"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("~/runs").uri() == f"{tmp_path}/runs"


def test_awkward_root_folders_work(tmp_path):
    store = Store.open(f"{tmp_path}/a b#?%2F[1]")
    store.write("x", b"1")
    assert store.read("x") == b"1" and store.list() == ["x"] and store.files() == ["x"] and store.glob("*") == ["x"]


def test_unknown_schemes_name_what_can_be_used():
    with pytest.raises(StorageError, match=r"use a local path or s3://"):
        Store.open("nosuch://x")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_no_file_and_says_so(tmp_path, monkeypatch, code):
    store = Store.open(str(tmp_path))
    store.write("f", b"old")

    def full(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*5 bytes.*free some space") as caught:
        store.write("f", b"12345")
    assert caught.value.errno == code and str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == ["f"] and store.read("f") == b"old"


def test_a_file_size_limit_leaves_no_file_and_says_so(tmp_path):
    """In a process of its own, because a lowered limit cannot be told from a full disk by whoever else writes."""
    program = (
        "import sys; from storage.filesystem import Store, StorageError\n"
        "try: Store.open(sys.argv[1]).write('big', bytes(200_000))\n"
        "except StorageError as error: print(error); sys.exit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 3, done.stderr
    assert f"{tmp_path}/big" in done.stdout and "ulimit -f" in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_is_needed(tmp_path):
    store = Store.open(str(tmp_path))
    store.write("a", b"")
    with pytest.raises(StorageError, match="cannot write"):
        store.write("a/b", b"")


class Unreachable:
    """An object store behind a broken network: every call fails with an error that is no OSError."""

    def __getattr__(self, name):
        def fail(*_args, **_kwargs):
            raise RuntimeError("Could not connect to the endpoint URL")

        return fail


def test_an_outage_never_looks_like_a_missing_file(tmp_path):
    store = Store(Unreachable(), "bucket/runs", "s3")
    operations = [
        lambda: store.read("a"),
        lambda: store.exists("a"),
        lambda: store.list("a"),
        lambda: store.files("a"),
        lambda: store.remove("a"),
        lambda: store.remove_folder("a"),
        lambda: store.move("a", "b"),
        lambda: store.write("a", b"x"),
    ]
    for operation in operations:
        with pytest.raises(StorageError, match=r"s3://bucket/runs.*Could not connect.*AWS_ENDPOINT_URL") as caught:
            operation()
        assert caught.value.errno is None, "no errno: worth another try"


def test_a_refusal_by_the_server_is_not_worth_another_try():
    class Forbidding:
        def cat_file(self, _path):
            raise PermissionError("Forbidden")

    with pytest.raises(StorageError, match="Forbidden.*credentials") as caught:
        Store(Forbidding(), "bucket", "s3").read("a")
    assert caught.value.errno == errno.EACCES


def test_a_folder_that_the_server_reports_as_an_object_is_no_file():
    class WithMarkers:
        def find(self, path):
            return [path, f"{path}/a"]

    assert Store(WithMarkers(), "bucket/runs", "s3").files() == ["a"]


def test_a_failed_upload_leaves_no_scratch_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(StorageError, match="cannot write 3 bytes"),
        Store(Unreachable(), "bucket", "s3").open_output("a") as file,
    ):
        file.write(b"abc")
    assert os.listdir(tmp_path) == []
