"""What each algorithm learns on the demo's task, from one warm start: `python -m infra.benchmarks.learning --out DIR [NAME …]`.

Every run has the demo's prompts, steps and model, so the curves differ by the algorithm alone. DIR gets `learning-NAME.json` for
each and, drawn from all that are there, `learning.svg`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from flows.config import PostTrainConfig, SFTConfig
from flows.demo import configured, export, make_model
from flows.environment import without_heartbeat
from infra.benchmarks.curve import curves

ALGORITHMS = {
    "ppo": ["algorithm.estimator=gae", "algorithm.gamma=1.0", "algorithm.lam=1.0", "critic.optimizer.lr=1e-3"],
    "grpo": ["algorithm.estimator=grpo"],
    "rloo": ["algorithm.estimator=rloo"],
    "reinforce++": ["algorithm.estimator=reinforce_plus_plus"],
    "gspo": ["algorithm.estimator=grpo", "loss.name=gspo", "loss.aggregation=seq-mean-token-mean"],
    "dapo": [
        "algorithm.estimator=grpo",
        "algorithm.dynamic_sampling=true",
        "algorithm.when_too_few=continue",
        "reward.overlong_buffer=2",
    ],
}
"""What each changes of the recipe demo-grpo.yaml, which clips higher at the top for all of them."""


def warm_start(folder: Path, seed: int) -> Path:
    """The demo's first half, as a Hugging Face folder."""
    from flows.sft import sft

    model = make_model(folder / "random", seed)
    run = sft(configured(SFTConfig, "demo-warm-start", f"{folder.name}-warm-start", model, seed))
    return export(run, folder / "warm-start")


def learn(name: str, start: Path, folder: Path, seed: int) -> dict[str, object]:
    """One run from the warm start: its curves and wall time."""
    from flows.post_train import post_train

    began = time.monotonic()
    settings = ["evaluate_every=5", *ALGORITHMS[name]]
    run = post_train(configured(PostTrainConfig, "demo-grpo", f"{folder.name}-{name}", start, seed, settings))
    return {"algorithm": name, "settings": settings, "seconds": time.monotonic() - began, **curves(Path(run.uri))}


def draw(folder: Path) -> None:
    """All curves that are in the folder, in one picture."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in ALGORITHMS:
        if (file := folder / f"learning-{name}.json").exists():
            points = json.loads(file.read_text())["curves"]["evaluation-reward"]["success"]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.axhline(1 / 3, color="grey", linestyle=":", linewidth=1)
    axes.annotate("blind guess", (0, 1 / 3), xytext=(2, 3), textcoords="offset points", color="grey", fontsize=8)
    axes.set(
        xlabel="step",
        ylabel="held-out accuracy, greedy",
        ylim=(0, 1.02),
        title="Remainders by three, from one warm start",
    )
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "learning.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", choices=[[], *ALGORITHMS], metavar="NAME")
    arguments = parser.parse_args()
    folder = Path("runs", "models", f"learning-{time.strftime('%m%d-%H%M%S')}").resolve()
    with without_heartbeat():
        start = warm_start(folder, arguments.seed)
        for name in arguments.names or ALGORITHMS:
            found = learn(name, start, folder, arguments.seed)
            (arguments.out / f"learning-{name}.json").write_text(json.dumps(found))
            draw(arguments.out)


if __name__ == "__main__":
    main()
