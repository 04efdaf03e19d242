"""The command line: what it prints, its exit codes, and that bad input changes nothing."""

import errno
import json

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from engine.pool.errors import OperationFailed
from flows.cli import main
from flows.cli.doctor import examine
from flows.cli.errors import explain
from flows.post_train import post_train
from storage.filesystem import StorageError, Store


@pytest.fixture
def recipe(tmp_path, values):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def onecopy(capsys, monkeypatch):
    """Runs a command; exit code, stdout, stderr. Flows are called without Prefect's engine."""
    monkeypatch.setattr("prefect.Flow.__call__", lambda self, *args, **kwargs: self.fn(*args, **kwargs))

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def finished(config, pool):
    """A finished run."""
    post_train.fn(config)
    return config


def test_post_train_from_a_recipe(onecopy, recipe, pool, values):
    code, out, err = onecopy("post-train", "--config", recipe, "--set", "total_steps=2")
    assert code == 0
    assert out.splitlines()[0].startswith("run sums: 2 steps in ")
    assert f"onecopy rollouts show sums --step 1 --best 3 --worst 3 --root {values['root']}" in out
    assert "step 2/2 · reward 0.500" in err


def test_bad_input_gets_a_line_each_and_changes_nothing(onecopy, recipe, pool, tmp_path):
    before = sorted(tmp_path.iterdir())
    arguments = ["--set", "optimizer.lr=fast", "--set", "model.path=/nowhere/model", "--set", "typo=1"]
    code, out, err = onecopy("post-train", "--config", recipe, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 3
    assert all(line.startswith("onecopy: ") for line in err.splitlines())
    assert sorted(tmp_path.iterdir()) == before
    assert not pool.current.requests


def test_a_changed_configuration_is_one_line(onecopy, recipe, finished):
    code, _, err = onecopy("post-train", "--config", recipe, "--set", "optimizer.lr=1e-3")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("onecopy: optimizer.lr: was 1e-06 when run 'sums' was started, now 0.001;")


def test_disk_full_is_one_line(onecopy, recipe, pool, monkeypatch):

    def full(self, path, data):
        raise StorageError(errno.ENOSPC, f"cannot write {path}: No space left on device; free some space there")

    monkeypatch.setattr(Store, "write", full)
    code, _, err = onecopy("post-train", "--config", recipe)
    assert code == 2
    assert "No space left on device" in err and "Traceback" not in err


def test_an_error_without_a_known_meaning_keeps_its_traceback(onecopy, recipe, pool):
    def broken(op, args, when):
        raise ZeroDivisionError

    pool.current.on_operation = broken
    with pytest.raises(ZeroDivisionError):
        onecopy("post-train", "--config", recipe)


def test_runs_list_and_show(onecopy, finished):
    code, out, _ = onecopy("runs", "list", "--root", finished.root)
    assert code == 0 and "sums" in out and "post-train" in out
    code, out, _ = onecopy("runs", "show", "sums", "--root", finished.root)
    assert code == 0
    assert "checkpoints: 2, 4" in out and "accuracy" in out and "kl" not in out
    code, out, _ = onecopy("runs", "show", f"{finished.root}/sums", "--json")
    assert json.loads(out)["updates"] == 4


def test_rollouts_show(onecopy, finished):
    code, out, _ = onecopy("rollouts", "show", "sums", "--root", finished.root, "--step", 0, "--best", 1, "--worst", 1)
    assert code == 0
    assert "reward 1.000" in out and "reward 0.000" in out and "mean -0.500, lowest -0.500" in out
    code, out, _ = onecopy("rollouts", "show", "sums", "--root", finished.root, "--step", 0, "--json")
    assert len(json.loads(out)) == 6


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (("runs", "show", "absent"), "no run 'absent'"),
        (("rollouts", "show", "sums", "--step", "9"), "step 9"),
        (("rollouts", "show", "sums", "--step", "-1"), "count from 0"),
        (("export", "sums", "--step", "3", "--to", "x"), "has no checkpoint of step 3 (saved are 2, 4)"),
        (("runs", "show", "../up"), "no run 'up'"),
    ],
)
def test_what_is_not_there(onecopy, finished, arguments, reason):
    code, _, err = onecopy(*arguments, "--root", finished.root)
    assert code == 2
    assert len(err.splitlines()) == 1 and reason in err


def test_no_runs_yet(onecopy, tmp_path):
    code, out, _ = onecopy("runs", "list", "--root", tmp_path / "none")
    assert code == 0 and "no runs in" in out
    assert not (tmp_path / "none").exists()


def test_export_runs_in_a_process_of_its_own(onecopy, finished, monkeypatch):
    commands = []

    class Done:
        returncode = 0

    monkeypatch.setattr("flows.cli.export.subprocess.run", lambda command: commands.append(command) or Done)
    assert onecopy("export", "sums", "--to", "out", "--root", finished.root)[0] == 0
    assert commands[0][1:] == [
        "-m", "engine.weights.export", "--run", f"{finished.root}/sums", "--step", "4", "--to", "out", "--role", "actor",
    ]  # fmt: skip


class SelfCheck:
    """The engine's check as `subprocess.run` returns it."""

    returncode = 0
    stderr = ""

    def __init__(self, *records, stdout=None):
        self.stdout = json.dumps(records) if stdout is None else stdout


DEVICES = {"name": "devices", "ok": True, "result": {"cpu_threads": 2, "gpus": []}, "seconds": 0.1}
BROKEN = {
    "name": "actor",
    "ok": False,
    "error": "ImportError: no megatron",
    "mend": "run infra/install.sh",
    "seconds": 1,
}


def test_doctor(onecopy, monkeypatch, tmp_path):
    monkeypatch.setattr("flows.cli.doctor.subprocess.run", lambda *args, **kwargs: SelfCheck(DEVICES))
    code, out, _ = onecopy("doctor", "--json", "--root", tmp_path / "runs")
    report = json.loads(out)
    assert code == 0 and report["ok"]
    details = {finding["name"]: finding["detail"] for finding in report["findings"]}
    assert details["engine: devices"] == "cpu_threads 2, gpus none (0.1 s)"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "answer, line",
    [
        (SelfCheck(DEVICES, BROKEN), "MISSING engine: actor: ImportError: no megatron; run infra/install.sh"),
        (SelfCheck(stdout="Killed"), "MISSING engine: exit code 0; run infra/install.sh cpu (or cuda)"),
    ],
)
def test_doctor_names_what_is_missing_and_the_mend(onecopy, monkeypatch, tmp_path, answer, line):
    monkeypatch.setattr("flows.cli.doctor.subprocess.run", lambda *args, **kwargs: answer)
    code, out, _ = onecopy("doctor", "--root", tmp_path / "runs")
    assert code == 1
    assert line in out.splitlines()


def test_doctor_names_an_unreachable_server_and_a_bad_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("flows.cli.doctor.subprocess.run", lambda *args, **kwargs: SelfCheck())
    (tmp_path / "file").write_text("")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        findings = {finding.name: finding for finding in examine(str(tmp_path / "file" / "runs"))}
    assert not findings["prefect server"].ok and "unset PREFECT_API_URL" in findings["prefect server"].mend
    assert not findings["storage"].ok


def test_usage_errors_exit_with_2(onecopy):
    for arguments in ((), ("pool",), ("post-train", "--nonsense")):
        with pytest.raises(SystemExit) as caught:
            onecopy(*arguments)
        assert caught.value.code == 2


def test_pool_arguments_are_checked_before_anything_starts(onecopy):
    code, _, err = onecopy("pool", "up", "--ranks", "0")
    assert (code, err) == (2, "onecopy: --ranks: must be at least 1, not 0\n")
    code, _, err = onecopy("pool", "up", "--name", "Bad Name", "--port", "80")
    assert code == 2 and len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("last_line", "code"), [("storage.filesystem.StorageError: disk full", 2), ("KeyError: 'x'", 1)]
)
def test_a_full_disk_on_a_rank_is_refused_like_one_here(last_line, code):
    error = OperationFailed(
        "generate failed on rank 0", rank=0, remote_traceback=f"Traceback …\n  File …\n{last_line}\n"
    )
    assert explain(error)[0] == code
