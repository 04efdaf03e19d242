"""Supervised fine-tuning, as a warm start: a step is one committed batch of demonstrations and the optimizer steps made of it."""

from __future__ import annotations

from prefect import flow

from flows.config import SFTConfig
from flows.evaluate import evaluate_when_due
from flows.run import RunSummary, open_run
from flows.weights import checkpoint_when_due, restore
from tasks.demonstration import demonstration
from tasks.update import update


@flow(name="sft")
def sft(config: SFTConfig) -> RunSummary:
    """Fine-tune a model on a data set's answers.

    Args:
        config: what to train, on what, and how. The same `experiment` goes on where it stopped.
    """
    with open_run(config, flow="sft") as run:
        restore(run)
        for step in run.remaining_steps():
            checkpoint_when_due(run, step)
            evaluate_when_due(run, step)

            run.begin(step, "update")
            demonstrations = demonstration(run, step)
            updated = update(run, step, demonstrations)
            run.progress.finished(step, [demonstrations, updated])

        checkpoint_when_due(run, run.next_step())
        evaluate_when_due(run, run.next_step())
        return run.summary()
