"""What a finished stage says about itself: which files, how many rows, from what, and when.

A manifest is small (no data, one line a file), so it can travel through Prefect and Ray in place of the data.
"""

import hashlib
import json
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MANIFEST_NAME = "_manifest.json"
"""The leading underscore hides it from pyarrow's dataset discovery."""

SCHEMA_VERSION = 1


class FileEntry(BaseModel):
    """One file of a stage: final name in the stage's folder, size in bytes, SHA-256 (hex), rows (0 if not a table)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    rows: int = Field(default=0, ge=0)


class Manifest(BaseModel):
    """The record of one finished stage of one step.

    `fingerprint` identifies what the stage was made from (see `fingerprint`); `inputs` maps the name of each stage it
    read to that manifest's `digest`. `weight_version` is the number of updates the weights had; `seconds` is wall
    time; `started_at` and `finished_at` are ISO 8601 in UTC. `uri` is the stage's folder as the ledger that returned
    this manifest sees it. Figures that are not finite survive JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    run: str
    step: int = Field(ge=0)
    stage: str
    fingerprint: str
    inputs: dict[str, str] = {}
    files: list[FileEntry] = []
    rows: int = Field(default=0, ge=0)
    weight_version: int = Field(ge=0)
    metrics: dict[str, float] = {}
    seconds: float = Field(default=0.0, ge=0)
    started_at: str
    finished_at: str
    flow_run_id: str | None = None
    uri: str = ""

    @property
    def folder(self) -> str:
        """The stage's folder, relative to the root that holds the runs."""
        return stage_folder(self.run, self.stage, self.step)

    @property
    def root_uri(self) -> str:
        """The root that holds the runs: `read(Store.open(manifest.root_uri), manifest)` works in any process."""
        return self.uri.removesuffix(f"/{self.folder}")

    @property
    def digest(self) -> str:
        """Identifies the stage by what is in it, not by what it was made from: sampling twice gives two digests."""
        return fingerprint(self.stage, self.step, self.fingerprint, [(file.path, file.sha256) for file in self.files])


def stage_folder(run: str, stage: str, step: int) -> str:
    """`RUN/STAGE/step=000012`: the run's folder layout, a hive partition by step."""
    return f"{run}/{stage}/step={step:06d}"


def part_name(index: int) -> str:
    """Name of the `index`-th Parquet file of a stage."""
    return f"part-{index:05d}.parquet"


def staged_name(name: str) -> str:
    """The name of a file while its stage is not finished: hidden from readers, renamed when the stage is published."""
    return f"_{name}"


def fingerprint(*parts: Any) -> str:
    """16 hex digits of the SHA-256 of the parts as canonical JSON (keys sorted; pydantic models as their JSON form).

    The same values give the same fingerprint in any process and release. Raises TypeError for a value JSON cannot
    hold and ValueError for a number that is not finite, since neither has one written form.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_model_as_json)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def utc_now() -> str:
    """The time now, ISO 8601 in UTC with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _model_as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} has no canonical JSON; pass plain values or a pydantic model")
