#!/bin/sh
# Print the directory of the Node.js clients that the tests run (marker `npm`), getting them where they are absent.
# They lie in .work/npm; HEDDLE_WORK moves .work. Node.js 18 or later and npm come from the system; where there are
# none, root gets them from the packages of Debian or Ubuntu, and anybody else is told what to install.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
home=${HEDDLE_WORK:-$here/.work}/npm
# The last major versions that run on the Node.js of Debian and Ubuntu; openai 7 asks for 22, jsdom 27 for 20.
openai=6.49.0
jsdom=26.1.0

say() { echo "get-node-clients: $*" >&2; }

has_node() {
    command -v npm >/dev/null && command -v node >/dev/null &&
        [ "$(node -p 'process.versions.node.split(".")[0]')" -ge 18 ]
}

if ! has_node; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "Node.js 18 or later and npm are needed: as root, apt-get install nodejs npm"
        exit 1
    fi
    say "installing nodejs and npm"
    apt-get -qq update >&2
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y nodejs npm >&2
    has_node || {
        say "the packages' Node.js is older than 18"
        exit 1
    }
fi

version_of() { sed -n 's/.*"version": "\(.*\)".*/\1/p' "$home/node_modules/$1/package.json" 2>/dev/null || true; }
if [ "$(version_of openai) $(version_of jsdom)" != "$openai $jsdom" ]; then
    mkdir -p "$home"
    say "installing openai@$openai, jsdom@$jsdom"
    npm install --prefix "$home" --no-save --no-audit --no-fund --ignore-scripts --loglevel=error \
        "openai@$openai" "jsdom@$jsdom" >&2
fi
echo "$home"
