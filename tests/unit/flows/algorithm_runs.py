"""Runs with other algorithms, and what the fake pool's samples answer in them."""

from storage.datasets import read
from storage.ledger import Ledger

from .conftest import FakePool

_SAMPLE = FakePool._sample


def ledger_of(config):
    return Ledger(config.root, config.experiment)


def rows_of(config, stage, step):
    ledger = ledger_of(config)
    return read(ledger.store, ledger.get(stage, step)).to_pylist()


def changed(config, algorithm=None, reward=None, generation=None, **rest):
    """The configuration with other algorithm, reward and generation settings; short and never evaluated."""
    values = config.model_dump(mode="json")
    for key, part in (("algorithm", algorithm), ("reward", reward), ("generation", generation)):
        values[key].update(part or {})
    return type(config).model_validate({**values, "total_steps": 3, "evaluate_every": 0, **rest})


def answering(monkeypatch, text):
    """Every sample answers `text(prompt row, index)`, cut at the longest length if it has all 8 tokens."""

    def sample(self, prompt, index, version):
        answer = text(prompt, index)
        return {
            **_SAMPLE(self, prompt, index, version),
            "response_tokens": [1] * len(answer),
            "response_mask": [1] * len(answer),
            "rollout_logprobs": [-0.5] * len(answer),
            "finish_reason": "length" if len(answer) == 8 else "stop",
            "text": answer,
        }

    monkeypatch.setattr(FakePool, "_sample", sample)
