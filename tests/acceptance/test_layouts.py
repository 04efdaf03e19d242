"""A run whose generation layout is not its training layout, as a user starts it."""

from __future__ import annotations

import json

POOL = "two"
LAYOUTS = {
    "parallel": {"pipeline_parallel_size": 2},
    "pool": {"name": POOL},
}


def metrics(run, stage, step):
    return json.loads((run / stage / f"step={step:06d}" / "_manifest.json").read_text())["metrics"]


def test_a_run_with_pipeline_training_and_tensor_parallel_generation(onecopy, recipe, place):
    settings = recipe("layouts", **LAYOUTS)
    arguments = ("--set", "generation.tensor_parallel_size=2")
    try:
        done = onecopy("post-train", "--config", settings, *arguments)
        assert done.returncode == 0, done.stderr
        run = place / "runs" / "layouts"
        for step in range(3):
            rollout, update = metrics(run, "rollout", step), metrics(run, "update", step)
            assert update["rollout_logprob_gap"] <= 1e-4  # the rollout was the actor's own, in the other layout
            if step:  # before step 0 the engines were built in the generation layout
                assert rollout["reshard/into_generation/received_node_bytes"] > 0
            assert update["reshard/into_training/received_node_bytes"] > 0
            assert rollout["memory/training_weights_bytes"] == 0 == update["memory/generation_weights_bytes"]
        exported = onecopy("export", "layouts", "--step", 3, "--to", place / "layouts-out", "--root", place / "runs")
        assert exported.returncode == 0, exported.stderr
    finally:
        onecopy("pool", "down", "--name", POOL)


def test_a_run_goes_on_in_another_layout_from_the_newest_checkpoint_that_is_not_damaged(onecopy, recipe, place):
    settings, run = recipe("moved", checkpoint_every=1, evaluate_every=0), place / "runs" / "moved"
    done = onecopy("post-train", "--config", settings)
    assert done.returncode == 0, done.stderr
    assert onecopy("pool", "down").returncode == 0
    damaged = run / "checkpoint" / "step=000003" / "actor-00000.safetensors"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    changes = ("total_steps=4", "parallel.pipeline_parallel_size=2", f"pool.name={POOL}")
    try:
        done = onecopy("post-train", "--config", settings, *(part for change in changes for part in ("--set", change)))
    finally:
        onecopy("pool", "down", "--name", POOL)
    assert done.returncode == 0, done.stderr
    assert "version 3 is damaged and was set aside" in done.stderr and str(damaged) in done.stderr
    assert "loaded the checkpoint of version 2 and replayed 1 updates" in done.stderr
    assert metrics(run, "update", 3)["rollout_logprob_gap"] <= 1e-4
    saved = {path.name for path in (run / "checkpoint" / "step=000004").glob("*.safetensors")}
    assert saved == {"actor-00000.safetensors", "actor-00001.safetensors"}


def test_layouts_that_cannot_be_are_refused_before_anything_starts(onecopy, recipe, place):
    wrong = {
        "parallel": {"pipeline_parallel_size": 4, "expert_parallel_size": 2, "virtual_pipeline_size": 2},
        "pool": {"name": POOL},
    }
    done = onecopy(
        "post-train", "--config", recipe("impossible", **wrong), "--set", "generation.tensor_parallel_size=3"
    )
    assert done.returncode == 2
    for line in (
        "3 layers cannot be divided over 8 pipeline chunks",
        "expert_parallel_size 2 needs a mixture of experts, which qwen2 is not",
        "generation.tensor_parallel_size 3 x generation.pipeline_parallel_size 1 does not divide the 4 devices",
    ):
        assert line in done.stderr, done.stderr
    assert not (place / "runs" / "impossible").exists()
