"""Manifests are small, exact and refuse what they do not understand."""

import hashlib
import json

import pytest
from pydantic import BaseModel, ValidationError

from storage.manifest import FileEntry, Manifest, fingerprint, utc_now


def manifest(**changes):
    values = dict(
        run="r", step=12, stage="rollout", fingerprint="f" * 16, weight_version=12, rows=3,
        files=[FileEntry(path="part-00000.parquet", bytes=10, sha256="a" * 64, rows=3)],
        started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:00:02+00:00",
    )  # fmt: skip
    return Manifest(**{**values, **changes})


def test_fingerprint_is_the_start_of_the_sha256_of_canonical_json():
    text = b'[{"a":[1,2.5,null],"b":"\\u00e9"},"x"]'
    assert fingerprint({"b": "é", "a": (1, 2.5, None)}, "x") == hashlib.sha256(text).hexdigest()[:16]


def test_fingerprint_does_not_depend_on_key_order_and_depends_on_everything_else():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    different = [fingerprint(), fingerprint(1), fingerprint("1"), fingerprint(1, 1), fingerprint([1, 1])]
    different += [fingerprint({"a": None}), fingerprint({}), fingerprint(True)]
    assert len(set(different)) == len(different)


def test_fingerprint_takes_models_and_refuses_what_has_no_one_form():
    class Config(BaseModel):
        lr: float

    assert fingerprint(Config(lr=0.5)) == fingerprint({"lr": 0.5})
    with pytest.raises(ValueError):
        fingerprint(float("nan"))
    with pytest.raises(TypeError, match="set"):
        fingerprint({1, 2})


def test_round_trip_through_json_keeps_figures_that_are_not_finite():
    before = manifest(metrics={"kl": float("inf"), "loss": float("nan"), "reward": 0.1})
    text = before.model_dump_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    after = Manifest.model_validate_json(text)
    assert after.metrics["kl"] == float("inf") and after.metrics["reward"] == 0.1
    assert after.metrics["loss"] != after.metrics["loss"]


def test_newer_or_stray_fields_and_bad_checksums_are_refused():
    for change in ({"schema_version": 2}, {"colour": "red"}, {"step": -1}):
        with pytest.raises(ValidationError):
            manifest(**change)
    with pytest.raises(ValidationError):
        FileEntry(path="x", bytes=1, sha256="not a checksum")


def test_folder_and_root():
    stored = manifest(uri="s3://bucket/runs/r/rollout/step=000012")
    assert stored.folder == "r/rollout/step=000012"
    assert stored.root_uri == "s3://bucket/runs"


def test_digest_follows_the_content_and_not_the_circumstances():
    other_bytes = [FileEntry(path="part-00000.parquet", bytes=10, sha256="b" * 64, rows=3)]
    assert manifest().digest == manifest(seconds=9.0, uri="/elsewhere", finished_at="later").digest
    assert len({manifest().digest, manifest(files=other_bytes).digest, manifest(step=13).digest}) == 3


def test_a_manifest_of_64_parts_stays_below_16_kb():
    entries = [FileEntry(path=f"part-{i:05d}.parquet", bytes=10**9, sha256="a" * 64, rows=10**6) for i in range(64)]
    assert len(manifest(files=entries).model_dump_json()) < 16_000


def test_now_is_utc():
    assert utc_now().endswith("+00:00")
