"""Prompts come from the files people have, unchanged, checked at the start, and in an order that history cannot alter."""

import gzip
import json
import random
import subprocess
import sys
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from storage.filesystem import Store
from storage.prompts import DataConfig, DataError, open_prompts


def write_rows(path, rows, **parquet):
    """The rows as a file of the kind that the suffix says."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows, **parquet), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


def numbered(count):
    return [{"prompt": f"q{i}", "answer": f"a{i}"} for i in range(count)]


def load(path, **config):
    """All prompts of a file in the file's order."""
    source = open_prompts(DataConfig(path=str(path), **config))
    return [source.entry(index, 0) for index in range(source.size)]


# --- Configuration ---------------------------------------------------------------------------------------------------


def test_exactly_one_source_is_given():
    for config in ({}, {"path": "a", "task": "b:c"}, {"path": "a", "task_options": {"x": 1}}, {"paht": "a"}):
        with pytest.raises(ValidationError):
            DataConfig(**config)
    options = DataConfig(task="a:b", task_options={"i": 1, "f": 0.5, "s": "x", "b": True}).task_options
    assert options == {"i": 1, "f": 0.5, "s": "x", "b": True} and options["b"] is True and type(options["i"]) is int


def test_every_setting_is_explained_in_the_form():
    for field in DataConfig.model_json_schema()["properties"].values():
        assert field["title"] and field["description"]


# --- Kinds of files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "a.PARQUET", "a.JSONL"])
def test_the_suffix_says_the_kind_of_file(tmp_path, name):
    found = load(write_rows(tmp_path / name, numbered(3)))
    assert [(p.text, p.answer, p.messages, p.extra) for p in found] == [(f"q{i}", f"a{i}", None, {}) for i in range(3)]


def test_json_lines_in_a_json_file_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x\xe2\x80\xa8y", "answer": "1"}\r\n\n{"prompt": "z", "answer": "2"}')
    assert [p.text for p in load(path)] == ["x\u2028y", "z"]


def test_folder_glob_and_single_file(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write_rows(tmp_path / name, [{"prompt": name, "answer": ""}])
    for name in (".hidden.jsonl", "_temporary.jsonl", "README.md"):
        (tmp_path / name).write_text("not data")
    assert [p.text for p in load(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [p.text for p in load(f"{tmp_path}/*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [p.text for p in load(f"{tmp_path}/[b-z]*.jsonl")] == ["b.jsonl"]
    (tmp_path / "x[1].jsonl").write_text('{"prompt": "odd name", "answer": ""}')
    assert [p.text for p in load(tmp_path / "x[1].jsonl")] == ["odd name"]


def test_relative_paths(tmp_path, monkeypatch):
    write_rows(tmp_path / "a.jsonl", numbered(1))
    monkeypatch.chdir(tmp_path)
    assert len(load("a.jsonl")) == len(load("./a.jsonl")) == len(load(".")) == len(load("*.jsonl")) == 1


def test_object_store(tmp_path):
    root = f"memory://{uuid.uuid4().hex}"
    Store.open(root).write("train/a.jsonl", b'{"prompt": "x", "answer": "1"}\n')
    for path in (f"{root}/train", f"{root}/train/", f"{root}/train/a.jsonl", f"{root}/*/a.jsonl"):
        assert [p.text for p in load(path)] == ["x"]


def test_splits_in_subfolders_are_not_mixed(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        write_rows(tmp_path / split / "a.parquet", [{"prompt": split, "answer": ""}])
    assert [p.text for p in load(tmp_path / "train")] == ["train"]
    with pytest.raises(DataError, match="it has train, val"):
        load(tmp_path)
    assert [p.text for p in load(f"{tmp_path}/**/*.parquet")] == ["train", "val"]


def test_nothing_there_and_unclear_folders(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        load(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="no files match"):
        load(f"{tmp_path}/*.parquet")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes\.txt: unknown kind of file; onecopy reads \.jsonl"):
        load(tmp_path / "notes.txt")
    write_rows(tmp_path / "a.jsonl", numbered(1))
    write_rows(tmp_path / "a.parquet", numbered(1))
    with pytest.raises(DataError, match="JSON and Parquet"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "cut"])
@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl", "b.jsonl.gz"])
def test_a_damaged_file_among_good_ones_is_named(tmp_path, name, damage):
    suffix = name[1:]
    for other in "abc":
        write_rows(tmp_path / f"{other}{suffix}", numbered(200))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"" if damage == "empty" else data[:-10])
    with pytest.raises(DataError, match=rf"/b\{suffix}"):
        load(tmp_path)


# --- Values stay what they are ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_strings_that_look_like_something_else_stay_strings(tmp_path, name):
    answers = ["2024-01-01", "2024-01-01T00:00:00Z", "007", "1e5", "true", "null", "NaN", " padded ", ""]
    path = write_rows(tmp_path / name, [{"prompt": answer or "-", "answer": answer} for answer in answers])
    assert [p.answer for p in load(path)] == answers
    assert [p.text for p in load(path)] == [answer or "-" for answer in answers]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_that_is_null_in_one_file(tmp_path, suffix, order):
    write_rows(tmp_path / f"{order[0]}.{suffix}", [{"prompt": "x", "answer": None, "note": None}] * 3)
    write_rows(tmp_path / f"{order[1]}.{suffix}", [{"prompt": "y", "answer": "1", "note": "n"}])
    found = {p.text: (p.answer, p.extra) for p in load(tmp_path)}
    assert found == {"x": ("", {"note": None}), "y": ("1", {"note": "n"})}


def test_answers_that_are_not_strings_become_json(tmp_path):
    answers = [3, 2.5, True, ["a", None], {"numbers": [3, 5], "target": 24}, 2**60]
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "x", "answer": answer} for answer in answers])
    texts = [p.answer for p in load(path)]
    assert texts == ["3", "2.5", "true", '["a", null]', '{"numbers": [3, 5], "target": 24}', "1152921504606846976"]


def test_extra_holds_native_values(tmp_path):
    import datetime
    import decimal

    zone = datetime.timezone(datetime.timedelta(hours=2))
    row = {
        "prompt": "x", "answer": "1", "flag": True, "count": 2**53 + 1, "nested": [[None, [0]]], "day": datetime.date(2024, 1, 2),
        "price": decimal.Decimal("1.10"), "at": datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=zone), "image": b"\x00\xff",
    }  # fmt: skip
    schema = pa.Table.from_pylist([row]).schema.set(7, pa.field("at", pa.timestamp("us", "+02:00")))
    extra = load(write_rows(tmp_path / "a.parquet", [row] * 5, schema=schema))[4].extra
    assert extra == {
        "flag": True, "count": 9007199254740993, "nested": [[None, [0]]], "day": "2024-01-02", "price": "1.10",
        "at": "2024-01-02T03:04:05+02:00", "image": "AP8=",
    }  # fmt: skip
    assert type(extra["flag"]) is bool and type(extra["count"]) is int
    assert json.loads(json.dumps(extra, allow_nan=False)) == extra


def test_numbers_that_json_cannot_hold_are_named(tmp_path):
    source = open_prompts(
        DataConfig(path=write_rows(tmp_path / "a.parquet", [{"prompt": "x", "answer": "1", "score": float("nan")}]))
    )
    with pytest.raises(DataError, match=r"a\.parquet, row 0: .*not JSON compliant"):
        source.batch(0, 1, 0)


# --- Conversations ---------------------------------------------------------------------------------------------------

CALL = {"function": {"name": "add", "arguments": {"x": 1}}}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "stop"}}]},
    {"role": "tool", "content": "3", "name": "add"},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_messages_keep_exactly_the_keys_they_had(tmp_path, name):
    """Parquet gives every message every key that any message has; as None they would reach the chat template."""
    other = [{"role": "user", "content": "only", "weight": 1}]
    found = load(write_rows(tmp_path / name, [{"prompt": CHAT, "answer": "1"}, {"prompt": other, "answer": "1"}]))
    assert found[0].messages == CHAT and found[1].messages == other and found[0].text is None


def test_text_parts_are_joined_and_other_parts_refused(tmp_path):
    mixed = [
        {"prompt": [{"role": "user", "content": "plain"}], "answer": ""},
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "answer": "",
        },
    ]
    path = tmp_path / "a.jsonl"
    assert [p.messages[0]["content"] for p in load(write_rows(path, mixed))] == ["plain", "ab"]
    mixed[1]["prompt"][0]["content"][1] = {"type": "image", "url": "x"}
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: message 0 has a part that is not text"):
        load(write_rows(path, mixed))


def test_system_prompt(tmp_path):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    rows = [{"prompt": p, "answer": ""} for p in ("a", [{"role": "user", "content": "b"}], own)]
    found = load(write_rows(tmp_path / "a.jsonl", rows), system_prompt="be brief")
    system = {"role": "system", "content": "be brief"}
    assert [p.messages for p in found] == [
        [system, {"role": "user", "content": "a"}],
        [system, {"role": "user", "content": "b"}],
        own,
    ]
    assert all(p.text is None for p in found)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "not null"),
        ("  ", "the prompt is empty"),
        ([], "not an empty list"),
        (7, "not a int"),
        ([{"from": "human", "value": "x"}], r"message 0 must have a role and a content.*\['from', 'value'\]"),
        ([{"role": "user", "content": None}], "content of message 0 must be text"),
    ],
)
def test_bad_prompts_are_found_at_the_start_and_named(tmp_path, suffix, prompt, message):
    good = {"prompt": [{"role": "user", "content": "fine"}], "answer": ""}
    if isinstance(prompt, str | int):
        good["prompt"] = "fine" if isinstance(prompt, str) else 3
    rows = [good, {"prompt": prompt, "answer": ""}]
    path = write_rows(tmp_path / f"a.{suffix}", rows if prompt != 7 else rows[1:] * 2)
    place = {"jsonl": "line", "json": "row", "parquet": "row"}[suffix]
    with pytest.raises(DataError, match=rf"a\.{suffix}, {place} \d: .*{message}"):
        open_prompts(DataConfig(path=path))


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', '{"prompt": "\\ud800", "answer": "1"}'])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: "):
        open_prompts(DataConfig(path=str(path)))


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x", "answer": "1"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"line 2: not valid JSON in UTF-8"):
        open_prompts(DataConfig(path=str(tmp_path / "a.jsonl")))


def test_a_very_long_line(tmp_path):
    text = "x" * 3_000_000
    assert load(write_rows(tmp_path / "a.jsonl", [{"prompt": text, "answer": "1"}]))[0].text == text


# --- Columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_nested_columns(tmp_path, name):
    row = {
        "data_source": "openai/gsm8k", "prompt": [{"content": "q", "role": "user"}],
        "reward_model": {"ground_truth": "31", "style": "rule"}, "extra_info": {"index": 0, "split": "train"},
    }  # fmt: skip
    path = write_rows(tmp_path / name, [row])
    (found,) = load(path, answer_column="reward_model.ground_truth")
    assert found.answer == "31" and found.messages == row["prompt"]
    assert found.extra == {key: row[key] for key in ("data_source", "reward_model", "extra_info")}
    with pytest.raises(DataError, match=r"no 'groundtruth' on the way.*has \['ground_truth', 'style'\]"):
        load(path, answer_column="reward_model.groundtruth")


def test_columns_that_are_not_there(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"question": "q", "solution": "s", "level": 3}])
    with pytest.raises(
        DataError, match=r"no column 'prompt', only \['level', 'question', 'solution'\]; set prompt_column"
    ):
        load(path)
    with pytest.raises(DataError, match="no column 'answer'.*set answer_column"):
        load(path, prompt_column="question")
    (found,) = load(path, prompt_column="question", answer_column="solution")
    assert (found.text, found.answer, found.extra) == ("q", "s", {"level": 3})
    (found,) = load(path, prompt_column="question", answer_column=None)
    assert (found.answer, found.extra) == ("", {"solution": "s", "level": 3})


def test_a_column_name_with_a_dot_is_taken_as_it_is(tmp_path):
    assert (
        load(write_rows(tmp_path / "a.jsonl", [{"prompt": "x", "meta.answer": "1"}]), answer_column="meta.answer")[
            0
        ].answer
        == "1"
    )


# --- Identity --------------------------------------------------------------------------------------------------------


def test_ids_follow_source_and_content(tmp_path):
    rows = [{"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": "2"}]
    first = [p.prompt_id for p in load(write_rows(tmp_path / "a.jsonl", rows))]
    assert first[0] == first[1] != first[2]
    (tmp_path / "moved").mkdir()
    assert first == [p.prompt_id for p in load(write_rows(tmp_path / "moved" / "a.jsonl", rows))]
    assert set(first).isdisjoint(p.prompt_id for p in load(write_rows(tmp_path / "b.jsonl", rows)))


def test_fingerprint_tells_that_the_data_changed(tmp_path):
    def mark(rows, **config):
        return open_prompts(DataConfig(path=write_rows(tmp_path / "a.jsonl", rows), **config)).fingerprint

    first = mark(numbered(3))
    assert first == mark(numbered(3)) == mark(numbered(3), overlong="drop")
    marks = [
        first,
        mark(numbered(4)),
        mark(numbered(3)[::-1]),
        mark(numbered(3), size=2),
        mark(numbered(3), system_prompt="s"),
    ]
    assert len(set(marks)) == len(marks)


def test_the_same_prompt_a_hundred_times_is_a_hundred_prompts(tmp_path):
    source = open_prompts(DataConfig(path=write_rows(tmp_path / "a.jsonl", numbered(5) * 100)))
    assert source.size == 500 and len({p.prompt_id for p in source.batch(0, 500, 0)}) == 5


# --- Order -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ten(tmp_path):
    write_rows(tmp_path / "a.jsonl", numbered(4))
    write_rows(tmp_path / "b.jsonl", [{"prompt": f"q{i}", "answer": f"a{i}"} for i in range(4, 10)])
    return str(tmp_path)


def texts(source, step, size, seed=0):
    return [p.text for p in source.batch(step, size, seed)]


def test_an_epoch_takes_every_prompt_once_and_the_next_one_in_another_order(ten):
    source = open_prompts(DataConfig(path=ten))
    taken = [text for step in range(10) for text in texts(source, step, 3)]
    epochs = [taken[0:10], taken[10:20], taken[20:30]]
    assert all(sorted(epoch) == [f"q{i}" for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])


def test_a_batch_does_not_depend_on_history(ten):
    source = open_prompts(DataConfig(path=ten))
    in_order = [texts(source, step, 3, seed=5) for step in range(12)]
    steps = list(range(12))
    random.Random(0).shuffle(steps)
    assert {step: texts(open_prompts(DataConfig(path=ten)), step, 3, seed=5) for step in steps} == dict(
        enumerate(in_order)
    )
    assert [text for step in range(6) for text in texts(source, step, 6, seed=5)] == sum(in_order, []), "size only cuts"
    assert texts(source, 0, 10, seed=6) != texts(source, 0, 10, seed=5)


def test_the_order_is_pinned(ten):
    """SplitMix64 of (start + index · golden ratio), worked out here with Python's integers: no release may change it."""
    import hashlib

    def key(index, seed, epoch):
        mask = 2**64 - 1
        start = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "little")
        z = (index * 0x9E3779B97F4A7C15 + start) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    source = open_prompts(DataConfig(path=ten))
    for seed, epoch in ((0, 0), (0, 1), (123, 7)):
        expected = sorted(range(10), key=lambda index: key(index, seed, epoch))
        assert texts(source, epoch, 10, seed) == [f"q{i}" for i in expected]


def test_places_in_an_epoch_are_taken_evenly(ten):
    """Over 2000 seeds each prompt comes first about 200 times (5 standard deviations are 67)."""
    source = open_prompts(DataConfig(path=ten))
    firsts = [source.batch(0, 1, seed)[0].text for seed in range(2000)]
    assert all(133 <= firsts.count(f"q{i}") <= 267 for i in range(10))


def test_size_takes_the_first_rows_at_most(ten):
    assert open_prompts(DataConfig(path=ten)).size == 10
    assert open_prompts(DataConfig(path=ten, size=99)).size == 10
    assert sorted(texts(open_prompts(DataConfig(path=ten, size=6)), 0, 6)) == [f"q{i}" for i in range(6)]


def test_a_batch_may_be_larger_than_an_epoch_but_not_empty(ten):
    source = open_prompts(DataConfig(path=ten))
    assert sorted(texts(source, 0, 20)) == sorted([f"q{i}" for i in range(10)] * 2)
    for step, size in ((0, 0), (-1, 1)):
        with pytest.raises(ValueError, match="step >= 0 and size >= 1"):
            source.batch(step, size, 0)


# --- Reading prompts must stay light ---------------------------------------------------------------------------------


def test_the_package_imports_nothing_heavy():
    program = (
        "import sys, storage.prompts, storage.query, storage.checkpoints;"
        "print([m for m in ('torch','vllm','megatron','transformers','ray','prefect','reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
