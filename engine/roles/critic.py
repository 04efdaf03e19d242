"""A model with a score head: the critic, which is trained, and a reward model, which need not be."""

from __future__ import annotations

from torch import Tensor

from engine.roles.model import Model, Tokens


class Critic(Model):
    """One number a token; `arch` must have one label (`Architecture.with_score_head`)."""

    def values(self, prompts: Tokens, responses: Tokens) -> Tensor:
        """[response tokens] fp32 without gradient: of the state in which each token was chosen, so without the token itself."""
        return self.evaluate(prompts, responses, 1.0, 0, sum(map(len, responses)))

    def scores(self, prompts: Tokens, responses: Tokens) -> Tensor:
        """[sequences] fp32 without gradient: at the last token of prompt and response together, as transformers' classifiers."""
        return self.evaluate(prompts, responses, 1.0, 1, len(prompts))
