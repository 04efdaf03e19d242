"""A model with a score head: the critic, which is trained, and a reward model, which need not be."""

from __future__ import annotations

from torch import Tensor

from engine.roles.model import Model, Tokens

VALUES, SCORES = 0, 1
"""A critic's two outputs: see `SharedModel.outputs`."""


class Critic(Model):
    """One number a token; `arch` must have one label (`Architecture.with_score_head`)."""

    def values(self, prompts: Tokens, responses: Tokens) -> Tensor:
        """[response tokens] fp32 without gradient: of the state in which each token was chosen, so without the token itself."""
        return self.evaluate([(prompts, responses)], 1, 1.0, VALUES, [sum(map(len, responses))])[0]

    def scores(self, prompts: Tokens, responses: Tokens) -> Tensor:
        """[sequences] fp32 without gradient: at the last token of prompt and response together, as transformers' classifiers."""
        return self.evaluate([(prompts, responses)], 1, 1.0, SCORES, [len(prompts)])[0]
