"""The losses by name, and a user's own, as far as they can be told without torch."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, WithJsonSchema


class LossDescription(NamedTuple):
    """What there is to say about a loss without running it.

    Attributes:
        summary, source: for `onecopy algorithms`.
        ratio: it contains pi / pi_old; in bypass mode that is the importance weight already.
        sequence: one number a sequence, so that only the mean over sequences is its paper's objective.
        statistics: it chooses tokens by what the whole mini-batch looks like, which takes a forward pass more.
    """

    summary: str
    source: str
    ratio: bool = True
    sequence: bool = False
    statistics: bool = False


DESCRIPTIONS: dict[str, LossDescription] = {
    "ppo": LossDescription(
        "clipped surrogate; clip below and above may differ, dual clip",
        "arXiv 1707.06347 eq. 7; dual clip arXiv 1912.09729 eq. 5; asymmetric clip (DAPO) arXiv 2503.14476 eq. 8",
    ),
    "gspo": LossDescription(
        "clip of the sequence's geometric mean ratio", "arXiv 2507.18071 eq. 5, 7, 13, 14 (GSPO-token)", sequence=True
    ),
    "gmpo": LossDescription(
        "geometric mean of ratios that are clipped token by token", "arXiv 2507.20673 section 3", sequence=True
    ),
    "cispo": LossDescription("REINFORCE weighted by the clipped ratio", "arXiv 2506.13585 eq. 4, 5"),
    "sapo": LossDescription("a soft gate of the ratio in place of the clip", "arXiv 2511.20347 section 3"),
    "clip_cov": LossDescription(
        "ppo without the gradient of some tokens of high covariance",
        "arXiv 2505.22617 section 4 (Clip-Cov)",
        statistics=True,
    ),
    "kl_cov": LossDescription(
        "unclipped surrogate with a penalty on the tokens of highest covariance",
        "arXiv 2505.22617 section 4 (KL-Cov)",
        statistics=True,
    ),
    "dppo_tv": LossDescription(
        "stops tokens whose probability moved too far (total variation)", "arXiv 2602.04879 (binary TV)"
    ),
    "dppo_kl": LossDescription(
        "stops tokens whose probability moved too far (KL divergence)", "arXiv 2602.04879 (binary KL)"
    ),
    "dro": LossDescription(
        "policy gradient with a quadratic penalty on the log-ratio",
        "arXiv 2405.19107 section 3; arXiv 2501.12599 section 2.3",
        ratio=False,
    ),
    "reinforce": LossDescription("plain policy gradient", "Williams 1992, eq. 11", ratio=False),
    "gpg": LossDescription(
        "plain policy gradient; the method's scaling is in its advantages", "arXiv 2504.02546", ratio=False
    ),
    "sft": LossDescription("negative log-likelihood of demonstrations", "maximum likelihood", ratio=False),
}


def _known_name(name: str) -> str:
    module, colon, function = name.partition(":")
    if name in DESCRIPTIONS or (colon and module and function.isidentifier()):
        return name
    close = difflib.get_close_matches(name, DESCRIPTIONS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(DESCRIPTIONS)}, or module:function"
    raise ValueError(f"unknown loss {name!r} ({hint})")


LossName = Annotated[
    str,
    AfterValidator(_known_name),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(DESCRIPTIONS), "title": "Built in"},
                {"type": "string", "pattern": r"^[\w.]+:\w+$", "title": "Your own, module:function"},
            ]
        }
    ),
]


def user_function_problem(module: str, function: str) -> str | None:
    """Why a user's loss cannot be what it must be, as far as can be told without running its module."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # a parent package runs its own code
        return f"cannot find module {module}: {type(error).__name__}: {error}"
    if spec is None or spec.origin is None:
        return f"there is no module {module}; it must be importable on every worker"
    if not spec.origin.endswith(".py"):
        return None
    try:
        body = ast.parse(Path(spec.origin).read_text()).body
    except SyntaxError as error:
        return f"{module} is not Python: {error}"
    named = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function]
    if named:
        arguments = named[-1].args
        given, optional = len(arguments.posonlyargs) + len(arguments.args), len(arguments.defaults)
        fits = (given - optional <= 2 <= given) or (arguments.vararg is not None and given - optional <= 2)
        return None if fits else f"{module}:{function} must take (TokenBatch, LossConfig)"
    bound = any(
        isinstance(node, ast.Name | ast.alias) and function in (getattr(node, "id", None), _bound_name(node))
        for top in body
        for node in ast.walk(top)
    )
    return None if bound else f"{module} has no function {function!r}"


def _bound_name(node: ast.AST) -> str | None:
    return (node.asname or node.name) if isinstance(node, ast.alias) else None
