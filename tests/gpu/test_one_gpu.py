"""The engine on one GPU: bf16, CUDA graphs, a KV cache that sleeps. Run with `pytest -m gpu tests/gpu` on a machine with one."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDE = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    initializer_range=0.02,
)


RUNS = {"llama": True, "qwen2": True, "qwen3": True, "qwen2 moved": False}
"""Family, and whether training and generation share the memory of the weights (else they are moved, as between layouts)."""


@pytest.fixture(scope="module", params=RUNS)
def rank(request, tmp_path_factory):
    case, shared = request.param.split()[0], RUNS[request.param]
    folder = make_model(case, tmp_path_factory.mktemp(case), **WIDE)
    (result,) = run_ranks("tests.gpu.programs:alternate", 1, {"folder": str(folder), "shared": shared}, timeout_s=280)
    return result | {"one memory": shared}


def test_one_copy_of_the_weights(rank):
    assert rank["shared"] == rank["parameters"]
    assert rank["private"] < 0.02 * rank["parameters"]
    owners = rank["owners"]
    assert owners["training_weights"] == owners["gradients"] == 0
    assert (owners["generation_weights"] == 0) == rank["one memory"] == (owners["shared_weights"] > 0)


def test_rollout_logprobs_equal_the_actors_within_bf16_noise(rank):
    assert max(rank["gaps"]) <= 0.02  # mean absolute difference, before and after updates


def test_reserved_memory_does_not_grow(rank):
    first, *_, last = rank["reserved"]
    assert last <= first * 1.01


def test_fp32_training_equals_transformers(rank):
    assert rank["fp32_gap"] <= 2e-4
    for ours, theirs in rank["norms"]:
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_checkpoint_is_written_from_host_memory_while_training_goes_on(tmp_path):
    folder = make_model("qwen2", tmp_path / "model", **WIDE)
    (result,) = run_ranks("tests.gpu.programs:checkpoint", 1, {"folder": str(folder), "root": str(tmp_path / "runs")})
    assert result["different"] == [] and result["moved"] > 0
    assert result["gap"] <= 1e-4  # atomic additions on a GPU come in any order
