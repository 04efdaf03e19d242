"""Rows of user data files (JSON, JSON lines, Parquet) as native Python values, without any guessing of types.

Each file keeps its own columns and types, so a column that is null in one file, or has another shape in the next, is
no problem; and what is a string in the file, like "2024-01-01", stays one.
"""

import gzip
import json
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from storage.filesystem import Store

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_PARQUET_SUFFIXES = (".parquet", ".pq")
SUFFIXES = (*_JSON_SUFFIXES, *_PARQUET_SUFFIXES)


class DataError(ValueError):
    """Prompt data cannot be used; the message names the file and the row and says what to do."""


class RowFile(Protocol):
    """The rows of one file."""

    columns: set[str]

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int) -> dict[str, Any]:
        """One row as native Python values."""

    def values(self, column: str) -> Iterator[Any]:
        """One column's value in every row, None where a row has none."""

    def place(self, index: int) -> str:
        """The file and row for a message, like `/data/train.jsonl, line 3`."""


def read_rows(uri: str, data: bytes) -> RowFile:
    """The rows in the bytes of the file `uri`, whose suffix says the format. Raises DataError."""
    name = uri.lower()
    if not name.endswith(SUFFIXES):
        raise DataError(f"{uri}: unknown kind of file; onecopy reads {', '.join(SUFFIXES)}")
    if name.endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise DataError(f"{uri} is not a whole gzip file ({error}); copy it again") from error
    rows: RowFile = ParquetRows(uri, data) if name.endswith(_PARQUET_SUFFIXES) else JsonRows(uri, data)
    if not len(rows):
        raise DataError(f"{uri} has no rows; remove it, or write it again")
    return rows


class JsonRows:
    """A JSON array of objects, or one object a line. Rows stay text until asked for, to keep big files small."""

    def __init__(self, uri: str, data: bytes) -> None:
        self._uri = uri
        data = data.removeprefix(b"\xef\xbb\xbf")
        self._is_array = data.lstrip()[:1] == b"["
        self._rows = self._split_array(data) if self._is_array else self._split_lines(data)
        self.columns = set().union(*(self.row(index).keys() for index in range(len(self._rows))))

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        return f"{self._uri}, {'row' if self._is_array else 'line'} {self._rows[index][0]}"

    def row(self, index: int) -> dict[str, Any]:
        row = self._parse(self._rows[index][1], self.place(index))
        if not isinstance(row, dict):
            raise DataError(f"{self.place(index)}: a row must be a JSON object, not {type(row).__name__}")
        return row

    def values(self, column: str) -> Iterator[Any]:
        return (self.row(index).get(column) for index in range(len(self._rows)))

    def _split_lines(self, data: bytes) -> list[tuple[int, bytes]]:
        return [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]

    def _split_array(self, data: bytes) -> list[tuple[int, bytes]]:
        return [(number, json.dumps(row).encode()) for number, row in enumerate(self._parse(data, self._uri))]

    def _parse(self, data: bytes, place: str) -> Any:
        try:
            return json.loads(data.decode("utf-8"))
        except ValueError as error:
            raise DataError(f"{place}: not valid JSON in UTF-8 ({error}); mend it, or write the file again") from error


class ParquetRows:
    """A Parquet file, held as an Arrow table with the types that the file declares."""

    def __init__(self, uri: str, data: bytes) -> None:
        self._uri = uri
        try:
            self._table = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{uri} is not a whole Parquet file ({error}); copy or write it again") from error
        self.columns = set(self._table.column_names)

    def __len__(self) -> int:
        return self._table.num_rows

    def place(self, index: int) -> str:
        return f"{self._uri}, row {index}"

    def row(self, index: int) -> dict[str, Any]:
        return self._native(self._table.slice(index, 1), self.place(index))[0]

    def values(self, column: str) -> Iterator[Any]:
        for batch in self._table.select([column]).to_batches(max_chunksize=4096):
            yield from (row[column] for row in self._native(batch, self._uri))

    def _native(self, rows: Any, place: str) -> list[dict[str, Any]]:
        try:
            return rows.to_pylist()
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{place}: a value has no Python form ({error}); cast that column to a string") from error


def find_files(path: str) -> list[tuple[Store, str]]:
    """The data files that `path` means, sorted: one file, the data files directly in a folder, or a glob.

    Each is a store and the file's path in it. Folders are not searched deeper, so that splits in subfolders are never
    mixed by accident; hidden files and other kinds are passed over. Raises DataError if nothing is found.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    parent = Store.open(folder or ("/" if path.startswith("/") else "."))
    if name and name not in (".", "..") and parent.exists(name):
        return [(parent, name)]
    if any(character in path for character in "*?["):
        return _glob(path)
    store = Store.open(path)
    names = store.list()
    found = [name for name in names if name.lower().endswith(SUFFIXES) and name[0] not in "._"]
    if not found:
        has = f"it has {', '.join(names[:8])}" if names else "there is no such file or folder, or it is empty"
        raise DataError(f"no data files ({', '.join(SUFFIXES)}) at {path}: {has}; name a file, a folder or a glob")
    if len({name.lower().endswith(_PARQUET_SUFFIXES) for name in found}) > 1:
        raise DataError(f"{path} has JSON and Parquet ({', '.join(found[:8])}); choose with a glob: {path}/*.jsonl")
    return [(store, name) for name in found]


def _glob(path: str) -> list[tuple[Store, str]]:
    segments = path.split("/")
    first = next(index for index, segment in enumerate(segments) if any(c in segment for c in "*?["))
    prefix = "/".join(segments[:first])
    store = Store.open(prefix or ("/" if path.startswith("/") else "."))
    found = [name for name in store.glob("/".join(segments[first:])) if name.rsplit("/", 1)[-1][0] not in "._"]
    if not found:
        raise DataError(f"no files match {path}; give a file, a folder or a glob that matches some")
    return [(store, name) for name in found]
