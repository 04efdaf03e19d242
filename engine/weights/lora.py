"""Low-rank adapters in the weight map: which linear layers can have them, and their rows. Importable without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.weights.families import Family, Row


@dataclass(frozen=True)
class LoRA:
    """W x becomes W x + alpha / rank * B A x (Hu et al., arXiv 2106.09685), with A [rank, in] and B [out, rank]; W is frozen.

    Attributes:
        targets: the linear layers that have adapters, by the last part of their Hugging Face names.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def linear_name(tensor: str) -> str:
    """The last part of a layer's name, from that of its weight: q_proj of self_attn.q_proj.weight."""
    return tensor.split(".")[-2]


def targets_of(family: Family) -> list[str]:
    """Linear layers that can have adapters, in the model's order: the divided matrices, so neither routers nor experts."""
    return [linear_name(name) for row in family.rows if _is_linear(row) for name, _ in row.huggingface]


def target_problems(family: Family, targets: Sequence[str]) -> list[str]:
    """Why these layers cannot have adapters; empty when they can."""
    possible = targets_of(family)
    experts = {linear_name(name) for row in family.rows if row.stacked for name, _ in row.huggingface}
    problems = []
    if not targets:
        problems.append("names no layer")
    if stacked := [name for name in targets if name in experts and name not in possible]:
        problems.append(f"{', '.join(stacked)}: experts cannot have adapters; possible are {', '.join(possible)}")
    if unknown := [name for name in targets if name not in possible and name not in experts]:
        problems.append(f"the model has no linear layer {', '.join(unknown)}; possible are {', '.join(possible)}")
    return problems


def adapter_rows(row: Row, lora: LoRA) -> Iterator[tuple[Row, Row] | None]:
    """A and B of each Hugging Face layer that a parameter is made of; None for one without adapters.

    Beside a matrix whose rows are divided, B is divided likewise and A is whole; beside one whose columns are, the reverse.
    """
    module, vllm = (name.removesuffix(".weight") for name in (row.megatron, row.vllm[0]))
    for tensor, (outputs, inputs) in row.huggingface if _is_linear(row) else ():
        name = linear_name(tensor)
        if name not in lora.targets:
            yield None
            continue

        def adapter(matrix: str, sizes: tuple[str, str], axis: int | None, name: str = name, at: str = tensor) -> Row:
            own, theirs = f"adapters.{name}.{matrix}", f"{at.removesuffix('.weight')}.{matrix}.weight"
            return Row(f"{module}.{own}", (f"{vllm}.{own}",), ((theirs, sizes),), axis)

        a = adapter("lora_A", ("rank", inputs), 1 if row.axis == 1 else None)
        b = adapter("lora_B", (outputs, "rank"), 0 if row.axis == 0 else None)
        yield a, b


def _is_linear(row: Row) -> bool:
    """A matrix of a layer that tensor parallel ranks divide, and not one of experts."""
    return row.axis is not None and not row.stacked and len(row.huggingface[0][1]) == 2
