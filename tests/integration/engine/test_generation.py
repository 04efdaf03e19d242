"""vLLM on the actor's memory: its log-probabilities equal the actor's before and after updates, and no address changes."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCABULARY, make_model

pytestmark = pytest.mark.integration

RUNS = {
    "qwen2 tp1": dict(case="qwen2", world=1, tp=1, alternations=10),
    "llama dp2": dict(case="llama", world=2, tp=1),
    "qwen3 tied tp2 sp": dict(case="qwen3", world=2, tp=2, sequence_parallel=True),
    "qwen3moe tp2 sp": dict(case="qwen3moe", world=2, tp=2, sequence_parallel=True),
}


@pytest.fixture(scope="module", params=RUNS)
def ranks(request, tmp_path_factory):
    run = dict(RUNS[request.param])
    world, case = run.pop("world"), run.pop("case")
    folder = make_model(case, tmp_path_factory.mktemp(case))
    return run_ranks("tests.integration.engine.programs:generation", world, {"folder": str(folder), **run})


def test_logprobs_equal_the_actors_before_and_after_updates(ranks):
    for rank in ranks:
        for when in ("first", "last"):
            for kind in ("greedy", "sampled"):
                # greedy: vLLM's processed log-probabilities of a greedy sample are those of temperature 1
                assert rank[when][kind]["gap"] <= 1e-4, (when, kind)


def test_sampling_is_reproducible_and_samples_of_a_prompt_differ(ranks):
    for rank in ranks:
        for when in ("first", "last"):
            assert rank[when]["greedy"]["repeats"] and rank[when]["sampled"]["repeats"]
            assert rank[when]["sampled"]["different"] == 8
            assert rank[when]["greedy"]["different"] <= 4


def test_updates_show_in_generation(ranks):
    for rank in ranks:
        assert rank["first"]["greedy"]["tokens"] != rank["last"]["greedy"]["tokens"]


def test_padded_tokens_are_never_sampled(ranks):
    for rank in ranks:
        assert (
            max(rank[when][kind]["highest"] for when in ("first", "last") for kind in ("greedy", "sampled"))
            < VOCABULARY
        )


def test_every_parameter_is_shared_and_memory_does_not_grow(ranks):
    for rank in ranks:
        assert rank["shared"] == rank["parameters"]
        assert rank["private"] < 0.02 * rank["parameters"]
        assert rank["memory"][-1] - rank["memory"][0] < 40  # MiB; caches of the first rounds, no copy a round
