"""`onecopy demo`: a small model, a warm start, GRPO, and a look at what came of it, with the parts that real runs use."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from flows.config import PostTrainConfig, SFTConfig
from flows.environment import without_heartbeat
from flows.loading import load_config
from flows.run import RunSummary
from storage.ledger import Ledger

Config = TypeVar("Config", PostTrainConfig, SFTConfig)

MODEL: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=16, hidden_size=128, intermediate_size=256,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, hidden_act="silu", initializer_range=0.06,
    eos_token_id=0, pad_token_id=None, bos_token_id=None, dtype="float32",
)  # fmt: skip
"""A decoder of 0.33 million parameters; its vocabulary is the task's alphabet."""

SUBPROCESS_TIMEOUT_S = 300


def main(seed: int) -> None:
    """Run the demo and print what came of it; the last line is for programs.

    Raises:
        ConfigError, PoolError, StorageError: as the flows do.
        subprocess.CalledProcessError: the model could not be made or exported.
    """
    started = time.monotonic()
    name = f"demo-{time.strftime('%m%d-%H%M%S')}-seed{seed}"
    folder = Path("runs", "models", name).resolve()
    _say("1/3 a small decoder with random weights")
    model = make_model(folder / "random", seed)
    from flows.post_train import post_train
    from flows.sft import sft

    with without_heartbeat():
        _say("2/3 warm start: supervised, on demonstrations that mostly guess")
        warm = sft(configured(SFTConfig, "demo-warm-start", f"{name}-warm-start", model, seed))
        start = export(warm, folder / "warm-start")
        _say("3/3 GRPO: the only reward is a right remainder")
        tuned = post_train(configured(PostTrainConfig, "demo-grpo", name, start, seed))
    final = export(tuned, folder / "trained")
    print(_report(tuned, final))
    before, after = tuned.accuracy_first, tuned.accuracy_last
    print(
        f"demo: accuracy {before:.2f} -> {after:.2f} in {time.monotonic() - started:.0f} s, run {tuned.run}", flush=True
    )


def make_model(folder: Path, seed: int) -> Path:
    """Random weights, settings and a character tokenizer, as a Hugging Face folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL, indent=2), encoding="utf-8")
    _python("engine.weights.initialise", folder / "config.json", folder, seed)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from tasks.remainder import ALPHABET

    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(["<end>", "<unknown>", *ALPHABET])}, "<unknown>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>", "<unknown>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unknown>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def export(run: RunSummary, target: Path) -> Path:
    """The run's last version as a Hugging Face folder."""
    _python("engine.weights.export", "--run", run.uri, "--step", run.steps, "--to", target)
    return target


def configured(
    config: type[Config], recipe: str, name: str, model: Path, seed: int, settings: Iterable[str] = ()
) -> Config:
    """A recipe of the demo for a run of this name from this model, with further `key=value` settings."""
    with resources.as_file(resources.files("flows.recipes") / f"{recipe}.yaml") as file:
        return load_config(config, str(file), [f"experiment={name}", f"model.path={model}", f"seed={seed}", *settings])


def _python(module: str, *arguments: object) -> None:
    """Run a module that needs torch, which this process stays without."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SUBPROCESS_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{module} failed: {done.stderr.strip()[-500:]}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(run: RunSummary, final: Path) -> str:
    last = run.steps - 1
    ledger = Ledger(str(Path(run.uri).parent), run.run)
    working = [_metric(ledger, step, "component/working") for step in (0, last)]
    record = ledger.record()
    pool = record.config["pool"]["name"] if record is not None else "default"
    return "\n".join(
        [
            "",
            f"reward            {run.reward_first:.2f} -> {run.reward_last:.2f}   (first and last step of GRPO)",
            f"held-out accuracy {run.accuracy_first:.2f} -> {run.accuracy_last:.2f}   (300 numbers it never saw, greedy)",
            f"long divisions    {working[0]:.2f} -> {working[1]:.2f}   (share of answers: it found out that writing one pays)",
            f"the run is in     {run.uri}",
            f"the model is in   {final}",
            "look at it:",
            f"  onecopy runs show {run.run}",
            f"  onecopy rollouts show {run.run} --step 0 --best 3 --worst 3",
            f"  onecopy rollouts show {run.run} --step {last} --best 3 --worst 3",
            f"  python -c \"import pyarrow.dataset as d; print(d.dataset('{run.uri}/rollout', partitioning='hive').head(3))\"",
            f"the pool is still up, so that the next demo starts at once; `onecopy pool down --name {pool}` stops it",
            "",
        ]
    )


def _metric(ledger: Ledger, step: int, name: str) -> float:
    manifest = ledger.get("reward", step)
    return float("nan") if manifest is None else manifest.metrics[name]
