#!/bin/sh
# Makes a virtual environment. Debian and Ubuntu ship python3 without what `python3 -m venv` needs; as root, or with
# sudo that asks no password, it is installed.
#
#   deploy/make-venv.sh VENV_DIR
set -eu

venv=$1
python=${PYTHON:-python3}

say() { echo "make-venv: $*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "$python is not Python 3.11 or later; set PYTHON to one that is"
    exit 1
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ]; then
        as_root=
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=sudo
    else
        say "Python's venv module is absent; install it (Debian, Ubuntu: apt-get install python3-venv)"
        exit 1
    fi
    say "installing python$version-venv"
    $as_root apt-get -q update >&2
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y install "python$version-venv" >&2
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
