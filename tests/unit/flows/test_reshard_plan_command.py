"""`onecopy reshard-plan`: figures as a table and as JSON, and all that is wrong with a request at once."""

import json

import pytest

from flows.cli import main


def run(capsys, *arguments):
    code = main(["reshard-plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json(capsys):
    code, out, _ = run(
        capsys, "--model", "llama3-70b", "--train", "tp8,pp2", "--generate", "tp4", "--nodes", "2x8", "--json"
    )
    found = json.loads(out)
    assert code == 0 and found["train"] == "tp8,pp2" and found["generate"] == "tp4,dp4"
    assert found["received_bytes_max"] == found["lower_bound_bytes_max"] > 26 * 10**9
    assert found["received_network_bytes_max"] < found["received_bytes_max"]
    assert {"peak_parameter_bytes_max", "redundant_bytes_max", "seconds", "formulas"} <= found.keys()


def test_table_names_the_formulas(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run(capsys, "--model", "qwen3-30b-a3b", "--train", "tp2,dp4,ep8", "--generate", "tp8,ep8")
    assert code == 0
    for text in ("HybridFlow-V (formula)", "DS-Chat (formula)", "lower bound", "tp2,dp4,ep8,etp1 -> tp8,ep8,etp1"):
        assert text in out


def test_a_config_file_and_a_folder(capsys, tmp_path):
    config = dict(
        model_type="llama",
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=100,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    outputs = [
        run(capsys, "--model", str(path), "--train", "tp2", "--generate", "tp1", "--json")
        for path in (tmp_path, tmp_path / "config.json")
    ]
    assert [code for code, _, _ in outputs] == [0, 0]
    bytes_ = [json.loads(out)["model_bytes"] for _, out, _ in outputs]
    embedding_and_head, layer = 2 * 128 * 64, 64 * (3 * 64 + 64 + 3 * 128) + 2 * 64
    assert bytes_ == [2 * (embedding_and_head + 2 * layer + 64)] * 2


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("--model", "gpt-5", "--train", "tp2", "--generate", "tp2"), ["--model: 'gpt-5' is no file or folder"]),
        (("--model", "llama3-8b", "--train", "tp2,tp4", "--generate", "x2"), ["--train: 'tp4'", "--generate: 'x2'"]),
        (("--model", "llama3-8b", "--train", "tp3,dp2", "--generate", "tp4"), ["tensor_parallel_size 3", "does not divide the 6"]),
        (("--model", "llama3-8b", "--train", "dp2,pp64", "--generate", "tp2"), ["32 layers cannot be divided over 64"]),
        (("--model", "llama3-8b", "--train", "tp2,ep2", "--generate", "tp2"), ["needs a mixture of experts"]),
        (("--model", "llama3-8b", "--train", "tp8", "--generate", "tp2", "--nodes", "1x4"), ["--nodes: 1x4 are 4 GPUs"]),
        (("--model", "llama3-8b", "--train", "tp8", "--generate", "tp2", "--nodes", "many"), ["--nodes: 'many'"]),
        (("--model", "llama3-8b", "--train", "tp8", "--generate", "tp2,dp3"), ["8 ranks make 4 replicas"]),
        (("--model", "qwen3-30b-a3b", "--train", "tp4", "--generate", "tp4,ep2"), ["vLLM divides experts over all"]),
        (("--model", "qwen3-30b-a3b", "--train", "dp12,ep12", "--generate", "tp4"), ["12 does not divide experts 128"]),
    ],
)  # fmt: skip
def test_refusals(capsys, arguments, expected):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    for text in expected:
        assert text in err
    assert all(line.startswith("onecopy: ") for line in err.splitlines())
