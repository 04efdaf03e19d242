"""Critic, reward model and reference: their numbers are transformers', trained or frozen, in every layout."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_classifier, make_model

pytestmark = pytest.mark.integration

RUNS = {
    "qwen2": ("qwen2", 1, [{}]),
    "llama": ("llama", 2, [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2}, {"pp": 2}]),
    "qwen3moe": ("qwen3moe", 2, [{"dp": 2, "ep": 2}]),
}


@pytest.fixture(scope="module", params=RUNS)
def ranks(request, tmp_path_factory):
    case, world, layouts = RUNS[request.param]
    folder = tmp_path_factory.mktemp(case)
    text, score = make_model(case, folder / "text"), make_classifier(case, folder / "score")
    arguments = {"language_model": str(text), "classifier": str(score), "layouts": layouts}
    return run_ranks("tests.integration.engine.role_programs:roles", world, arguments)


def each(ranks):
    return [(name, found) for rank in ranks for name, found in rank.items()]


def test_values_and_scores_are_those_of_transformers_before_and_after_training(ranks):
    for name, found in each(ranks):
        assert max(found["before"]) <= 1e-5, name
        assert max(found["after"]) <= 1e-4, name
        for ours, theirs in found["norms"]:
            assert ours == pytest.approx(theirs, rel=1e-5), name


def test_frozen_models_stay_what_they_are(ranks):
    for name, found in each(ranks):
        assert max(found["reward"]) <= 1e-5, name
        assert found["reference"] <= 1e-4 < found["actor"], name


def test_a_critic_that_begins_from_a_language_model_values_everything_alike(ranks):
    assert all(found["fresh"] == 0.0 for _, found in each(ranks))


def test_annotation_in_shares_and_small_rows_is_that_of_one_row(ranks):
    assert all(found["annotated"] <= 1e-5 for _, found in each(ranks))
