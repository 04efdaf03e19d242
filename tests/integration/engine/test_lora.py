"""Adapters: gradients and updates equal those of transformers and torch in every layout, and the base stays as it is."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model

pytestmark = pytest.mark.integration

SP = dict(tp=2, sequence_parallel=True)

RUNS = {
    1: {"llama alone": dict(case="llama"), "qwen2 alone": dict(case="qwen2")},
    2: {
        "llama tp2": dict(case="llama", tp=2),
        "qwen2 tp2 sp": dict(case="qwen2", **SP),
        "qwen2 tied pp2": dict(case="qwen2-tied", pp=2),
        "llama dp2": dict(case="llama"),
        "qwen2 some tp2 sp": dict(case="qwen2", targets=["k_proj", "down_proj", "up_proj"], **SP),
        "qwen3moe tp2 sp ep2": dict(case="qwen3moe", ep=2, **SP),
    },
}
"""Ranks to name to the arguments of `make_actor` (data parallel size: what is left)."""

WANTED = [name for runs in RUNS.values() for name in runs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    cases = {run["case"] for runs in RUNS.values() for run in runs.values()}
    return {case: str(make_model(case, root / case)) for case in cases}


@pytest.fixture(scope="module")
def results(folders):
    found = {}
    for world, runs in RUNS.items():
        given = {
            name: {"folder": folders[run["case"]], **{key: run[key] for key in run if key != "case"}}
            for name, run in runs.items()
        }
        ranks = run_ranks("tests.integration.engine.lora_programs:training", world, {"runs": given})
        found |= {name: [rank[name] for rank in ranks] for name in runs}
    return found


@pytest.mark.parametrize("name", WANTED)
def test_three_updates_equal_transformers(results, name):
    for rank in results[name]:
        assert rank["before"] <= 1e-4
        assert rank["after"] <= 1e-4
        for norm, expected, loss, expected_loss in rank["norms"]:
            assert norm == pytest.approx(expected, rel=5e-6)
            assert loss == pytest.approx(expected_loss, rel=1e-6)


@pytest.mark.parametrize("name", WANTED)
def test_only_adapters_are_trained(results, name):
    for rank in results[name]:
        assert rank["base_changed"] == [] == rank["base_has_state"]
        assert rank["adapter_numbers"] <= rank["gradient_numbers"] <= rank["adapter_numbers"] + 2048  # padding
        assert rank["equal"] and rank["named"]


@pytest.mark.parametrize("name", WANTED)
def test_fresh_or_switched_off_adapters_leave_the_base(results, name):
    for rank in results[name]:
        assert rank["fresh"] <= 1e-4
        assert rank["switched_off"] <= 1e-4
        assert rank["moved"] > 0.1
