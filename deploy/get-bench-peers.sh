#!/bin/sh
# Get the servers that `make bench` compares the gateway with: nginx and haproxy from the packages of Debian or Ubuntu
# (downloaded and unpacked, not installed: no service starts) into .work/bench-nginx and .work/bench-haproxy, and the
# wheels of the routers into .work/bench-venv, which is their own because their dependencies are. Needs no root. What is
# there already is left; what cannot be had is said and left out, for the benchmark says so in its tables.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
work=${HEDDLE_WORK:-$here/.work}
routers="vllm-router==0.1.17 sglang-router==0.3.2 smg==1.13.0"

say() { echo "get-bench-peers: $*" >&2; }

# Unpack the package $1 with the libraries that this machine lacks, behind a wrapper $work/bench-$1/$1 that finds them.
get_package() {
    scratch=$(mktemp -d "$work/bench-$1.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    chmod 755 "$scratch"
    package=$1
    # Private package lists: the system's may be absent (images of containers) or stale.
    mkdir -p "$scratch/apt/lists/partial" "$scratch/apt/archives/partial"
    set -- -o "Dir::State::lists=$scratch/apt/lists" -o "Dir::Cache=$scratch/apt" -o Debug::NoLocking=1
    apt-get "$@" --quiet --quiet update
    missing=$(apt-get "$@" --simulate --no-install-recommends install "$package" |
        awk -v own="$package" '$1 == "Inst" && ($2 ~ /^lib/ || index($2, own) == 1) { print $2 }')
    # shellcheck disable=SC2086
    (cd "$scratch" && apt-get "$@" --quiet --quiet download $missing)
    for file in "$scratch"/*.deb; do dpkg-deb -x "$file" "$scratch/tree"; done
    libraries=$(cd "$scratch/tree" && find . -name '*.so.*' -exec dirname {} \; | sort -u | sed 's|^\.|$here|' | paste -s -d : -)
    {
        echo '#!/bin/sh'
        echo 'here=$(cd "$(dirname "$0")" && pwd)'
        [ -z "$libraries" ] || echo "export LD_LIBRARY_PATH=\"$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\""
        echo "exec \"\$here/usr/sbin/$package\" \"\$@\""
    } >"$scratch/tree/$package"
    chmod +x "$scratch/tree/$package"
    "$scratch/tree/$package" -v
    rm -rf "$work/bench-$package"
    mv "$scratch/tree" "$work/bench-$package"
    rm -rf "$scratch"
    trap - EXIT
}

get_router() {
    [ -x "$work/bench-venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$work/bench-venv"
    "$work/bench-venv/bin/python" -m pip --quiet --disable-pip-version-check install "$1"
}

mkdir -p "$work"
for package in nginx haproxy; do
    # In a shell of its own, whose `set -e` an `if` would switch off.
    [ -x "$work/bench-$package/$package" ] || { set +e; (set -e; get_package "$package"); status=$?; set -e
        [ $status = 0 ] || say "$package cannot be had here"; }
done
for router in $routers; do
    name=${router%%=*}
    directory=$(echo "$name" | tr - _)
    found=$(find "$work/bench-venv/lib" -maxdepth 3 -name "$directory-${router##*=}.dist-info" 2>/dev/null | head -n 1)
    [ -n "$found" ] || get_router "$router" || say "$router cannot be had here"
done
say "what could be had is in $work"
