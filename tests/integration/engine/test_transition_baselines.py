"""The baselines of the benchmark are right copies, and their figures are what another count says."""

import pytest
from safetensors.torch import load_file

from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCABULARY, make_model

pytestmark = pytest.mark.integration

MODES = {"onecopy", "full_gather", "full_gather, gradients released", "core_swap"}
PADDED = 320

RUNS = {
    "alias": dict(case="qwen2", world=1, train="tp1", generate="tp1"),
    "regroup": dict(case="qwen2", world=2, train="tp2", generate="tp1,dp2"),
    "experts": dict(case="qwen3moe", world=2, train="tp1,dp2,ep2", generate="tp2"),
}


def divided_in_training(name, tensor, train):
    """Whether each of two ranks has half of it."""
    if "ep2" in train:
        return ".experts." in name
    return "tp2" in train and "norm" not in name


def bytes_of(name, tensor):
    padded = PADDED / VOCABULARY if name in ("model.embed_tokens.weight", "lm_head.weight") else 1
    return round(tensor.nbytes * padded)


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    run = dict(RUNS[request.param])
    folder = make_model(run.pop("case"), tmp_path_factory.mktemp("model"))
    ranks = run_ranks(
        "tests.integration.engine.baseline_programs:baselines", run.pop("world"), {"folder": str(folder), **run}
    )
    tensors = load_file(folder / "model.safetensors")
    sizes = {name: bytes_of(name, tensor) for name, tensor in tensors.items()}
    missing = sum(size // 2 for name, size in sizes.items() if divided_in_training(name, tensors[name], run["train"]))
    return {"ranks": ranks, "model_bytes": sum(sizes.values()), "missing": missing, **run}


def rows_of(run, mode):
    return [row for rank in run["ranks"] for row in rank["rows"] if row["mode"] == mode]


def test_every_mode_leaves_the_slices_of_the_export_and_the_actor_as_it_was(run):
    for rank in run["ranks"]:
        assert rank["skipped"] == {} and {row["mode"] for row in rank["rows"]} == MODES
        assert not any(rank["wrong"].values()), rank["wrong"]
        assert rank["changed"] == []


def test_rollouts_of_every_mode_have_the_actors_logprobs(run):
    for mode in MODES:
        assert max(row["gap_max"] for row in rows_of(run, mode)) <= 1e-4, mode
    for rank in run["ranks"]:
        assert rank["control"] is None or rank["control"] <= 1e-4


def test_a_gather_receives_what_the_rank_does_not_have_of_the_whole_model(run):
    for mode in ("full_gather", "full_gather, gradients released"):
        assert {row["received_bytes"] for row in rows_of(run, mode)} == {run["missing"]}


def test_onecopy_moves_what_was_planned_and_nothing_in_equal_layouts(run):
    for rank in run["ranks"]:
        received = {row["received_bytes"] for row in rank["rows"] if row["mode"] == "onecopy"}
        assert received == {rank["planned"]}
    if run["train"] == run["generate"]:
        assert {row["received_bytes"] + row["copied_bytes"] for row in rows_of(run, "onecopy")} == {0}


def test_baselines_hold_the_weights_twice_and_onecopy_once(run):
    for mode in MODES:
        for row in rows_of(run, mode):
            weights = sum(size for owner, size in row["memory"].items() if owner.endswith("_weights"))
            redundant = weights - row["weight_bytes_in_use"]
            training = row["memory"]["training_weights"]
            if mode == "onecopy":
                assert redundant < 0.01 * weights  # alignment
            else:
                assert 0 < training <= redundant < 1.01 * training
            held = row["memory"]["gradients"]
            assert (held == 0) == (mode in ("onecopy", "full_gather, gradients released"))


def test_steps_and_memory_are_reported(run):
    for mode in ("full_gather", "full_gather, gradients released"):
        for row in rows_of(run, mode):
            steps = [row["phases_s"][step] for step in ("gather", "convert", "load")]
            assert 0 < sum(steps) <= row["phases_s"]["move"] <= row["into_generation_s"]
    for rank in run["ranks"]:
        assert all(update["before"] > 0 and update["after"] <= update["peak"] for update in rank["updates"])
        assert len(rank["updates"]) == 2
