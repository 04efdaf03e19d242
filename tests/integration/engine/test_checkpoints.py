"""Checkpoints load into any layout exactly, are written while training goes on, and no wrong byte of them is used."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from engine.weights.export import export
from storage import checkpoints as stored
from storage.ledger import Ledger
from storage.manifest import Manifest
from tests.integration.engine.programs import batch, reference_logprobs
from tests.support.ranks import ROOT, run_ranks
from tests.support.tiny_models import make_model

pytestmark = pytest.mark.integration

PROGRAMS = "tests.integration.engine.checkpoint_programs"
MODELS = {
    "tied": ("qwen3", {}),
    "bias": ("qwen2", {}),
    "deep": ("qwen3", {"num_hidden_layers": 5}),
    "experts": ("qwen3moe", {}),
    "half": ("llama", {}),
}
HALF = {"dtype": "bfloat16"}
"""The weights are the rounded masters then."""

SAVED = {
    1: {"bias-one": dict(tp=1), "experts-one": dict(tp=1)},
    2: {
        "tied-tp2": dict(tp=2),
        "tied-pp2": dict(tp=1, pp=2),
        "bias-dp2": dict(tp=1),
        "experts-ep2": dict(tp=1, ep=2),
        "deep-vpp2": dict(tp=1, pp=2, vpp=2),
        "half-dp2": dict(tp=1, **HALF),
    },
    4: {"tied-tp2-pp2": dict(tp=2, pp=2), "experts-tp2-sp-ep4": dict(tp=2, sequence_parallel=True, ep=4)},
}
LOADED = {
    1: {"bias-dp2": "one", "experts-ep2": "one", "deep-vpp2": "one", "tied-tp2-pp2": "one", "experts-tp2-sp-ep4": "one",
        "half-dp2": "one half"},
    2: {
        "tied-tp2": "pp2", "tied-pp2": "tp2", "bias-one": "dp2", "experts-one": "ep2", "deep-vpp2": "tp2", "bias-dp2": "dp2",
        "tied-tp2-pp2": "dp2", "experts-tp2-sp-ep4": "etp2",
        "half-dp2": "dp2 half",
    },
}  # fmt: skip
"""Ranks to the saved run to the layout it is loaded into; some into what they were saved under."""

LAYOUTS = {
    "one": dict(tp=1), "dp2": dict(tp=1), "tp2": dict(tp=2), "pp2": dict(tp=1, pp=2), "ep2": dict(tp=1, ep=2),
    "etp2": dict(tp=1, etp=2), "one half": dict(tp=1, **HALF), "dp2 half": dict(tp=1, **HALF),
}  # fmt: skip
PAIRS = [(saved, f"{saved} into {layout} on {n}") for n, runs in LOADED.items() for saved, layout in runs.items()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: str(make_model(case, root / name, **more)) for name, (case, more) in MODELS.items()}


@pytest.fixture(scope="module")
def lives(folders, tmp_path_factory):
    """The folder with all states, and what the ranks that saved them say."""
    root, said = tmp_path_factory.mktemp("checkpoints"), {}
    for world, runs in SAVED.items():
        given = {name: {"folder": folders[name.split("-")[0]], **run} for name, run in runs.items()}
        said |= run_ranks(f"{PROGRAMS}:save", world, {"runs": given, "root": str(root)})[0]
    for world, runs in LOADED.items():
        given = {
            f"{saved} into {layout} on {world}": {"folder": folders[saved.split("-")[0]], "saved": saved, **LAYOUTS[layout]}
            for saved, layout in runs.items()
        }  # fmt: skip
        run_ranks(f"{PROGRAMS}:load", world, {"runs": given, "root": str(root)})
    return root, said


def states(lives, name, moment):
    return load_file(lives[0] / name / f"{moment}.safetensors")


@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=[loaded for _, loaded in PAIRS])
def test_the_state_is_equal_bit_for_bit_in_another_layout(lives, saved, loaded):
    before, after = states(lives, saved, "saved"), states(lives, loaded, "saved")
    assert before.keys() == after.keys() and before["optimizer_steps"] == after["optimizer_steps"] == 2
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert any(bool(tensor.any()) for name, tensor in after.items() if name.endswith("exp_avg_sq"))


SAME = ("bias-dp2 into dp2 on 2", "half-dp2 into dp2 half on 2")
NEXT = [(saved, loaded) for saved, loaded in PAIRS if "half" not in saved or loaded in SAME]
"""Half precision gradients differ by more than fp32's rounding where they are added up in another order."""


@pytest.mark.parametrize(("saved", "loaded"), NEXT, ids=[loaded for _, loaded in NEXT])
def test_the_next_update_is_equal(lives, saved, loaded):
    """To that of ranks which went on while their checkpoint was being written; bit for bit in the same layout."""
    straight, resumed = states(lives, saved, "next"), states(lives, loaded, "next")
    start = states(lives, saved, "saved")
    weights = [name for name in straight if name.endswith("|weight")]
    gaps = [(straight[name] - resumed[name]).abs().max().item() for name in weights]
    assert max(gaps) <= (0.0 if loaded in SAME else 1e-6)
    assert max((straight[name] - start[name]).abs().max().item() for name in weights) > 1e-4


@pytest.mark.parametrize("name", [name for runs in SAVED.values() for name in runs])
def test_each_number_is_stored_once(lives, name):
    """12 bytes a number, and the indexes: the weights are the masters, in half precision rounded."""
    state, folder = states(lives, name, "saved"), lives[0] / "runs" / name / "checkpoint" / "step=000002"
    shapes = {name: tensor.shape for name, tensor in state.items() if name.endswith("|param")}
    padded = sum(320 * s[1] if s[0] == 264 else s.numel() for s in shapes.values())
    numbers = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert sum(tensor.nbytes for file in numbers for tensor in file.values()) == 12 * padded
    assert len(numbers) == next(world for world, runs in SAVED.items() if name in runs), "every rank writes"


@pytest.mark.parametrize("name", ["tied-tp2-pp2", "deep-vpp2", "experts-tp2-sp-ep4", "bias-dp2"])
def test_the_export_is_the_model_that_was_saved(lives, folders, tmp_path, monkeypatch, name):
    from transformers import AutoModelForCausalLM

    root, said = lives
    monkeypatch.setattr("engine.weights.export.SHARD_BYTES", 300_000)
    hidden = shutil.move(folders[name.split("-")[0]], tmp_path / "gone")  # the folder that the run began from
    try:
        folder = export(str(root / "runs" / name), 2, tmp_path / "export")
    finally:
        shutil.move(hidden, folders[name.split("-")[0]])
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        expected = reference_logprobs(model, *batch(99, model.config.vocab_size))
    assert said[name]["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {file.name for file in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["export"], "nothing else is left"


def test_damage_is_named_on_all_ranks_and_changes_nothing(folders, tmp_path):
    ranks = run_ranks(f"{PROGRAMS}:damaged", 2, {"folder": folders["bias"], "root": str(tmp_path)})
    for rank in ranks:
        assert len(rank["messages"]) == 8 and rank["same"]
        for what, message in rank["messages"].items():
            assert what.split()[0] in message, message


def test_a_checkpoint_that_cannot_be_written_is_tried_twice_and_reported(folders, tmp_path):
    (rank,) = run_ranks(f"{PROGRAMS}:failing", 1, {"folder": folders["bias"], "root": str(tmp_path)})
    assert rank["for ever"]["state"] == "failed" and rank["for ever"]["again"] == "absent"
    assert len(rank["for ever"]["problems"]) == 2 and "No space left" in rank["for ever"]["problems"][0]
    assert rank["once"]["state"] == rank["once"]["again"] == "done"
    assert len(rank["once"]["problems"]) == 1 and rank["once"]["metrics"]["bytes"] > 0
    assert rank["abandoned"]["state"] == "absent"
    assert not [name for name in rank["files"] if "step=000000" in name], "nothing is left of what failed"
    assert not [name for name in rank["files"] if name.endswith(".tmp")]


def test_killed_while_writing_there_is_no_checkpoint_and_what_is_left_goes(folders, tmp_path):
    arguments = json.dumps({"folder": folders["bias"], "root": str(tmp_path)})
    environment = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-m", "tests.support.ranks", f"{PROGRAMS}:hold", str(tmp_path / "scratch"), arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        while not (tmp_path / "stuck").exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    ledger = Ledger(str(tmp_path), "run")
    left = ledger.store.files("run/checkpoint")
    assert stored.latest(ledger) is None and len(left) == 1 and left[0].endswith(".tmp")
    entry = ledger.store.size("run/checkpoint/" + left[0])
    assert entry is not None
    ledger.store.write("run/checkpoint/step=000004/actor-00000.safetensors", b"x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    ledger.publish(
        Manifest(run="run", step=4, stage="checkpoint", fingerprint="f", weight_version=4, started_at="", finished_at="",
                 files=[{"path": "actor-00000.safetensors", "bytes": 1, "sha256": digest}])
    )  # fmt: skip
    assert stored.retain(ledger, 1) == [2]
    assert [name for name in ledger.store.files("run/checkpoint") if "step=000002" in name] == []
