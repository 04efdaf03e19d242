"""Files of a run, on local disk or in an object store, behind the few operations the ledger needs.

Two promises hold on both: a file appears whole or not at all, and only `FileNotFoundError` means "there is no such
file". Everything else that goes wrong is a `StorageError`, so that an outage is never mistaken for "not done yet".
"""

import errno
import glob
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs

Names = list[str]

MAX_NAME_LENGTH = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WINDOWS_RESERVED = frozenset(
    ["con", "prn", "aux", "nul", *(f"com{i}" for i in range(1, 10)), *(f"lpt{i}" for i in range(1, 10))]
)
_LOCAL_SCHEMES = ("file", "local")
_NO_SPACE = "free some space there, or choose another root"
_NO_PERMISSION = "check that this user may write there, or choose another root"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: "raise the file size limit (`ulimit -f`), or choose another root",
    errno.EROFS: _NO_PERMISSION,
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.ENOTDIR: "a file stands where a folder is needed; move it away, or choose another root",
    errno.EIO: "check the disk",
}
_REMOTE_ADVICE = "check the bucket's name, the network, AWS_ENDPOINT_URL and the credentials"


class StorageError(OSError):
    """A file operation failed for another reason than a missing file; the message names the path and the mend.

    `errno` is the operating system's, or None: then the store was out of reach, and trying again may help.
    """

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class InvalidName(ValueError):
    """A name that would not stay one plain, visible folder or file below the root."""


def checked_name(kind: str, name: str) -> str:
    """Return `name` if it is safe as one path segment on every file system, in a URI and in a hive partition.

    Letters, digits, `.`, `_` and `-`, beginning with a letter or digit (a leading `.` or `_` hides a file from
    readers). `kind` says in the message what the name is for. Raises InvalidName.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "use letters, digits, '.', '_' and '-', beginning with a letter or digit"
    elif len(name) > MAX_NAME_LENGTH:
        rule = f"use at most {MAX_NAME_LENGTH} characters (it has {len(name)})"
    elif name.endswith(".") or name.split(".")[0].lower() in _WINDOWS_RESERVED:
        rule = "it is reserved on some systems; use another"
    else:
        return name
    raise InvalidName(f"{kind} name {name!r:.130} cannot be used: {rule}")


@dataclass(frozen=True)
class Store:
    """A folder on local disk or a prefix in an object store. Paths are relative to it, with `/` between segments.

    Every operation raises StorageError when it cannot tell or cannot do, and InvalidName for a path that would leave
    the root. Stores are cheap, hold no connection of their own, and can be pickled.
    """

    filesystem: Any
    root: str
    scheme: str

    @classmethod
    def open(cls, uri: str) -> "Store":
        """Open a local path, `file://…`, `s3://bucket/prefix` or another fsspec URI. Nothing is created or contacted.

        Credentials and endpoint come from the environment, as for every S3 client (`AWS_ENDPOINT_URL`, …).
        """
        scheme = uri.split("://", 1)[0] if "://" in uri else "file"
        location = uri if "://" in uri else os.path.expanduser(uri)
        # Listings are never cached: another process may have written since the last look.
        options = {} if scheme in _LOCAL_SCHEMES else {"use_listings_cache": False}
        try:
            filesystem, root = url_to_fs(location, **options)
        except (ImportError, ValueError) as error:
            raise StorageError(f"cannot open {uri!r}: {error}; use a local path or s3://bucket/prefix") from error
        return cls(filesystem, root.rstrip("/"), "file" if scheme in _LOCAL_SCHEMES else scheme)

    @property
    def is_local(self) -> bool:
        """Whether this is local disk, where writing means a temporary file and a rename."""
        return self.scheme == "file"

    def uri(self, path: str = "") -> str:
        """Where `path` is, for other programs: an absolute path on local disk, otherwise a URI with its scheme."""
        full = self._full(path)
        return full if self.is_local else f"{self.scheme}://{full.lstrip('/')}"

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError if there is none."""
        with self._explained("read", path, FileNotFoundError):
            return self.filesystem.cat_file(self._full(path))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, fewer at its end. Raises FileNotFoundError if there is none."""
        with self._explained("read", path, FileNotFoundError):
            return self.filesystem.cat_file(self._full(path), start=start, end=stop)

    def write(self, path: str, data: bytes) -> None:
        """Write the whole file, replacing an older one in one move: readers see the old bytes or the new, no mix."""
        if self.is_local:
            with self.open_output(path) as file:
                file.write(data)
            return
        with self._explained(f"write {len(data)} bytes to", path):
            self.filesystem.pipe_file(self._full(path), data)

    def size(self, path: str) -> int | None:
        """Size of the file in bytes, or None if there is none."""
        try:
            with self._explained("look at", path, FileNotFoundError):
                info = self.filesystem.info(self._full(path))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def exists(self, path: str) -> bool:
        """Whether there is such a file. (fsspec's own `exists` answers False to any error, so it is not used.)"""
        return self.size(path) is not None

    def list(self, path: str = "") -> Names:
        """Sorted names of the files and folders directly in a folder; none if it does not exist."""
        full = self._full(path)
        try:
            with self._explained("list", path, FileNotFoundError):
                found = self.filesystem.ls(full, detail=False)
        except FileNotFoundError:
            return []
        return sorted({item.rstrip("/").rsplit("/", 1)[-1] for item in found if item.rstrip("/") != full})

    def files(self, path: str = "") -> Names:
        """Sorted paths, relative to the folder, of all files at any depth below it; none if it does not exist."""
        full = self._full(path)
        with self._explained("list", path):
            found = self.filesystem.find(full)
        # Some servers report an emptied folder as an object of its own.
        return sorted(item[len(full) + 1 :] for item in found if item.rstrip("/") != full)

    def glob(self, pattern: str) -> Names:
        """Sorted paths, relative to the root, of the files that match a pattern with `*`, `?`, `[…]` or `**`."""
        with self._explained("search", ""):
            found = self.filesystem.glob(f"{glob.escape(self.root)}/{pattern}", detail=True)
        return sorted(item[len(self.root) + 1 :] for item, info in found.items() if info["type"] == "file")

    def remove(self, path: str) -> None:
        """Remove a file; done already is done."""
        try:
            with self._explained("remove", path, FileNotFoundError):
                self.filesystem.rm_file(self._full(path))
        except FileNotFoundError:
            return

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all below it; done already is done."""
        with self._explained("remove", path):
            if self.is_local:
                if os.path.isdir(self._full(path)):
                    shutil.rmtree(self._full(path))
                return
        for name in self.files(path):
            self.remove(f"{path}/{name}")

    def move(self, source: str, target: str) -> None:
        """Rename a file, replacing `target`. One step on local disk; copy, then delete in an object store.

        Raises FileNotFoundError if there is no `source`.
        """
        before, after = self._full(source), self._full(target)
        with self._explained("move", source, FileNotFoundError):
            if self.is_local:
                os.replace(before, after)
            else:
                self.filesystem.cp_file(before, after)
                self.filesystem.rm_file(before)

    @contextmanager
    def open_input(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file for reading in pieces. Raises FileNotFoundError if there is none."""
        with self._explained("read", path, FileNotFoundError):
            file = self.filesystem.open(self._full(path), "rb")
        with file:
            yield file

    @contextmanager
    def open_output(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file for writing in pieces; it appears under its name when the block ends without an exception.

        The bytes go to a temporary file first (beside the target on local disk, in the local temporary folder for an
        object store, which then receives one upload), so an exception in the block publishes nothing.
        """
        with self._local_output(path) if self.is_local else self._remote_output(path) as file:
            yield file

    @contextmanager
    def _local_output(self, path: str) -> Iterator[IO[bytes]]:
        target = Path(self._full(path))
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        with self._explained("write", path):
            target.parent.mkdir(parents=True, exist_ok=True)
            file = open(temporary, "xb")  # noqa: SIM115 (closed below, where its errors are explained as writing)
        try:
            with self._body_explained(path, temporary), file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            with self._explained(f"write {temporary.stat().st_size} bytes to", path):
                os.replace(temporary, target)
                _sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _remote_output(self, path: str) -> Iterator[IO[bytes]]:
        target = self._full(path)
        # Without a name, so that nothing is left of it even if this process is killed.
        with tempfile.TemporaryFile(prefix="onecopy-") as file:
            with self._body_explained(path, file.fileno()):
                yield file
                file.flush()
            size = file.tell()
            with self._explained(f"write {size} bytes to", path):
                file.seek(0)
                self.filesystem.put_file(f"/dev/fd/{file.fileno()}", target)

    def _full(self, path: str) -> str:
        if not path:
            return self.root
        segments = path.split("/")
        if any(segment in ("", ".", "..") for segment in segments) or "\\" in path or "\0" in path:
            raise InvalidName(f"path {path!r:.130} does not stay below {self.root}; use plain names with '/' between")
        return f"{self.root}/{path}"

    @contextmanager
    def _body_explained(self, path: str, written: Path | int) -> Iterator[None]:
        """Explain a full or forbidden disk met by the caller's own writes; leave the caller's other errors alone."""
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError) or error.errno not in _ADVICE:
                raise
            raise self._error(f"write (stopped after {os.stat(written).st_size} bytes)", path, error) from error

    @contextmanager
    def _explained(self, action: str, path: str, *passing: type[Exception]) -> Iterator[None]:
        """Turn every error except those in `passing` into a StorageError (S3 clients have errors of many kinds)."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (StorageError, InvalidName, *passing)):
                raise
            raise self._error(action, path, error) from error

    def _error(self, action: str, path: str, error: Exception) -> StorageError:
        code = getattr(error, "errno", None)
        reason = os.strerror(code) if code else f"{type(error).__name__}: {error}"
        fallback = "check the path" if self.is_local else _REMOTE_ADVICE
        message = f"cannot {action} {self.uri(path)}: {reason}; {_ADVICE.get(code or 0, fallback)}"
        if code is None and isinstance(error, PermissionError):
            code = errno.EACCES  # trying again would not help
        return StorageError(code, message) if code else StorageError(message)


def _sync_folder(folder: Path) -> None:
    """Without this a power cut can undo a rename although the bytes are safe."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
