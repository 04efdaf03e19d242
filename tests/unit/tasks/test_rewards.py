"""Reward functions, what they may return, and what happens when they fail."""

import functools
import json
from decimal import Decimal

import numpy as np
import pytest

from tasks.plugins import UnknownFunction
from tasks.rewards import REWARDS, RewardConfig, Sample, ScoringFailed, as_score, bind, score_samples


def sample(response="", answer="", **fields):
    values = dict(sample_id="s0", prompt="", extra={}, response_tokens=[], finish_reason="stop")
    return Sample(response=response, answer=answer, **{**values, **fields})


def value(name, response, answer, **fields):
    return bind(name)(sample(response, answer, **fields)).reward


def test_exact_ignores_only_outer_space():
    assert value("exact", " 12\n", "12") == 1
    assert value("exact", "1 2", "12") == 0


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        ("124", "124", 1),
        ("123", "124", 2 / 3),
        ("1244", "124", 3 / 4),
        ("", "124", 0),
        ("12", "124", 2 / 3),
        ("", "", 1),
    ],
)
def test_digits_gives_credit_by_place(response, answer, expected):
    assert value("digits", response, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    "response, expected",
    [
        ("so #### 1,234", 1),
        ("#### $1234.00", 1),
        ("#### 5 no, #### 1234", 1),
        ("1234", 0),
        ("#### none", 0),
        ("#### 12", 0),
    ],
)
def test_gsm8k_compares_the_last_marked_number(response, expected):
    assert value("gsm8k", response, "2*617=<<2*617=1234>>1234\n#### 1,234") == expected


def test_gsm8k_reports_the_format():
    assert bind("gsm8k")(sample("#### 7", "8")).components == {"format": 1.0}


def test_reasoning_gym_uses_the_data_sets_own_verifier():
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    assert value("reasoning_gym", "I think <answer>2</answer> no <answer>3</answer>", "3", extra=entry) == 1
    assert value("reasoning_gym", "4", "3", extra=entry) < 1
    with pytest.raises(ValueError, match="data.task"):
        value("reasoning_gym", "3", "3", extra={})


@pytest.mark.parametrize(
    "returned",
    [
        1,
        1.0,
        True,
        np.float32(1),
        np.bool_(True),
        np.array(1.0),
        Decimal(1),
        {"reward": 1},
        {"score": 1, "a": 2},
        (1, {"a": 2}),
    ],
)
def test_accepted_return_types(returned):
    assert as_score(returned).reward == 1.0


def test_components_are_kept():
    assert as_score({"score": 0.5, "acc": 1}).components == {"acc": 1}
    assert as_score((0.5, {"acc": 1})).components == {"acc": 1}


@pytest.mark.parametrize(
    "returned", [None, "1.0", [1.0], (1, 2), float("nan"), float("inf"), {"acc": 1}, np.array([1.0]), 1j]
)
def test_refused_return_types(returned):
    with pytest.raises((TypeError, ValueError)):
        as_score(returned)


def test_functions_get_only_what_they_ask_for(monkeypatch):
    class Callable:
        def __call__(self, response, *, extra, scale=2.0):
            return scale * extra["x"]

    functions = {
        "keywords": lambda **everything: len(everything),
        "partial": functools.partial(lambda response, k: k, k=3),
        "object": Callable(),
    }
    for name, function in functions.items():
        monkeypatch.setitem(REWARDS._functions, name, function)
    row = sample(extra={"x": 4})
    assert [bind(name)(row).reward for name in functions] == [7, 3, 8]


def test_impossible_functions_are_refused_when_bound(monkeypatch, tmp_path):
    async def later(response):
        return 1

    monkeypatch.setitem(REWARDS._functions, "later", later)
    monkeypatch.setitem(REWARDS._functions, "greedy", lambda response, gold: 1)
    (tmp_path / "broken.py").write_text("1 / 0")
    for name, reason in [
        ("later", "asynchronous"),
        ("greedy", "'gold'"),
        ("exakt", "did you mean 'exact'"),
        ("no.such.module:f", "cannot import"),
        ("json:nothing", "no function 'nothing'"),
        (f"{tmp_path}/broken.py:f", "ZeroDivisionError"),
        (f"{tmp_path}/absent.py:f", "no file"),
    ]:
        with pytest.raises(UnknownFunction, match=reason):
            bind(name)


def test_a_function_in_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def brevity(response: str) -> float:\n    return 1 / (1 + len(response))\n")
    assert value(f"{path}:brevity", "abc", "") == 0.25


def rows(failing, total=4):
    def score(row):
        if int(row.sample_id) < failing:
            raise RuntimeError("no answer")
        return as_score({"reward": 1, "n": np.int64(2)})

    return score, [sample(sample_id=str(i)) for i in range(total)]


def test_a_failure_is_recorded_and_masked():
    scored = score_samples(*rows(1), RewardConfig())
    assert [r.reward for r in scored] == [None, 1, 1, 1]
    assert scored[0].error == "RuntimeError: no answer"
    assert json.loads(scored[1].components) == {"n": 2}


def test_a_failure_may_count_as_zero():
    assert [r.reward for r in score_samples(*rows(1), RewardConfig(on_error="zero"))] == [0, 1, 1, 1]


@pytest.mark.parametrize("failing, config", [(1, {"on_error": "fail"}), (3, {}), (4, {"on_error": "zero"})])
def test_too_many_failures_stop_the_stage(failing, config):
    with pytest.raises(
        ScoringFailed, match=rf"failed on {failing} of 4 samples; the first, 0: RuntimeError: no answer"
    ):
        score_samples(*rows(failing), RewardConfig(**config))


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        ("7 + 4 = 11.", "11", 1),
        ("11", "11", 1),
        ("It is 1,234 in all", "1234", 1),
        ("$5", "5", 1),
        ("11 or 12", "11", 0),
        ("7 - 8 = -1", "-1", 1),
        ("no idea", "3", 0),
        ("", "3", 0),
        ("3.0", "3", 1),
    ],
)
def test_last_number_takes_the_last_one(response, answer, expected):
    assert value("last_number", response, answer) == expected
