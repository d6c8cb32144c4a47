#!/bin/sh
# Get the servers that `make bench` compares the gateway with: nginx from the packages of Debian or Ubuntu (downloaded
# and unpacked, not installed: no service starts) into .work/bench-nginx, and vllm-router's wheel into .work/bench-venv,
# which is its own because its dependencies are. Needs no root. What is there already is left.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
work=${HEDDLE_WORK:-$here/.work}
router=vllm-router==0.1.17

say() { echo "get-bench-peers: $*" >&2; }

get_nginx() {
    scratch=$(mktemp -d "$work/bench-nginx.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    chmod 755 "$scratch"
    # Private package lists: the system's may be absent (images of containers) or stale.
    mkdir -p "$scratch/apt/lists/partial" "$scratch/apt/archives/partial"
    set -- -o "Dir::State::lists=$scratch/apt/lists" -o "Dir::Cache=$scratch/apt" -o Debug::NoLocking=1
    apt-get "$@" --quiet --quiet update
    missing=$(apt-get "$@" --simulate --no-install-recommends install nginx |
        awk '$1 == "Inst" && $2 ~ /^(nginx|lib)/ { print $2 }')
    # shellcheck disable=SC2086
    (cd "$scratch" && apt-get "$@" --quiet --quiet download $missing)
    for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$scratch/tree"; done
    libraries=$(cd "$scratch/tree" && find . -name '*.so.*' -exec dirname {} \; | sort -u | sed 's|^\.|$here|' | paste -s -d : -)
    {
        echo '#!/bin/sh'
        echo 'here=$(cd "$(dirname "$0")" && pwd)'
        [ -z "$libraries" ] || echo "export LD_LIBRARY_PATH=\"$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\""
        echo 'exec "$here/usr/sbin/nginx" "$@"'
    } >"$scratch/tree/nginx"
    chmod +x "$scratch/tree/nginx"
    "$scratch/tree/nginx" -v
    rm -rf "$work/bench-nginx"
    mv "$scratch/tree" "$work/bench-nginx"
}

mkdir -p "$work"
[ -x "$work/bench-nginx/nginx" ] || get_nginx
if [ ! -x "$work/bench-venv/bin/vllm-router" ]; then
    "${PYTHON:-python3}" -m venv "$work/bench-venv"
    "$work/bench-venv/bin/python" -m pip --quiet --disable-pip-version-check install "$router"
fi
say "nginx and $router are in $work"
