"""Generated prompts: reasoning_gym with its own verifiers, and a user's function."""

import json
import sys

import pytest

from storage.generators import mixed_seed
from storage.prompts import DataConfig, DataError, open_prompts

reasoning_gym = pytest.importorskip("reasoning_gym")


def config(dataset="chain_sum", **values):
    return DataConfig(task=f"reasoning_gym:{dataset}", **values)


def test_extra_is_the_whole_entry_and_satisfies_the_verifier_after_storage():
    source = open_prompts(config(task_options={"min_terms": 2, "max_terms": 2}))
    for prompt in source.batch(0, 5, seed=1):
        entry = json.loads(json.dumps(prompt.extra))
        assert prompt.messages == [{"role": "user", "content": entry["question"]}] and prompt.text is None
        assert prompt.source == "reasoning_gym:chain_sum" and prompt.answer == entry["answer"]
        assert entry["metadata"]["num_terms"] == 2
        left, operator, right = entry["metadata"]["expression"].split()
        expected = int(left) + int(right) if operator == "+" else int(left) - int(right)
        assert prompt.answer == str(expected)
        verify = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        assert verify(prompt.answer, entry) == 1.0 and verify(str(expected + 1), entry) < 1.0


def test_an_endless_source_never_repeats_its_positions_and_does_not_depend_on_history():
    source = open_prompts(config())
    assert source.size is None
    first = [p.extra for step in range(4) for p in source.batch(step, 8, seed=3)]
    again = open_prompts(config())
    assert [p.extra for p in again.batch(3, 8, seed=3)] == first[24:]
    assert [p.extra for p in again.batch(0, 32, seed=3)] == first
    assert len({entry["question"] for entry in first}) >= 31, "new for every position (chance may repeat one)"


def test_blocks_join_without_a_seam():
    source = open_prompts(config(task_options={"min_digits": 6, "max_digits": 6}))
    entries = [p.extra for p in source.batch(1, 1020, seed=0)]
    indices = [entry["metadata"]["source_index"] for entry in entries]
    assert indices == [*range(1020, 1024), *range(1016)]
    assert len({entry["question"] for entry in entries}) == 1020


def test_neighbouring_seeds_share_no_prompts():
    """reasoning_gym seeds entry i with seed + i, so plain seeds 0 and 1 would share all but one of their prompts."""
    digits = {"min_digits": 6, "max_digits": 6}

    def questions(data_seed, run_seed):
        source = open_prompts(config(seed=data_seed, task_options=digits))
        return {p.extra["question"] for p in source.batch(0, 100, run_seed)}

    sets = [questions(0, 0), questions(1, 0), questions(0, 1), questions(1, 1)]
    assert len(set().union(*sets)) == 400
    raw = [
        {reasoning_gym.create_dataset("chain_sum", seed=s, size=100, **digits)[i]["question"] for i in range(100)}
        for s in (0, 1)
    ]
    assert len(raw[0] & raw[1]) == 99


def test_a_finite_set_is_the_same_for_every_run_seed_and_only_shuffled():
    source = open_prompts(config(size=20))
    assert source.size == 20

    def questions(seed):
        return [p.extra["question"] for p in source.batch(0, 20, seed)]

    assert sorted(questions(0)) == sorted(questions(1)) and questions(0) != questions(1)


def test_a_system_prompt_is_put_first():
    (prompt,) = open_prompts(config(system_prompt="be brief")).batch(0, 1, 0)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (config("nosuch"), "'nosuch' not registered"),
        (config(task_options={"nosuch": 1}), "nosuch"),
        (config(task_options={"min_terms": -1}), "min_terms must be positive"),
        (config("arc_agi"), "verifier does not work on stored entries"),
        (DataConfig(task="reasoning_gym"), "must look like"),
        (DataConfig(task="no_such_module_here:f"), "No module named 'no_such_module_here'"),
        (DataConfig(task="json:nosuch"), "no attribute 'nosuch'"),
        (DataConfig(task="json:__name__"), "it must be a function"),
        (DataConfig(task="json:dumps"), r"json:dumps, index 0: TypeError"),
    ],
)
def test_bad_tasks_are_refused_at_the_start(data, message):
    with pytest.raises(DataError, match=message):
        open_prompts(data)


def test_fingerprints_tell_tasks_apart():
    tasks = [config(), config(seed=1), config(size=9), config("gcd"), config(task_options={"max_terms": 3})]
    assert len({open_prompts(task).fingerprint for task in tasks}) == len(tasks)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_task_for_tests.py").write_text(
        "import random\n"
        "import numpy\n"
        "def add(index, seed, top=9):\n"
        "    a, b = (random.Random(seed + index).randint(0, top) for _ in range(2))\n"
        "    return {'prompt': f'{a}+{b}=', 'answer': numpy.int64(a + b), 'index': index, 'terms': numpy.array([a, b])}\n"
        "def big(index, seed):\n"
        "    return {'prompt': str(random.Random(seed + index).random()), 'answer': ''}\n"
        "def wrong(index, seed):\n"
        "    return ['no', 'dict']\n"
        "def nameless(index, seed):\n"
        "    return {'question': 'x', 'answer': ''}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_task_for_tests"
    sys.modules.pop("my_task_for_tests", None)


def test_a_users_function(user_module):
    source = open_prompts(DataConfig(task=f"{user_module}:add", task_options={"top": 99}))
    for position, prompt in enumerate(source.batch(0, 8, 0)):
        a, b = (int(term) for term in prompt.text.rstrip("=").split("+"))
        assert prompt.answer == str(a + b) and prompt.extra == {"index": position, "terms": [a, b]}
    assert [p.extra["index"] for p in source.batch(2, 3, 0)] == [6, 7, 8]
    assert source.batch(2, 3, 0) == source.batch(2, 3, 0) != source.batch(2, 3, 1)


def test_a_users_function_that_adds_index_to_seed_still_keeps_seeds_apart(user_module):
    def texts(seed):
        return {p.text for p in open_prompts(DataConfig(task=f"{user_module}:big", seed=seed)).batch(0, 200, 0)}

    assert len(texts(0) | texts(1)) == 400


def test_a_users_finite_task_is_shuffled(user_module):
    source = open_prompts(DataConfig(task=f"{user_module}:add", size=7))
    indices = [p.extra["index"] for p in source.batch(0, 7, 0)]
    assert sorted(indices) == list(range(7)) and indices != list(range(7))


@pytest.mark.parametrize(
    ("name", "message"), [("wrong", "must return a row as a dict"), ("nameless", r"no \['prompt'\]")]
)
def test_a_users_function_that_returns_something_else(user_module, name, message):
    with pytest.raises(DataError, match=rf"{name}, index 0: .*{message}"):
        open_prompts(DataConfig(task=f"{user_module}:{name}"))


def test_mixed_seeds_fit_every_random_generator():
    seeds = {mixed_seed(seed, run) for seed in range(30) for run in range(30)}
    assert len(seeds) == 900 and all(0 <= seed < 2**31 for seed in seeds)
    assert mixed_seed(1, 23) != mixed_seed(12, 3)
