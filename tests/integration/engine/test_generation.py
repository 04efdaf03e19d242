"""vLLM on the actor's weights, in its own layout: log-probabilities and every weight agree before and after updates."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCABULARY, make_model

pytestmark = pytest.mark.integration


def tp(size):
    return {"tensor_parallel_size": size}


def pp(size):
    return {"pipeline_parallel_size": size}


def dp(size):
    return {"data_parallel_size": size}


SP = {"sequence_parallel": True}
LORA = {"rank": 8, "alpha": 64}

RUNS = {
    # equal layouts: one memory
    "qwen2": dict(case="qwen2", world=1, parallel={}, alternations=10),
    "llama dp2": dict(case="llama", world=2, parallel=dp(2)),
    "qwen3moe tp2": dict(case="qwen3moe", world=2, parallel=tp(2) | SP),
    "mixtral": dict(case="mixtral", world=1, parallel={}),
    # regroup, and the way back from it
    "qwen3 tp2 to tp1 x 2": dict(case="qwen3", world=2, parallel=tp(2) | SP, generate=tp(1)),
    "llama pp2 to tp1 x 2": dict(case="llama", world=2, parallel=pp(2), generate=tp(1)),
    "qwen2 dp2 to tp2, one key-value head": dict(
        case="qwen2", world=2, parallel=dp(2), generate=tp(2), model={"num_key_value_heads": 1}
    ),
    "qwen3 dp2 to pp2": dict(case="qwen3", world=2, parallel=dp(2), generate=tp(1) | pp(2)),
    # move
    "qwen2 tied pp2 to tp2": dict(case="qwen2-tied", world=2, parallel=pp(2), generate=tp(2)),
    "qwen3moe ep2 to tp2": dict(case="qwen3moe", world=2, parallel=dp(2) | {"expert_parallel_size": 2}, generate=tp(2)),
    # adapters: the base is neither merged nor changed
    "llama lora": dict(case="llama", world=1, parallel={}, lora=LORA),
    "qwen2 lora tp2 to tp1 x 2": dict(case="qwen2", world=2, parallel=tp(2) | SP, generate=tp(1), lora=LORA),
    "qwen2 tp2 pp2 to tp2 x 2": dict(case="qwen2", world=4, parallel=tp(2) | pp(2) | SP, generate=tp(2)),
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def ranks(request, tmp_path_factory):
    run = dict(RUNS[request.param])
    world, case, model = run.pop("world"), run.pop("case"), run.pop("model", {})
    folder = make_model(case, tmp_path_factory.mktemp(case), **model)
    return run_ranks("tests.integration.engine.generation_programs:generation", world, {"folder": str(folder), **run})


def test_logprobs_equal_the_actors_before_and_after_updates(ranks):
    for rank in ranks:
        for when in ("first", "last"):
            for kind in ("greedy", "sampled"):
                # greedy: vLLM's processed log-probabilities of a greedy sample are those of temperature 1
                assert rank[when][kind]["gap"] <= 1e-4, (when, kind)


def test_every_parameter_is_the_slice_of_the_export_and_comes_back_unchanged(ranks):
    for rank in ranks:
        assert rank["wrong"] == [] and rank["changed"] == []


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


def test_one_copy_of_the_weights_at_any_time(ranks):
    """In generation the generation shard and no gradients, in training the training shard; alignment of tensors is the rest."""
    for rank in ranks:
        generating, training = rank["in_generation"], rank["in_training"]
        assert rank["first"]["shared"] == rank["last"]["shared"] == rank["generate_bytes"]
        in_generation = generating["generation_weights"] + generating["shared_weights"]
        assert rank["generate_bytes"] <= in_generation < 1.01 * rank["generate_bytes"]
        assert generating["training_weights"] == generating["gradients"] == 0
        in_training = training["training_weights"] + training["shared_weights"]
        assert rank["train_bytes"] <= in_training < 1.01 * rank["train_bytes"]
        assert training["generation_weights"] == 0 < training["gradients"]
        assert rank["private"] < 0.02 * rank["generate_bytes"]


def test_the_optimizer_state_waits_in_host_memory_when_it_is_sent_there(ranks):
    """That it comes back as it was is part of what must be unchanged above."""
    for rank in ranks:
        there, away = rank["in_training"]["optimizer"], rank["away"]
        assert rank["in_generation"]["optimizer"] == there == away["optimizer_on_host"] > 0
        assert away["optimizer"] == 0 == rank["in_training"]["optimizer_on_host"]


def test_equal_layouts_share_memory_and_others_do_not(ranks, request):
    equal = "to" not in request.node.callspec.params["ranks"].split()
    for rank in ranks:
        assert rank["resident"] == equal
        assert (rank["in_generation"]["shared_weights"] > 0) == equal


def test_memory_does_not_grow(ranks):
    for rank in ranks:
        assert (
            rank["memory"][-1] - rank["memory"][0] < 8
        )  # MiB; a copy a round would be 15 in the run of ten alternations
