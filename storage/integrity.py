"""Size and checksum of files, taken while they are written and compared when they are read."""

import hashlib
import io
from typing import IO, Any

from storage.filesystem import StorageError, Store
from storage.manifest import FileEntry

_PIECE = 8 * 1024 * 1024


class CorruptFile(StorageError):
    """A file is missing or differs from what its manifest says; the message names it."""


class HashingWriter(io.RawIOBase):
    """A binary file that counts and hashes what passes through to another one, which stays the caller's to close."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0

    def writable(self) -> bool:
        """True: this file is only written."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data` (any bytes-like object) and return its size in bytes."""
        with memoryview(data) as view:
            self._file.write(view)
            self._hash.update(view)
            self._bytes += view.nbytes
            return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._bytes

    def entry(self, path: str, rows: int = 0) -> FileEntry:
        """The manifest entry for what was written so far, under the final name `path`."""
        return FileEntry(path=path, bytes=self._bytes, sha256=self._hash.hexdigest(), rows=rows)


def read_verified(store: Store, folder: str, entry: FileEntry) -> bytes:
    """The file's bytes, checked against its entry. Raises CorruptFile."""
    try:
        data = store.read(f"{folder}/{entry.path}")
    except FileNotFoundError:
        raise _corrupt(store, folder, entry, "it is missing") from None
    _compare(store, folder, entry, len(data), hashlib.sha256(data).hexdigest())
    return data


def verify_file(store: Store, folder: str, entry: FileEntry) -> None:
    """Check a file of any size against its entry in pieces of 8 MiB. Raises CorruptFile."""
    digest, size = hashlib.sha256(), 0
    try:
        with store.open_input(f"{folder}/{entry.path}") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
    except FileNotFoundError:
        raise _corrupt(store, folder, entry, "it is missing") from None
    _compare(store, folder, entry, size, digest.hexdigest())


def _compare(store: Store, folder: str, entry: FileEntry, size: int, sha256: str) -> None:
    if size != entry.bytes:
        raise _corrupt(store, folder, entry, f"it has {size} bytes instead of {entry.bytes}")
    if sha256 != entry.sha256:
        raise _corrupt(store, folder, entry, f"its SHA-256 is {sha256[:12]}… instead of {entry.sha256[:12]}…")


def _corrupt(store: Store, folder: str, entry: FileEntry, what: str) -> CorruptFile:
    return CorruptFile(
        f"{store.uri(f'{folder}/{entry.path}')} is not the file its manifest describes: {what}; "
        f"restore it from a copy, or remove {store.uri(folder)} to have that stage done again"
    )
