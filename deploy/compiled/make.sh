#!/bin/sh
# Builds a wheel of Heddle in which what takes part in every turn is machine code, installs it into a new environment,
# and runs the tests of the scheduler and of the gateway on that. Needs a C compiler and Python's headers. The checkout
# stays as it is.
#
#   deploy/compiled/make.sh VENV_DIR [WHEEL_DIR]
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
started=$(date +%s)
say() { echo "compiled: $* ($(($(date +%s) - started)) s)"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheels=${2:+$(mkdir -p "$2" && cd "$2" && pwd)}
rm -rf "$1"
"$here/deploy/make-venv.sh" "$1"
venv=$(cd "$1" && pwd)
install() { "$here/deploy/install-packages.sh" "$venv" -c "$here/constraints.txt" "$@"; }

# What the sources are now, committed or not.
mkdir "$work/sources" "$work/wheel" "$work/away"
(cd "$here" && git ls-files -z --cached --others --exclude-standard | xargs -0 tar -c --ignore-failed-read) | tar -x -C "$work/sources"
say "installing what Heddle needs into $1"
# First as it is: the compiler wants the types of all that is imported.
install 'setuptools>=77' wheel mypy "$work/sources"
rm -rf "$work/sources/build" "$work/sources/"*.egg-info
cp "$here/deploy/compiled/setup.py" "$work/sources"
say "compiling, which takes some minutes"
"$venv/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$work/wheel" "$work/sources"
install --force-reinstall --no-deps "$work/wheel/"*.whl
install anthropic httpx httpx2 hypothesis pyarrow pytest pytest-asyncio pytest-timeout

# Away from the sources, which would be imported instead.
cd "$work/away"
ln -s "$here/tests" "$here/scenarios" "$here/docs" "$here/deploy" .
cp "$here/pyproject.toml" .
"$venv/bin/python" -c 'import gateway.turns.hot as hot; assert hot.__file__.endswith(".so"), hot.__file__'
say "testing"
REDIS_SERVER=$("$here/deploy/get-redis.sh") "$venv/bin/python" -m pytest -p no:cacheprovider tests/scheduling tests/gateway
"$venv/bin/python" -m tests.bench.test_scheduler_speed heddle
[ -z "$wheels" ] || cp "$work/wheel/"*.whl "$wheels"
say "Heddle as machine code is in $venv"
