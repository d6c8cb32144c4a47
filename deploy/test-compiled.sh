#!/bin/sh
# Runs the scheduler's tests, and its speed, on an installed Heddle whose scheduler is compiled. They run in a folder
# without the sources, which would be imported instead.
#
#   deploy/test-compiled.sh VENV_DIR
set -eu

venv=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")/.." && pwd)
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
ln -s "$here/tests" "$here/scenarios" "$here/docs" "$away"
cp "$here/pyproject.toml" "$away"
cd "$away"
"$venv/bin/python" -c 'import scheduling.scheduler as s; assert s.__file__.endswith(".so"), s.__file__'
"$venv/bin/python" -m pytest -p no:cacheprovider tests/scheduling
"$venv/bin/python" -m tests.bench.test_scheduler_speed heddle heddle-paper rank-following
