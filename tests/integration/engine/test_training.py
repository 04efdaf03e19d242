"""Megatron's forward, gradients and updates equal those of transformers and torch, in every layout.

A comparison with vLLM could not see a wrong gradient: both read the same, wrongly updated weights.
"""

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import CASES, make_model

pytestmark = pytest.mark.integration

DENSE = [case for case in CASES if case != "qwen3moe"]
LAYOUTS = {
    "tp1 dp1": (1, (1, False)),
    "tp2 dp1": (2, (2, False)),
    "tp1 dp2": (2, (1, False)),
    "tp2 dp1 sp": (2, (2, True)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {case: str(make_model(case, root / case)) for case in CASES}


@pytest.fixture(scope="module")
def results(folders):
    """All cases in one process group a world size: starting ranks costs more than training on them."""
    dense = {case: folders[case] for case in DENSE}
    moe = {"qwen3moe": folders["qwen3moe"]}
    found = {}
    for world, cases, layouts in (
        (1, dense | moe, [(1, False)]),
        (2, dense, [(2, False), (1, False), (2, True)]),
        (2, moe, [(1, False), (2, True)]),
    ):
        ranks = run_ranks(
            "tests.integration.engine.programs:training", world, {"cases": cases, "layouts": [list(x) for x in layouts]}
        )
        for name in ranks[0]:
            found[name] = [rank[name] for rank in ranks]
    return found


WANTED = [f"{case} {layout}" for case in DENSE for layout in LAYOUTS] + [
    f"qwen3moe {layout}" for layout in ("tp1 dp1", "tp1 dp2", "tp2 dp1 sp")
]


@pytest.mark.parametrize("name", WANTED)
def test_three_updates_equal_transformers(results, name):
    for rank in results[name]:
        assert rank["before"] <= 1e-4
        assert rank["after"] <= 1e-4
        for logits, entropies in rank["logits"]:
            assert logits <= 1e-4
            assert entropies <= 1e-4
        for norm, expected, loss, expected_loss in rank["norms"]:
            assert norm == pytest.approx(expected, rel=2e-6)
            assert loss == pytest.approx(expected_loss, rel=1e-6)


@pytest.mark.parametrize("name", WANTED)
def test_padded_vocabulary_stays_zero_and_replicas_stay_equal(results, name):
    for rank in results[name]:
        assert rank["padding"] == 0.0
        assert rank["equal"]


@pytest.fixture(scope="module")
def policy_updates(folders):
    """Aggregation to every way in which the same update was cut."""
    runs: dict[str, list[dict]] = {}
    for world, layouts in ((1, [[1, False]]), (2, [[2, False], [1, False], [2, True]])):
        arguments = {"folder": folders["qwen3"], "layouts": layouts}
        for rank in run_ranks("tests.integration.engine.programs:policy_updates", world, arguments):
            for name, result in rank.items():
                runs.setdefault(name.split()[0], []).append(result)
    return runs


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_policy_update_does_not_depend_on_how_it_is_cut(policy_updates, aggregation):
    first, *others = policy_updates[aggregation]
    assert len(others) == 20  # 3 budgets x (1 rank; 2 ranks each of TP, DP, TP with sequence parallel), less the first
    assert first["metrics"]["optimizer_steps"] == 4
    assert first["metrics"]["clip_fraction"] + first["metrics"]["dual_clip_fraction"] > 0
    for other in others:
        assert other["metrics"] == pytest.approx(first["metrics"], rel=1e-4, abs=1e-6)
        assert other["logprobs"] == pytest.approx(first["logprobs"], abs=1e-4)


def test_a_rank_without_a_sample_takes_part(folders):
    (alone,) = run_ranks("tests.integration.engine.programs:one_sample", 1, {"folder": folders["qwen2"]})
    for rank in run_ranks(
        "tests.integration.engine.programs:one_sample", 2, {"folder": folders["qwen2"]}, timeout_s=90
    ):
        assert rank == pytest.approx(alone, rel=1e-4, abs=1e-6)
