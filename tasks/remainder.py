"""The demo's task: the remainder of a five-digit number divided by three, answered at once or after a long division.

A third of blind guesses is right. Long division, written out digit by digit, is right every time, but takes ten tokens, and
the demonstrations use it only now and then: reinforcement learning has to find out by itself that it pays.
"""

from __future__ import annotations

import hashlib
import random

DIGITS = 5
DIVISOR = 3
MARK = ">"
ALPHABET = f"0123456789%={MARK}"
"""Every character of prompts and answers."""


def question(index: int, seed: int, held_out: bool = False) -> dict[str, str]:
    """A row for training with rewards: prompt "47253%3=", answer "0".

    A number is either held out or not, whatever the seed: one in ten is.
    """
    number = _number(index, seed, held_out)
    return {"prompt": f"{number}%{DIVISOR}=", "answer": str(int(number) % DIVISOR)}


def demonstration(index: int, seed: int, working_share: float = 0.25) -> dict[str, str]:
    """A row for supervised training: the answer after a long division in `working_share` of the rows, otherwise at once."""
    row = question(index, seed)
    shows_working = random.Random(f"{seed}/{index}/working").random() < working_share
    number = row["prompt"].partition("%")[0]
    return {**row, "answer": (long_division(number) if shows_working else "") + MARK + row["answer"]}


def long_division(number: str) -> str:
    """The partial dividends of schoolbook division: remainder so far, next digit brought down. "47253" gives "17221503"."""
    remainder, written = int(number[0]) % DIVISOR, ""
    for digit in number[1:]:
        written += f"{remainder}{digit}"
        remainder = (10 * remainder + int(digit)) % DIVISOR
    return written


def score(response: str, answer: str) -> dict[str, float]:
    """Reward 1 if what follows the first mark is the answer; `working` tells whether something was written before it.

    How the answer was found is not rewarded, and neither is length.
    """
    working, mark, given = response.partition(MARK)
    return {"reward": float(bool(mark) and given == answer), "working": float(bool(working))}


def _number(index: int, seed: int, held_out: bool) -> str:
    numbers = random.Random(f"{seed}/{index}")
    while True:
        number = "".join(numbers.choice("0123456789") for _ in range(DIGITS))
        if is_held_out(number) == held_out:
            return number


def is_held_out(number: str) -> bool:
    """Whether a number is kept for evaluation."""
    return hashlib.sha256(number.encode()).digest()[0] % 10 == 0
