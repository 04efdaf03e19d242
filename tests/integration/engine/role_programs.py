"""Actor, critic, reference and reward model in one process, beside transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.layout import Layout
from engine.losses.config import LossConfig
from engine.megatron.cpu import megatron_device
from engine.megatron.update import Update
from engine.roles.actor import Actor
from engine.roles.annotation import annotate
from engine.roles.critic import SCORES, VALUES, Critic
from engine.weights.architecture import read_architecture
from tests.integration.engine.programs import (
    ADAM,
    batch,
    demonstrations,
    reference_logprobs,
    reference_optimizer,
    settings,
)


def roles(language_model: str, classifier: str, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """For each layout the largest differences from transformers, before and after training the critic (and the actor)."""
    return {str(sizes): _roles(language_model, classifier, dict(sizes)) for sizes in layouts}


def _roles(language_model: str, classifier: str, sizes: dict[str, Any]) -> dict[str, Any]:
    sequence_parallel = sizes.pop("sequence_parallel", False)
    layout = Layout(**sizes)
    common: dict[str, Any] = dict(sequence_parallel=sequence_parallel, dtype=torch.float32, device="cpu")
    text, score = read_architecture(language_model), read_architecture(classifier)
    actor = Actor(text, language_model, layout, optimizer=ADAM, **common)
    reference = Actor(text, language_model, layout, optimizer=None, **common)
    critic = Critic(score, classifier, layout, optimizer=ADAM, **common)
    reward = Critic(score, classifier, layout, optimizer=None, **common)
    fresh = Critic(text.with_score_head(), language_model, layout, optimizer=None, **common)
    prompts, responses = batch(99, text.vocabulary)
    theirs = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    with torch.no_grad():
        expected = reference_logprobs(frozen, prompts, responses)
    before = _gaps(critic, theirs, prompts, responses)
    norms = _train_beside_transformers(critic, theirs, text.vocabulary)
    Update(actor, demonstrations(0, text.vocabulary), settings(LossConfig(name="sft"))).run()
    return {
        "before": before,
        "after": _gaps(critic, theirs, prompts, responses),
        "norms": norms,
        "reward": _gaps(reward, AutoModelForSequenceClassification.from_pretrained(classifier), prompts, responses),
        "annotated": max(
            _annotation_gap(reference, prompts, responses, 0, "token", reference.logprobs(prompts, responses, 0.7)),
            _annotation_gap(critic, prompts, responses, VALUES, "token", critic.values(prompts, responses)),
            _annotation_gap(reward, prompts, responses, SCORES, "sequence", reward.scores(prompts, responses)),
        ),
        "fresh": fresh.values(prompts, responses).abs().max().item(),
        "reference": (reference.logprobs(prompts, responses, 1.0) - expected).abs().max().item(),
        "actor": (actor.logprobs(prompts, responses, 1.0) - expected).abs().max().item(),
    }


def _states(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' scores at the state before each response token, and at the end of each sequence."""
    values, scores = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        hidden = model.model(torch.tensor([prompt + response])).last_hidden_state[0]
        all_scores = model.score(hidden)[:, 0]
        values.append(all_scores[len(prompt) - 1 : -1])
        scores.append(all_scores[-1:])
    return torch.cat(values), torch.cat(scores)


def _gaps(critic: Critic, model: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
    with torch.no_grad():
        values, scores = _states(model, prompts, responses)
    return [
        (critic.values(prompts, responses) - values).abs().max().item(),
        (critic.scores(prompts, responses) - scores).abs().max().item(),
    ]


def _annotation_gap(
    model: Any, prompts: list[list[int]], responses: list[list[int]], output: int, each: str, expected: torch.Tensor
) -> float:
    """Shares of all ranks put together, from rows of at most 40 tokens, against one row of everything."""
    mine = annotate(model, prompts, responses, output=output, each=each, temperature=0.7, max_tokens=40)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {index: values for share in everyone for index, values in share.items()}
    assert sorted(whole) == list(range(len(prompts)))
    return (torch.tensor([x for i in sorted(whole) for x in whole[i]]) - expected).abs().max().item()


def _train_beside_transformers(critic: Critic, model: Any, vocabulary: int) -> list[tuple[float, float]]:
    """Squared errors of values against fixed targets, each sequence on one data parallel rank, two micro-batches a rank."""
    adam, norms = reference_optimizer(model), []
    for seed in range(3):
        prompts, responses = batch(seed, vocabulary)
        targets = [torch.linspace(-1, 1, len(response)) for response in responses]
        total = sum(map(len, responses))
        mine = list(range(critic.coordinates.dp, len(prompts), critic.layout.dp))
        parts = [mine[::2], mine[1::2]]

        def loss(number: int, values: torch.Tensor, _: torch.Tensor, parts: Any = parts, targets: Any = targets) -> Any:
            return ((values - torch.cat([targets[i] for i in parts[number]])) ** 2).sum() / total  # noqa: B023

        with megatron_device("cpu"):
            critic.zero_gradients()
            critic.run([([prompts[i] for i in p], [responses[i] for i in p]) for p in parts], 2, 1.0, loss)
            norm, _ = critic.optimizer_step()
        adam.zero_grad()
        ((_states(model, prompts, responses)[0] - torch.cat(targets)) ** 2).mean().backward()
        norms.append((norm, torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad).item()))
        adam.step()
    dist.barrier()
    return norms
