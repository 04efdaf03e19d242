"""The policy: the actor, which is trained and which vLLM reads from the same memory, and its frozen reference."""

from __future__ import annotations

from torch import Tensor

from engine.roles.model import Model, Tokens


class Actor(Model):
    """A language model. Without an optimizer it is a reference."""

    def logprobs(self, prompts: Tokens, responses: Tokens, temperature: float) -> Tensor:
        """Log-probabilities [response tokens] fp32 without gradient, on every rank of the model replica.

        Every replica must call it equally often when replicas share experts.
        """
        return self.evaluate([(prompts, responses)], 1, temperature, 0, [sum(map(len, responses))])[0]
