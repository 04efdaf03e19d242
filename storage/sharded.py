"""Matrices cut into rectangles over many files, each file with an index; any rectangle can be read back.

Two files a part: NAME.safetensors holds the numbers (fp32, one run of all its slices a state), NAME.json says which rectangles
of which tensors they are, and has a SHA-256 of every 8 MiB of the first. A reader therefore checks exactly the bytes it uses, in
the same pass, whatever part of whichever files it needs. The JSON itself is checked against the stage's manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage.boxes import Box, boxes_of_run, overlap, run_of_rows
from storage.filesystem import StorageError, Store
from storage.integrity import CorruptFile, HashingWriter, read_verified
from storage.manifest import FileEntry, Manifest

FORMAT = "onecopy-checkpoint-2"
DTYPE = np.dtype("<f4")
BLOCK_BYTES = 8 * 1024 * 1024
READERS = 8
"""Blocks read at the same time; each is held in memory while it is checked and copied."""


class Slice(NamedTuple):
    """A rectangle of a tensor."""

    tensor: str
    box: Box


class Missing(StorageError):
    """The parts do not hold what was asked for."""


class Index(BaseModel):
    """Index of one file of numbers.

    Attributes:
        owner: whose tensors they are, a file name's first half.
        file: the safetensors file.
        states: what is kept of each number ("param", ...): the file holds `numbers` numbers of the first, then of the second.
        slices: tensor and rectangle (row, column, rows, columns); their numbers follow one another, row by row.
        shapes: rows and columns of every whole tensor that is named.
        data_start: byte at which the numbers begin; what is before is the safetensors header.
        blocks: SHA-256 (hex) of each `block_bytes` of the file.
        about: what the owner wants to know besides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["onecopy-checkpoint-2"] = "onecopy-checkpoint-2"
    owner: str
    file: str
    states: list[str]
    slices: list[tuple[str, tuple[int, int, int, int]]]
    shapes: dict[str, tuple[int, int]]
    data_start: int = Field(ge=0)
    block_bytes: int = Field(gt=0, multiple_of=8)
    blocks: list[str]
    about: dict[str, Any]

    @cached_property
    def numbers(self) -> int:
        """Numbers of one state."""
        return sum(Box(*box).size for _, box in self.slices)

    @cached_property
    def bytes(self) -> int:
        """Size of the file."""
        return self.data_start + len(self.states) * self.numbers * DTYPE.itemsize

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Index:
        for tensor, (row, column, rows, columns) in self.slices:
            whole = self.shapes.get(tensor, (0, 0))
            if min(row, column, rows - 1, columns - 1) < 0 or row + rows > whole[0] or column + columns > whole[1]:
                raise ValueError(f"a slice of {tensor} does not lie in the tensor")
        if len(self.blocks) != -(-self.bytes // self.block_bytes):
            raise ValueError("the digests are not those of a file of its size")
        return self


class Abandoned(RuntimeError):
    """Writing was given up because its result is not wanted any more; nothing was published."""


def write_sharded(
    store: Store,
    folder: str,
    name: str,
    slices: Sequence[Slice],
    values: np.ndarray,
    *,
    states: Sequence[str],
    shapes: dict[str, tuple[int, int]],
    owner: str,
    about: dict[str, Any],
    abandoned: Callable[[], bool] = lambda: False,
) -> list[FileEntry]:
    """Write NAME.safetensors and NAME.json to a folder of the store and return their entries.

    Args:
        values: fp32 [states, numbers], contiguous; the slices' numbers in order.
        abandoned: looked at between blocks.

    Raises:
        StorageError: a file could not be written; none of it is there.
        Abandoned: see `abandoned`.
    """
    header = _safetensors_header(slices, states, values.shape[1])
    numbers = np.ascontiguousarray(values, dtype=DTYPE).reshape(-1).view(np.uint8).data
    with store.open_output(f"{folder}/{name}.safetensors") as file:
        hashing, blocks = HashingWriter(file), _BlockDigests()
        for piece in (memoryview(header), *_pieces(numbers)):
            if abandoned():
                raise Abandoned(f"{name} is not wanted any more")
            hashing.write(piece)
            blocks.update(piece)
    part = Index(
        owner=owner,
        file=f"{name}.safetensors",
        states=list(states),
        slices=[(each.tensor, tuple(each.box)) for each in slices],
        shapes=shapes,
        data_start=len(header),
        block_bytes=BLOCK_BYTES,
        blocks=blocks.finish(),
        about=about,
    )
    return [hashing.entry(part.file), write_file(store, folder, f"{name}.json", part.model_dump_json().encode())]


def write_file(store: Store, folder: str, name: str, data: bytes) -> FileEntry:
    """Write a small file of a checkpoint and return its entry."""
    store.write(f"{folder}/{name}", data)
    return FileEntry(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def read_index(store: Store, manifest: Manifest, entry: FileEntry) -> Index:
    """The index that a manifest's file holds. Raises CorruptFile, or StorageError if it is none of this release."""
    data = read_verified(store, manifest.folder, entry)
    try:
        return Index.model_validate_json(data)
    except ValidationError as error:
        where = store.uri(f"{manifest.folder}/{entry.path}")
        raise StorageError(
            f"{where} is not an index of {FORMAT}, it was written by another release: {error}"
        ) from error


@dataclass(frozen=True)
class Wanted:
    """A rectangle of one state of a tensor, and the array [rows, columns] to fill with it."""

    state: str
    tensor: str
    box: Box
    out: np.ndarray


class _Source(NamedTuple):
    """A slice of a part: where its numbers of one state begin, in elements of a state's run."""

    part: int
    box: Box
    offset: int


class _Copy(NamedTuple):
    """Bytes of a file, from `start`, that are the numbers of `source` row by row; some are wanted."""

    start: int
    source: Box
    wanted: Wanted


class ShardedReader:
    """All parts of one owner's tensors in a folder of the store."""

    def __init__(self, store: Store, folder: str, parts: Iterable[Index]) -> None:
        self._store, self._folder, self._parts = store, folder, list(parts)
        self.shapes: dict[str, tuple[int, int]] = {}
        self._sources: dict[str, list[_Source]] = defaultdict(list)
        for number, part in enumerate(self._parts):
            self.shapes.update(part.shapes)
            offset = 0
            for tensor, corners in part.slices:
                box = Box(*corners)
                self._sources[tensor].append(_Source(number, box, offset))
                offset += box.size

    def whole(self, tensor: str, state: str) -> np.ndarray:
        """One whole tensor as a matrix, fp32. Raises as `read`."""
        if tensor not in self.shapes:
            raise Missing(f"{self._store.uri(self._folder)} has no {tensor}")
        out = np.empty(self.shapes[tensor], DTYPE)
        self.read([Wanted(state, tensor, Box(0, 0, *self.shapes[tensor]), out)])
        return out

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill all arrays, reading no block of a file twice.

        Raises:
            Missing: a rectangle is not, or not wholly, in the parts; nothing was read.
            CorruptFile: a file is not what its index says; the message names it.
        """
        blocks: dict[tuple[int, int], list[_Copy]] = defaultdict(list)
        for each in wanted:
            self._plan(each, blocks)
        for number in {number for number, _ in blocks}:
            self._check_size(self._parts[number])
        places = sorted(blocks)
        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(lambda place: self._fill(place, blocks[place]), places):
                pass  # raises the first error

    def _plan(self, wanted: Wanted, blocks: dict[tuple[int, int], list[_Copy]]) -> None:
        """Note, for every block that holds some of it, what to copy."""
        found = 0
        for source in self._sources.get(wanted.tensor, ()):
            common, part = overlap(wanted.box, source.box), self._parts[source.part]
            if common is None or wanted.state not in part.states:
                continue
            found += common.size
            run = part.states.index(wanted.state) * part.numbers + source.offset
            first, last = (part.data_start + (run + edge) * DTYPE.itemsize for edge in run_of_rows(common, source.box))
            copy = _Copy(part.data_start + run * DTYPE.itemsize, source.box, wanted)
            for block in range(first // part.block_bytes, (last - 1) // part.block_bytes + 1):
                blocks[source.part, block].append(copy)
        if found != wanted.box.size:
            raise Missing(
                f"{self._store.uri(self._folder)} holds {found} of {wanted.box.size} numbers of {wanted.tensor} "
                f"({wanted.state}): it was saved from a model that has other tensors, or others are trained now"
            )

    def _fill(self, place: tuple[int, int], copies: list[_Copy]) -> None:
        part, block = self._parts[place[0]], place[1]
        data, begin = self._block(part, block), block * part.block_bytes
        for start, source, wanted in copies:
            first = max(start, begin)
            last = min(start + source.size * DTYPE.itemsize, begin + len(data))
            run = np.frombuffer(data, DTYPE, (last - first) // DTYPE.itemsize, first - begin)
            at = (first - start) // DTYPE.itemsize
            for box in boxes_of_run(at, at + len(run), source.columns):
                values, run = run[: box.size].reshape(box.rows, box.columns), run[box.size :]
                here = box.moved(source.row, source.column)
                if (common := overlap(here, wanted.box)) is not None:
                    wanted.out[common.within(wanted.box)] = values[common.within(here)]

    def _block(self, part: Index, block: int) -> bytes:
        """A block's bytes as they were written; read again once, because a connection may have spoiled them."""
        path, begin = f"{self._folder}/{part.file}", block * part.block_bytes
        for _ in range(2):
            data = self._store.read_range(path, begin, min(begin + part.block_bytes, part.bytes))
            if hashlib.sha256(data).hexdigest() == part.blocks[block]:
                return data
        raise CorruptFile(
            f"{self._store.uri(path)} is not the file that was saved: bytes from {begin} on have another SHA-256"
        )

    def _check_size(self, part: Index) -> None:
        path = f"{self._folder}/{part.file}"
        size = self._store.size(path)
        if size != part.bytes:
            has = "is missing" if size is None else f"has {size} bytes instead of {part.bytes}"
            raise CorruptFile(f"{self._store.uri(path)} is not the file that was saved: it {has}")


class _BlockDigests:
    """SHA-256 of every `BLOCK_BYTES` of what passes through."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash, self._room = hashlib.sha256(), BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        while len(data):
            taken = data[: self._room]
            self._hash.update(taken)
            data, self._room = data[len(taken) :], self._room - len(taken)
            if not self._room:
                self._done.append(self._hash.hexdigest())
                self._hash, self._room = hashlib.sha256(), BLOCK_BYTES

    def finish(self) -> list[str]:
        return self._done if self._room == BLOCK_BYTES else [*self._done, self._hash.hexdigest()]


def _pieces(data: memoryview) -> Iterable[memoryview]:
    return (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))


def _safetensors_header(slices: Sequence[Slice], states: Sequence[str], numbers: int) -> bytes:
    """The head of a safetensors file: its length (8 bytes, little endian), then JSON, filled up with blanks to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
    for index, state in enumerate(states):
        at = index * numbers * DTYPE.itemsize
        for tensor, box in slices:
            name = f"{tensor}[{box.row}:{box.row + box.rows},{box.column}:{box.column + box.columns}]|{state}"
            stop = at + box.size * DTYPE.itemsize
            entries[name] = {"dtype": "F32", "shape": [box.rows, box.columns], "data_offsets": [at, stop]}
            at = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
