"""Megatron's forward, gradients and updates equal those of transformers and torch, in every layout.

A comparison with vLLM could not see a wrong gradient: both read the same, wrongly updated weights.
"""

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import CASES, make_model

pytestmark = pytest.mark.integration

EXPERTS = ["qwen3moe", "mixtral"]
DENSE = [case for case in CASES if case not in EXPERTS]
SP = dict(tp=2, sequence_parallel=True)

RUNS = {
    1: {f"{case} alone": dict(case=case, tp=1) for case in CASES},
    2: {
        **{f"{case} tp2": dict(case=case, tp=2) for case in DENSE},
        **{f"{case} dp2": dict(case=case, tp=1) for case in CASES},
        **{f"{case} tp2 sp": dict(case=case, **SP) for case in CASES},
        "llama pp2": dict(case="llama", tp=1, pp=2),
        "qwen3 tied pp2": dict(case="qwen3", tp=1, pp=2),
        "qwen2 uneven pp2": dict(case="qwen2", tp=1, pp=2, stage_layers=[1, 2]),
        "qwen3 tied pp2 vpp2": dict(case="qwen3 deep", tp=1, pp=2, vpp=2),
        "qwen3 uneven pp2 vpp2": dict(case="qwen3 deep", tp=1, pp=2, vpp=2, stage_layers=[1, 2, 1, 1]),
        "qwen3moe pp2": dict(case="qwen3moe", tp=1, pp=2),
        "qwen3moe dp2 ep2": dict(case="qwen3moe", tp=1, ep=2),
        "mixtral dp2 etp2": dict(case="mixtral", tp=1, etp=2),
        "qwen3moe tp2 sp ep2": dict(case="qwen3moe", ep=2, **SP),
        "qwen3moe tp2 sp etp1": dict(case="qwen3moe", etp=1, **SP),
    },
    4: {
        "qwen3 tied tp2 pp2 sp": dict(case="qwen3", pp=2, **SP),
        "qwen3 tied pp2 dp2 vpp2": dict(case="qwen3 deep", tp=1, pp=2, vpp=2),
        "qwen3 tied pp4": dict(case="qwen3 deep", tp=1, pp=4),
        "qwen3moe tp2 pp2 sp": dict(case="qwen3moe", pp=2, **SP),
        "qwen3moe pp2 dp2 ep2": dict(case="qwen3moe", tp=1, pp=2, ep=2),
        "qwen3moe tp2 dp2 sp ep4": dict(case="qwen3moe", ep=4, **SP),
        "qwen3moe tp2 dp2 sp ep2 etp2": dict(case="qwen3moe", ep=2, etp=2, **SP),
        "mixtral tp2 pp2 sp ep2": dict(case="mixtral", pp=2, ep=2, **SP),
    },
}
"""Ranks to name to the arguments of `make_actor` (data parallel size: what is left)."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {case: str(make_model(case, root / case)) for case in CASES}
    made["qwen3 deep"] = str(make_model("qwen3", root / "deep", num_hidden_layers=5))
    return made


def arguments_of(run, folders):
    return {"folder": folders[run["case"]], **{key: value for key, value in run.items() if key != "case"}}


@pytest.fixture(scope="module")
def results(folders):
    """All runs in one process group a world size: starting ranks costs more than training on them."""
    found = {}
    for world, runs in RUNS.items():
        given = {name: arguments_of(run, folders) for name, run in runs.items()}
        ranks = run_ranks("tests.integration.engine.programs:training", world, {"runs": given})
        found |= {name: [rank[name] for rank in ranks] for name in runs}
    return found


WANTED = [name for runs in RUNS.values() for name in runs]


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
    assert max(logits for rank in results[name] for logits, _ in rank["logits"]) > 0  # a last stage did compare


@pytest.mark.parametrize("name", WANTED)
def test_padded_vocabulary_stays_zero_and_copies_stay_equal(results, name):
    for rank in results[name]:
        assert rank["padding"] == 0.0
        assert rank["equal"]


@pytest.mark.parametrize("name", WANTED)
def test_every_parameter_has_its_name_and_stays_where_it_is(results, name):
    for rank in results[name]:
        assert rank["named"] and rank["in_place"]


@pytest.mark.parametrize("name", WANTED)
def test_coordinates_are_those_of_megatron(results, name):
    for rank in results[name]:
        ours, theirs = rank["places"]
        assert ours == theirs


AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
UPDATES = {  # case to ranks to layouts
    "qwen3": {
        1: {"alone": dict(tp=1)},
        2: {"tp2": dict(tp=2), "dp2": dict(tp=1), "tp2,sp": SP, "pp2": dict(tp=1, pp=2)},
    },
    "qwen3 deep": {
        1: {"alone": dict(tp=1)},
        4: {"tp2,pp2,sp": dict(pp=2, **SP), "dp2,pp2,vpp2": dict(tp=1, pp=2, vpp=2)},
    },
    "qwen3moe": {
        1: {"alone": dict(tp=1)},
        4: {"dp2,pp2,ep2": dict(tp=1, pp=2, ep=2), "tp2,dp2,sp,ep4": dict(ep=4, **SP)},
    },
}


@pytest.fixture(scope="module")
def updates(folders):
    """Case and aggregation to every way in which the same update was cut; all aggregations for one case only."""
    runs: dict[tuple[str, str], list[dict]] = {}
    for world in (1, 2, 4):
        given = {
            f"{case}|{name}": {
                "arguments": {"folder": folders[case], **layout},
                "aggregations": AGGREGATIONS if case == "qwen3" else AGGREGATIONS[1:2],
                "budgets": [16, 64, 4096] if case == "qwen3" else [16, 64],
            }
            for case, worlds in UPDATES.items()
            for name, layout in worlds.get(world, {}).items()
        }
        for rank in run_ranks("tests.integration.engine.programs:policy_updates", world, {"runs": given}):
            for name, results in rank.items():
                for result in results:
                    runs.setdefault((name.split("|")[0], result["aggregation"]), []).append(result)
    return runs


@pytest.mark.parametrize(
    ("case", "aggregation", "ways"),
    [
        *[("qwen3", name, 3 * 9) for name in AGGREGATIONS],
        ("qwen3 deep", AGGREGATIONS[1], 18),
        ("qwen3moe", AGGREGATIONS[1], 18),
    ],
)
def test_a_policy_update_does_not_depend_on_how_it_is_cut(updates, case, aggregation, ways):
    first, *others = updates[case, aggregation]
    assert len(others) == ways - 1  # budgets x ranks of all layouts, less the first
    assert first["metrics"]["optimizer_steps"] == 4
    assert first["metrics"]["clip_fraction"] + first["metrics"]["dual_clip_fraction"] > 0
    for other in others:
        assert other["metrics"] == pytest.approx(first["metrics"], rel=1e-4, abs=1e-6)
        assert other["logprobs"] == pytest.approx(first["logprobs"], abs=1e-4)


def test_a_rank_without_a_sample_takes_part(folders):
    worlds = {
        1: {case: dict(case=case, tp=1) for case in ("qwen2", "qwen3 deep", "qwen3moe")},
        2: {"qwen2": dict(case="qwen2", tp=1), "qwen3moe": dict(case="qwen3moe", tp=1, ep=2)},
        4: {"qwen2": dict(case="qwen2", tp=1, pp=2), "qwen3 deep": dict(case="qwen3 deep", tp=1, pp=2, vpp=2)},
    }
    alone: dict[str, dict] = {}
    for world, runs in worlds.items():
        given = {name: arguments_of(run, folders) for name, run in runs.items()}
        for rank in run_ranks("tests.integration.engine.programs:one_sample", world, {"runs": given}, timeout_s=120):
            for name, metrics in rank.items():
                assert metrics == pytest.approx(alone.setdefault(name, metrics), rel=1e-4, abs=1e-6)
