"""What stands in the environment when Prefect is imported, seen from a fresh process."""

import os
import subprocess
import sys

HEAVY = ("torch", "vllm", "megatron", "transformers", "ray")


def run(code, tmp_path, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    clean |= {"HOME": str(tmp_path), "ONECOPY_HOME": str(tmp_path / "home"), "PYTHONPATH": os.getcwd(), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def test_flows_stay_light_and_prefect_is_private(tmp_path):
    code = f"""
import sys, flows.post_train, flows.sft, flows.cli
print([m for m in {HEAVY} if m in sys.modules])
from prefect.settings import get_current_settings as s
print(s().home, s().results.local_storage_path, s().server.analytics_enabled, s().client.max_retries)
"""
    out, err = run(code, tmp_path)
    home = tmp_path / "home" / "prefect"
    assert out.splitlines() == ["[]", f"{home} {home}/storage False 10"]
    assert err == ""


def test_what_the_user_set_stands(tmp_path):
    code = "import flows, os; print(os.environ['PREFECT_HOME'], os.environ['PREFECT_CLIENT_MAX_RETRIES'])"
    out, _ = run(code, tmp_path, PREFECT_HOME="/elsewhere", PREFECT_CLIENT_MAX_RETRIES="3")
    assert out == "/elsewhere 3"


def test_a_users_prefect_profile_is_used(tmp_path):
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect" / "profiles.toml").write_text("")
    out, _ = run("import flows, os; print(os.environ.get('PREFECT_HOME'))", tmp_path)
    assert out == "None"
