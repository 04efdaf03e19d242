"""What a user sees of a run: the second start on a warm pool, the commands that read it, its export, and refused input."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

import pyarrow.dataset
import pytest


def test_a_second_run_on_the_pool_starts_its_first_rollout_within_three_seconds(onecopy, recipe, undisturbed):
    done = onecopy("post-train", "--config", recipe("second"))
    assert done.returncode == 0, done.stderr
    seconds = float(re.search(r"first rollout begins ([\d.]+) s", done.stderr).group(1))
    assert seconds < 3.0


def test_the_terminal_shows_steps_and_no_third_party_noise(onecopy, recipe, undisturbed):
    done = onecopy("post-train", "--config", recipe("quiet"))
    lines = [line for line in done.stderr.splitlines() if line]
    assert sum(line.startswith("step ") for line in lines) == 3
    assert all(re.match(r"step |version |first rollout|the pool|loaded the", line) for line in lines), done.stderr
    assert done.stdout.splitlines()[0].startswith("run quiet: 3 steps in ")


def test_runs_and_rollouts_are_shown(onecopy, place, undisturbed):
    root = ("--root", place / "runs")
    listed = onecopy("runs", "list", *root)
    assert listed.returncode == 0 and "undisturbed" in listed.stdout
    shown = onecopy("runs", "show", "undisturbed", *root)
    assert "3 updates" in shown.stdout and "checkpoints: 2, 3" in shown.stdout
    samples = onecopy("rollouts", "show", "undisturbed", "--step", 1, "--best", 2, "--worst", 1, *root)
    assert samples.stdout.count("· reward ") == 3
    missing = onecopy("rollouts", "show", "undisturbed", "--step", 9, *root)
    assert missing.returncode == 2 and len(missing.stderr.strip().splitlines()) == 1


def test_rollouts_are_plain_parquet(undisturbed):
    table = pyarrow.dataset.dataset(undisturbed / "rollout", partitioning="hive").to_table()
    assert table.num_rows == 3 * 16
    assert sorted(set(table["step"].to_pylist())) == [0, 1, 2]


def test_export_loads_in_transformers(onecopy, place, undisturbed):
    target = place / "exported"
    done = onecopy("export", "undisturbed", "--step", 3, "--to", target, "--root", place / "runs")
    assert done.returncode == 0, done.stderr
    program = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "print(m.generate(**t('1+1=', return_tensors='pt'), max_new_tokens=3, do_sample=False).shape)"
    )
    loaded = subprocess.run([sys.executable, "-c", program, str(target)], capture_output=True, text=True, timeout=120)
    assert loaded.returncode == 0, loaded.stderr
    again = onecopy("export", "undisturbed", "--step", 1, "--to", place / "other", "--root", place / "runs")
    assert again.returncode == 2 and "saved are 2, 3" in again.stderr


BAD = {
    "missing model folder": (["model.path=/nowhere/model"], "/nowhere/model"),
    "unsupported architecture": (["model.path={place}/gpt2"], "gpt2"),
    "empty prompt file": (["data.path={place}/empty.jsonl"], "empty.jsonl"),
    "prompt longer than the context": (["data.path={place}/long.jsonl"], "do not fit"),
    "tensor parallel size that does not divide": (["parallel.tensor_parallel_size=3"], "num_attention_heads"),
    "group of one": (["generation.samples_per_prompt=1"], "samples_per_prompt"),
    "greedy training": (["generation.temperature=0"], "temperature"),
    "unknown key": (["optimiser.lr=1"], "optimiser"),
    "wrong type": (["total_steps=many"], "total_steps"),
    "run name that escapes": (["experiment=../outside"], "experiment"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_clear_line_and_changes_nothing(what, onecopy, recipe, place, undisturbed):
    (place / "gpt2").mkdir(exist_ok=True)
    (place / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (place / "empty.jsonl").write_text("")
    (place / "long.jsonl").write_text(json.dumps({"prompt": "1+" * 80, "answer": "80"}))
    config = recipe("refused")
    before = sorted(place.rglob("runs/**"))
    settings, named = BAD[what]
    done = onecopy("post-train", "--config", config, *[x for s in settings for x in ("--set", s.format(place=place))])
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(place.rglob("runs/**")) == before


def test_a_port_in_use_is_named(onecopy, place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = onecopy("pool", "up", "--port", port, home=place / "elsewhere")
    assert done.returncode == 2
    assert str(port) in done.stderr


def test_doctor_finds_nothing_missing(onecopy):
    done = onecopy("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
