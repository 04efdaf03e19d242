"""Rewards that compare text: exact match, digits with partial credit, GSM8K's final answer."""

from __future__ import annotations

import re

from tasks.rewards.registry import reward

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@reward("exact")
def exact(response: str, answer: str) -> float:
    """1 if the response is the answer, white space at both ends aside; 0 otherwise."""
    return float(response.strip() == answer.strip())


@reward("digits")
def digits(response: str, answer: str) -> float:
    """Share of characters that are right, place by place from the left; 1 only for exactly the answer.

    Partial credit gives a small model a slope to climb. Characters too many or too few count as wrong, so that neither an empty
    nor an endless response is worth anything for its length: "123" for "124" is 2/3, "1244" for "124" is 3/4.
    """
    given, wanted = response.strip(), answer.strip()
    places = max(len(given), len(wanted))
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / places if places else 1.0


@reward("last_number")
def last_number(response: str, answer: str) -> float:
    """1 if the last number in the response is that of the answer, whatever stands around it; commas and `$` aside.

    Raises:
        ValueError: the answer has no number.
    """
    wanted = _as_number(answer)
    if wanted is None:
        raise ValueError(f"the answer {answer[-40:]!r} has no number")
    numbers = _NUMBER.findall(response.replace("$", ""))
    return float(bool(numbers) and _as_number(numbers[-1]) == wanted)


@reward("gsm8k")
def gsm8k(response: str, answer: str) -> dict[str, float]:
    """1 if the number after the last `####` equals that of the answer (commas, `$` and trailing zeros aside).

    The answer may be the data set's own text, worked solution included, or the bare number. A response without `####` scores 0.
    """
    wanted = _final_number(answer)
    if wanted is None:
        wanted = _as_number(answer)
    if wanted is None:
        raise ValueError(f"the answer {answer[-40:]!r} has no number after ####")
    given = _final_number(response)
    return {"reward": float(given is not None and given == wanted), "format": float(given is not None)}


def _final_number(text: str) -> float | None:
    _, mark, tail = text.rpartition("####")
    return _as_number(tail) if mark else None


def _as_number(text: str) -> float | None:
    found = _NUMBER.search(text.replace("$", ""))
    return float(found.group().replace(",", "")) if found else None
