"""The demo's task: right answers, a split that holds, and a score that does not reward length."""

import pytest

from tasks.remainder import ALPHABET, demonstration, is_held_out, long_division, question, score


def test_long_division_by_hand():
    # 4 % 3 = 1, 17 % 3 = 2, 22 % 3 = 1, 15 % 3 = 0, 03 % 3 = 0
    assert long_division("47253") == "17221503"


@pytest.mark.parametrize("index", range(50))
def test_answers_are_remainders_and_demonstrations_end_in_them(index):
    row, shown = question(index, seed=7), demonstration(index, seed=7)
    number = row["prompt"].removesuffix("%3=")
    assert len(number) == 5 and row["answer"] == str(int(number) % 3)
    assert shown["prompt"] == row["prompt"]
    assert score(shown["answer"], row["answer"])["reward"] == 1
    assert set(row["prompt"] + shown["answer"]) <= set(ALPHABET)


def test_held_out_numbers_never_occur_in_training():
    trained = {question(i, seed)["prompt"] for seed in (0, 1) for i in range(2000)}
    held = {question(i, 1, held_out=True)["prompt"] for i in range(300)}
    assert not trained & held
    assert all(is_held_out(prompt[:5]) for prompt in held)


def test_a_quarter_shows_its_working():
    share = sum(len(demonstration(i, 3)["answer"]) > 2 for i in range(2000)) / 2000
    assert share == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    "response, reward, working",
    [(">0", 1, 0), ("17221503>0", 1, 1), (">1", 0, 0), ("0", 0, 1), (">0>0", 0, 0), ("", 0, 0), (">00", 0, 0)],
)
def test_score(response, reward, working):
    assert score(response, "0") == {"reward": reward, "working": working}
