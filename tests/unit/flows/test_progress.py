"""The live line and the plain lines."""

import io

from flows.progress import Progress
from storage.manifest import Manifest


class Terminal(io.StringIO):
    def isatty(self):
        return True


def manifest(stage, **metrics):
    return Manifest(
        run="r", step=0, stage=stage, fingerprint="f", weight_version=0, metrics=metrics, started_at="", finished_at=""
    )


STEP = [manifest("rollout", tokens_per_second=1234.5, seconds=2.0), manifest("reward", reward=0.25, success=0.2)]


def test_one_plain_line_a_step():
    stream = io.StringIO()
    progress = Progress(4, stream)
    progress.begin(0, "rollout")
    progress.operation({"ranks": [{"done": 1, "total": 2}]})
    progress.finished(0, STEP)
    progress.close()
    (line,) = stream.getvalue().splitlines()
    assert line == "step 1/4 · reward 0.250 · success 0.20 · 1234 tokens/s · rollout 2.0 s · 0 s left"


def test_a_live_line_is_redrawn_in_place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    progress = Progress(4, stream)
    progress.begin(0, "rollout")
    progress._drawn_at = 0.0
    progress.operation({"ranks": [{"done": 1, "total": 2}, {"done": 1, "total": 2}]})
    progress.note("a note")
    progress.finished(0, STEP)
    progress.begin(1, "rollout")
    progress.close()
    text = stream.getvalue()
    assert "\rstep 1/4 · rollout · 2/4" in text
    assert text.endswith("\rstep 2/4 · rollout · reward 0.250 · 1234 tokens/s · 0 s left\n")
    assert text.count("\n") == 2


def test_a_live_line_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    Progress(4, stream).begin(0, "rollout")
    assert stream.getvalue() == "\rstep 1/4 · "


def test_time_left_follows_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("flows.progress.time.monotonic", lambda: now[0])
    progress = Progress(10, io.StringIO())
    now[0] = 200.0  # starting the pool does not count
    progress.begin(4, "rollout")
    now[0] = 206.0
    progress.finished(4, [])
    assert progress.seconds_left(4) == 30.0


def test_metrics_that_are_missing_are_left_out():
    stream = io.StringIO()
    Progress(1, stream).finished(0, [manifest("reward", failed=3.0)])
    assert stream.getvalue() == "step 1/1 · 0 s left\n"
