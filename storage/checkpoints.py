"""Checkpoints of a run: a stage like the others, whose files are the ranks' shards instead of Parquet parts.

The checkpoint of step s holds weight version s, so version 0 can be kept too. The newest finished one is never removed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

from storage.filesystem import Store
from storage.integrity import HashingWriter, verify_file
from storage.ledger import Ledger, LedgerError
from storage.manifest import MANIFEST_NAME, FileEntry, Manifest

STAGE = "checkpoint"


class Shard:
    """One file of a checkpoint being written; see `open_shard`."""

    entry: FileEntry
    """What the manifest needs about the shard; set when the shard is finished."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file


def shard_name(rank: int) -> str:
    """Name of the file that rank `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def critic_name(rank: int) -> str:
    """Name of the file of rank `rank`'s part of a critic."""
    return f"critic-{rank:05d}.safetensors"


def is_critic(name: str) -> bool:
    """Whether a checkpoint's file belongs to the critic."""
    return name.startswith("critic-")


def begin(ledger: Ledger, step: int) -> str:
    """Clear an unfinished attempt and return the URI that the ranks write their shards to.

    Raises LedgerError if the checkpoint is finished already.
    """
    ledger.prepare(STAGE, step)
    return ledger.stage_uri(STAGE, step)


@contextmanager
def open_shard(uri: str, name: str) -> Iterator[Shard]:
    """Write one file of the checkpoint at `uri` through `shard.file`; hashed on the way, absent if the block raises.

    `shard.entry` is set when the block ends. Raises StorageError.
    """
    with Store.open(uri).open_output(name) as file:
        hashing = HashingWriter(file)
        shard = Shard(cast(IO[bytes], hashing))
        yield shard
        shard.entry = hashing.entry(name)


def commit(ledger: Ledger, manifest: Manifest) -> Manifest:
    """Finish a checkpoint with what its ranks wrote. Raises LedgerError if that is not a checkpoint of its step."""
    if manifest.stage != STAGE or not manifest.files:
        raise LedgerError(f"a checkpoint is a {STAGE!r} stage with files, not {manifest.stage!r} with none")
    if manifest.weight_version != manifest.step:
        raise LedgerError(f"checkpoint step {manifest.step} would hold weight version {manifest.weight_version}")
    return ledger.publish(manifest)


def latest(ledger: Ledger, at_most: int | None = None) -> Manifest | None:
    """The newest finished checkpoint, of version `at_most` or older; None if there is none."""
    steps = [step for step in ledger.committed(STAGE) if at_most is None or step <= at_most]
    return ledger.get(STAGE, steps[-1]) if steps else None


def verify(ledger: Ledger, manifest: Manifest) -> None:
    """Read every file of a checkpoint and compare it with the manifest. Raises CorruptFile naming the file."""
    for entry in manifest.files:
        verify_file(ledger.store, manifest.folder, entry)


def retain(ledger: Ledger, keep_last: int, keep_every: int = 0) -> list[int]:
    """Remove old checkpoints and return their steps.

    Kept are the newest `keep_last` (at least 1) finished ones and those whose step is a multiple of `keep_every` (0:
    none). What an interrupted save or removal left below the newest finished one goes too; what is newer stays, it may
    be being written. Raises ValueError for `keep_last` below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least the newest checkpoint must be kept")
    finished = ledger.committed(STAGE)
    if not finished:
        return []
    kept = set(finished[-keep_last:])
    if keep_every > 0:
        kept |= {step for step in finished if step % keep_every == 0}
    removed = [step for step in _folders(ledger) if step < finished[-1] and step not in kept]
    for step in removed:
        path = ledger.stage_path(STAGE, step)
        # Without its manifest it is no checkpoint: an interruption from here on leaves what the next call clears.
        ledger.store.remove(f"{path}/{MANIFEST_NAME}")
        ledger.store.remove_folder(path)
    return removed


def _folders(ledger: Ledger) -> list[int]:
    folders = {path.partition("/")[0] for path in ledger.store.files(f"{ledger.run}/{STAGE}")}
    values = (name.removeprefix("step=") for name in folders if name.startswith("step="))
    return sorted(int(value) for value in values if value.isdecimal())
