"""A worker's whole life on a run folder: rollout, update, checkpoint, restore, export."""

import pyarrow.dataset
import pytest
import torch

from engine.weights.export import ExportError, export
from tests.integration.engine.programs import reference_logprobs
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model

pytestmark = pytest.mark.integration

PROGRAMS = "tests.integration.engine.session_programs"
LAYOUTS = {
    "tp1": ("qwen2", 1, {}, {}),
    "tp2": ("qwen3", 2, {"tensor_parallel_size": 2}, {}),
    "dp2": ("llama", 2, {"data_parallel_size": 2}, {}),
    "pp2 to tp2": ("qwen2-tied", 2, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
    "ep2 to tp2": ("qwen3moe", 2, {"data_parallel_size": 2, "expert_parallel_size": 2}, {"tensor_parallel_size": 2}),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def life(request, tmp_path_factory):
    case, world, parallel, generate = LAYOUTS[request.param]
    root = tmp_path_factory.mktemp(case)
    folder = make_model(case, root / "model")
    arguments = {"root": str(root / "runs"), "folder": str(folder), "parallel": parallel, "generate": generate}
    ranks = run_ranks(f"{PROGRAMS}:life", world, arguments)
    return root, ranks


def test_the_first_update_is_exactly_on_policy(life):
    for rank in life[1]:
        metrics = rank["metrics"]
        assert metrics["rollout_kl"] <= 1e-6
        assert metrics["approx_kl"] == 0.0
        assert metrics["clip_fraction"] == metrics["dual_clip_fraction"] == 0.0
        assert metrics["grad_norm"] > 0


def test_metrics_are_equal_on_all_ranks(life):
    of_a_rank = ("reshard/", "memory/", "tflops_per_device")
    ranks = [
        {k: v for k, v in rank["later"].items() if "second" not in k and not k.startswith(of_a_rank)}
        for rank in life[1]
    ]
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0]["optimizer_steps"] == 6 and ranks[0]["approx_kl"] > 0


def test_a_restored_checkpoint_is_the_state_that_was_saved(life):
    for rank in life[1]:
        assert rank["restored"] == rank["checkpoint"] != rank["after"]
        assert rank["described"]["weight_version"] == 1


def test_the_same_update_after_a_restore_gives_the_same_weights(life):
    for rank in life[1]:
        assert rank["after_again"] == rank["after"]


def test_rollouts_are_read_with_nothing_but_pyarrow(life):
    root, ranks = life
    table = pyarrow.dataset.dataset(root / "runs" / "run" / "rollout", partitioning="hive").to_table()
    assert table.num_rows == 2 * ranks[0]["rows"] == 40
    assert set(table["step"].to_pylist()) == {0, 1}
    assert len(set(table["sample_id"].to_pylist())) == 40
    lengths = [len(x) for x in table["response_tokens"].to_pylist()]
    assert lengths == [len(x) for x in table["rollout_logprobs"].to_pylist()]
    assert max(lengths) <= 12


def test_an_export_gives_transformers_and_vllm_the_same_model(life):
    from transformers import AutoModelForCausalLM

    root, _ = life
    run = str(root / "runs" / "run")
    folder = root / "export"
    export(run, 1, folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    table = pyarrow.dataset.dataset(root / "runs" / "run" / "rollout" / "step=000001").to_table().to_pylist()
    with torch.no_grad():  # version 1 generated step 1: its recorded log-probabilities are the exported model's
        found = reference_logprobs(model, [r["prompt_tokens"] for r in table], [r["response_tokens"] for r in table])
    recorded = torch.tensor([x for row in table for x in row["rollout_logprobs"]])
    assert (found - recorded).abs().max().item() <= 1e-4
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").is_file()
    with pytest.raises(ExportError, match="there are: 1"):
        export(run, 7, root / "other")
    with pytest.raises(ExportError, match="not empty"):
        export(run, 1, folder)


def test_greedy_outputs_of_an_export_equal_the_pools(tmp_path_factory):
    root = tmp_path_factory.mktemp("greedy")
    folder = make_model("qwen3", root / "model")
    run_ranks(
        f"{PROGRAMS}:life", 1, {"root": str(root / "runs"), "folder": str(folder), "parallel": {}, "generate": {}}
    )
    exported = str(export(str(root / "runs" / "run"), 1, root / "export"))
    arguments = {"folder": exported, "prompts": [[40, 41, 42], [60, 61], [100]], "count": 20}
    (plain,) = run_ranks(f"{PROGRAMS}:greedy_with_plain_vllm", 1, arguments)
    (ours,) = run_ranks(f"{PROGRAMS}:greedy_with_the_worker", 1, arguments)
    assert ours == plain


@pytest.mark.parametrize("parallel", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_a_critic_learns_is_saved_and_comes_back(tmp_path, parallel):
    world = parallel.get("tensor_parallel_size", 1)
    folder = make_model("qwen2", tmp_path / "model")
    arguments = {"root": str(tmp_path / "runs"), "folder": str(folder), "parallel": parallel}
    for rank in run_ranks(f"{PROGRAMS}:critic_life", world, arguments):
        assert set(rank["untrained"]) == {0.0}
        assert rank["restored"] == rank["checkpoint"] != rank["after"]
        assert rank["again"] == rank["after"] and rank["same_actor"]
        first, second, again = rank["metrics"]
        # returns are 0.5 everywhere: half the squared error begins at 0.125, and falls
        assert second["value_loss"] < first["value_loss"] <= 0.125
        assert again["value_loss"] == second["value_loss"]
        parts = {
            f"{role}-{n:05d}.{kind}"
            for role in ("actor", "critic")
            for n in range(world)
            for kind in ("json", "safetensors")
        }
        assert parts <= set(rank["files"]) and "critic.config.json" in rank["files"]
        assert abs(sum(rank["after"]) / len(rank["after"]) - 0.5) < 0.5
    _assert_exported_critic(export(str(tmp_path / "runs" / "run"), 1, tmp_path / "export", role="critic"), rank)


def _assert_exported_critic(folder, rank):
    """transformers' classifier on the exported files says what the critic said at the checkpoint."""
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.num_labels == 1
    table = pyarrow.dataset.dataset(folder.parent / "runs" / "run" / "rollout" / "step=000000").to_table().to_pylist()
    found = []
    with torch.no_grad():
        for row in sorted(table, key=lambda row: row["sample_id"]):
            hidden = model.model(torch.tensor([row["prompt_tokens"] + row["response_tokens"]])).last_hidden_state
            scores = model.score(hidden)[0, :, 0]
            found += scores[len(row["prompt_tokens"]) - 1 : -1].tolist()  # of the state before each token
    assert rank["checkpoint"] == pytest.approx(found, abs=1e-4)


def test_an_update_that_is_not_finite_changes_nothing_and_blocks_the_rank(tmp_path):
    folder = make_model("llama", tmp_path / "model")
    (rank,) = run_ranks(f"{PROGRAMS}:fail_in_update", 1, {"root": str(tmp_path / "runs"), "folder": str(folder)})
    assert "not applied" in rank["messages"][0]
    assert all("load or restore" in message for message in rank["messages"][1:])
    assert rank["unchanged"]
    assert rank["metrics"]["grad_norm"] > 0
