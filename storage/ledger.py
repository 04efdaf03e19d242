"""The ledger of a run: which stage of which step is finished. It is the only truth about progress.

A stage is finished when its manifest exists. Its parts are written under hidden names, renamed when all are there, and
the manifest comes last, so a stage is either whole or invisible. What is finished is never changed.
"""

import errno
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.filesystem import InvalidName, StorageError, Store, checked_name
from storage.manifest import MANIFEST_NAME, Manifest, stage_folder, staged_name

RUN_RECORD_NAME = "run.json"

_Record = TypeVar("_Record", bound=BaseModel)


class LedgerError(RuntimeError):
    """The run folder and the request do not fit together."""


class StageConflict(LedgerError):
    """A stage is finished already, but made from something else."""


class RunRecord(BaseModel):
    """What a run was started with: configuration, seed, package versions, ISO 8601 time in UTC. Written once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: str
    flow: str
    config: dict[str, Any]
    seed: int
    versions: dict[str, str]
    created_at: str


class Ledger:
    """The finished stages of one run below `root_uri` (a local path or `s3://bucket/prefix`).

    Raises InvalidName for a run name that is not one plain path segment. Any method raises StorageError if the store
    cannot be read: an outage never looks like "not done". Ledgers are cheap and can be pickled.
    """

    def __init__(self, root_uri: str, run: str) -> None:
        self.store = Store.open(root_uri)
        self.run = checked_name("run", run)

    def __repr__(self) -> str:
        return f"Ledger({self.uri!r})"

    @property
    def root_uri(self) -> str:
        """The root that holds the runs, absolute."""
        return self.store.uri()

    @property
    def uri(self) -> str:
        """The run's folder, absolute."""
        return self.store.uri(self.run)

    def create(self, record: RunRecord) -> RunRecord:
        """Write `run.json`, or return the stored one if the run exists: a second start continues the run.

        Raises LedgerError if the record is another run's.
        """
        if record.name != self.run:
            raise LedgerError(f"the record is of run {record.name!r}, this is the ledger of {self.run!r}")
        stored = self.record()
        if stored is not None:
            return stored
        self.store.write(f"{self.run}/{RUN_RECORD_NAME}", record.model_dump_json(indent=2).encode())
        return record

    def record(self) -> RunRecord | None:
        """The stored `run.json`, or None if there is no such run. Raises LedgerError if it cannot be understood."""
        return self._load(f"{self.run}/{RUN_RECORD_NAME}", RunRecord)

    def get(self, stage: str, step: int, fingerprint: str | None = None) -> Manifest | None:
        """The manifest of a finished stage, or None if it is not finished.

        With `fingerprint`, raises StageConflict if the stage was made from something else. Raises LedgerError if the
        manifest cannot be understood.
        """
        manifest = self._load(self._manifest_path(stage, step), Manifest)
        if manifest is None:
            return None
        if fingerprint is not None and manifest.fingerprint != fingerprint:
            raise self._conflict(manifest, fingerprint)
        # The run folder may have been moved since: where it is now is what counts.
        return manifest.model_copy(update={"uri": self.stage_uri(stage, step)})

    def stage_path(self, stage: str, step: int) -> str:
        """The stage's folder, relative to `self.store`. Raises InvalidName, or ValueError for a negative step."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        return stage_folder(self.run, checked_name("stage", stage), step)

    def stage_uri(self, stage: str, step: int) -> str:
        """The stage's folder for another process: an absolute path or a URI."""
        return self.store.uri(self.stage_path(stage, step))

    def prepare(self, stage: str, step: int) -> str:
        """Remove what an unfinished attempt left behind and return the stage's path.

        Raises LedgerError if the stage is finished: what is finished is never changed.
        """
        path = self.stage_path(stage, step)
        if self.store.exists(self._manifest_path(stage, step)):
            raise LedgerError(f"{self.store.uri(path)} is finished and will not be overwritten; remove it to redo it")
        self.store.remove_folder(path)
        return path

    def publish(self, manifest: Manifest) -> Manifest:
        """Finish a stage: rename its parts to their final names, drop strangers, write the manifest last.

        Publishing again with the same fingerprint returns the stored manifest and changes nothing; with another one
        it raises StageConflict. Raises LedgerError if a file is missing or has another size than its entry says.
        """
        if manifest.run != self.run:
            raise LedgerError(f"the manifest is of run {manifest.run!r}, this is the ledger of {self.run!r}")
        stored = self.get(manifest.stage, manifest.step, manifest.fingerprint)
        if stored is not None:
            return stored
        path = self.stage_path(manifest.stage, manifest.step)
        manifest = manifest.model_copy(update={"uri": self.store.uri(path)})
        self._settle_files(path, manifest)
        data = manifest.model_dump_json(indent=2).encode()
        self.store.write(self._manifest_path(manifest.stage, manifest.step), data)
        return manifest

    def committed(self, stage: str) -> list[int]:
        """The steps at which a stage is finished, ascending."""
        folder = f"{self.run}/{checked_name('stage', stage)}"
        steps = []
        for file in self.store.files(folder):
            name, _, rest = file.partition("/")
            key, _, value = name.partition("=")
            if key == "step" and value.isdecimal() and rest == MANIFEST_NAME:
                steps.append(int(value))
        return sorted(steps)

    def next_step(self, final_stage: str = "update") -> int:
        """The first step whose final stage is not finished: where the run goes on.

        Steps are finished in order, so the border is found with O(log n) looks and no listing.
        """
        if not self._is_finished(final_stage, 0):
            return 0
        finished, unknown = 0, 1
        while self._is_finished(final_stage, unknown):
            finished, unknown = unknown, unknown * 2
        while unknown - finished > 1:
            middle = (finished + unknown) // 2
            if self._is_finished(final_stage, middle):
                finished = middle
            else:
                unknown = middle
        return unknown

    def _is_finished(self, stage: str, step: int) -> bool:
        return self.store.exists(self._manifest_path(stage, step))

    def _manifest_path(self, stage: str, step: int) -> str:
        return f"{self.stage_path(stage, step)}/{MANIFEST_NAME}"

    def _settle_files(self, path: str, manifest: Manifest) -> None:
        present = set(self.store.files(path))
        wanted = [checked_name("file", file.path) for file in manifest.files]
        if len(set(wanted)) != len(wanted):
            raise LedgerError(f"{manifest.uri}: the manifest names a file twice: {sorted(wanted)}")
        missing = [name for name in wanted if name not in present and staged_name(name) not in present]
        if missing:
            raise LedgerError(f"{manifest.uri} cannot be published, {missing} were not written; do the stage again")
        for name in wanted:
            if staged_name(name) in present:
                self.store.move(f"{path}/{staged_name(name)}", f"{path}/{name}")
        for file in manifest.files:
            size = self.store.size(f"{path}/{file.path}")
            if size != file.bytes:
                raise LedgerError(
                    f"{manifest.uri}/{file.path} has {size} bytes where {file.bytes} were written; "
                    "another process may be writing the same stage: stop it, then do the stage again"
                )
        for stranger in present - set(wanted) - {staged_name(name) for name in wanted}:
            self.store.remove(f"{path}/{stranger}")

    def _load(self, path: str, model: type[_Record]) -> _Record | None:
        try:
            data = self.store.read(path)
        except FileNotFoundError:
            return None
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(key) for key in problem["loc"]) or "the whole file"
            raise LedgerError(
                f"{self.store.uri(path)} cannot be understood ({where}: {problem['msg']}); it was written by another "
                "release of onecopy or damaged: use that release, or restore the file from a copy"
            ) from error

    def _conflict(self, stored: Manifest, wanted: str) -> StageConflict:
        return StageConflict(
            f"stage {stored.stage!r} of step {stored.step} in run {self.run!r} is finished with fingerprint "
            f"{stored.fingerprint}, and now {wanted} is asked for: the configuration or an input has changed since; "
            f"go on with the configuration in {self.uri}/{RUN_RECORD_NAME}, or start a run under another name"
        )


def list_runs(root_uri: str) -> list[RunRecord]:
    """The runs below a root, by name; a folder without `run.json` is not one. Raises LedgerError for a broken one."""
    records = []
    store = Store.open(root_uri)
    for name in store.list():
        try:
            if store.exists(name):  # a loose file, not a folder
                continue
            record = Ledger(root_uri, name).record()
        except InvalidName:
            continue
        except StorageError as error:
            if error.errno == errno.ENOTDIR:  # a socket or another thing that is no file and no folder
                continue
            raise
        if record is not None:
            records.append(record)
    return records
