#!/bin/sh
# Installs packages into a virtual environment with uv, which takes a tenth of pip's processor time. uv does not read
# pip's own configuration; where it finds no package for that reason, pip installs them.
#
#   deploy/install-packages.sh VENV_DIR ARGUMENT...     (arguments of `uv pip install` that pip also has)
set -eu

python=$1/bin/python
shift
pip="$python -m pip install -q --disable-pip-version-check"
uv=${python%python}uv
{ [ -x "$uv" ] || $pip uv==0.13.9; } && "$uv" pip install -q --python "$python" "$@" || {
    echo "install-packages: uv failed; pip tries it" >&2
    $pip "$@"
}
