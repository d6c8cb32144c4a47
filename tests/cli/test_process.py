"""How the process of a command ends: interrupted, without a reader, without standard output, without permission."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest

from tests.support.toy_chat import ToyChat, serve

ROOT = Path(__file__).parents[2]
FEW = ("predictor", "evaluate", "--law", "coding", "--trajectories", "25", "--predictor", "siblings")
INTERRUPTED = """
import os, signal, sys
from heddle.__main__ import main
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process inherits that it is ignored
sys.argv = ["heddle", "simulate", "--help", sys.argv[1]]
sys.exit(main())
"""
SHORT = ("simulate", "coding-light-14b", "--tp", "4", "--policy", "verl", "--seed", "1", "--trajectories", "16")
PIPE_BYTES = 64 * 1024
FULL = """
import resource, signal, sys
from heddle.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # like a full disk, except for the error's number
sys.exit(main())
"""
AS_NOBODY = """
import argparse, os, sys
from heddle.arguments import out_file
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.seteuid(65_534)
try:
    out_file(sys.argv[2])
except argparse.ArgumentTypeError as error:
    sys.stderr.write(str(error))
"""


def ended(*arguments: str, stdout: int = subprocess.PIPE, shell: str = "", **more: str) -> tuple[int, str]:
    """The exit status of a Python process, and what it wrote to standard error."""
    command = [sys.executable, *arguments]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("module", ["uvloop", "heddle.simulate"])
def test_an_interrupt_while_modules_are_imported_leaves_no_traceback(module: str) -> None:
    """Imports take a second or two, in which people notice a typing error."""
    assert ended("-c", INTERRUPTED, module) == (130, "")


@pytest.mark.parametrize(
    "program",
    [
        "loadtest.soak",
        "heddle.loop --gpus 8 --trajectories 8 --work-dir {}",
        "loadtest.bench.run --sections answers --only direct --repeats 1 --seconds 0.1 --write {}/page",
    ],
)
def test_an_interrupted_measurement_leaves_no_traceback(program: str, tmp_path: Path) -> None:
    """It takes minutes, so many are interrupted."""
    os.mkfifo(tmp_path / "page")  # which nobody writes: the benchmark waits there
    with subprocess.Popen(
        [sys.executable, "-m", *program.format(tmp_path).split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path), "HEDDLE_WORK": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        running.send_signal(signal.SIGINT)
        assert b"Traceback" not in running.stdout.read()
    assert running.returncode == 130


@pytest.mark.parametrize("setting", ['event_log = "é.jsonl"', 'store = "sqlite:é.sqlite3"'])
def test_a_path_that_the_locale_cannot_express_is_refused_with_one_line(setting: str, tmp_path: Path) -> None:
    """The settings' file is UTF-8, whatever the locale; the start ended with a traceback and status 1."""
    file = tmp_path / "heddle.toml"
    file.write_text(f'{setting}\nhost = "127.0.0.1"\nport = 0\n', encoding="utf-8")
    ascii_only = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    said = "is no path in this locale, whose encoding is ascii; try LC_ALL=C.UTF-8"
    started = ended("-m", "heddle", "serve", "--config", str(file), **ascii_only)
    assert started == (2, f"heddle serve: setting {setting.split()[0]}: {said}\n")


@pytest.mark.parametrize("verb", [FEW, SHORT], ids=lambda verb: verb[0])
def test_a_reader_that_has_read_enough_is_no_error(verb: tuple[str, ...]) -> None:
    """`heddle predictor evaluate ... | head`: no words about the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended("-m", "heddle", *verb, stdout=writer) == (141, "")
    finally:
        os.close(writer)


def test_a_reader_that_has_read_enough_costs_no_file(tmp_path: Path) -> None:
    """`heddle simulate --json FILE | head`: what was played is written before it is shown."""
    out = tmp_path / "runs.json"
    os.mkfifo(out)
    with subprocess.Popen(
        [sys.executable, "-m", "heddle", *SHORT[:-1], "400", "--json", str(out)], stdout=subprocess.PIPE, cwd=ROOT
    ) as running:
        assert running.stdout is not None and running.stdout.readline()
        with out.open("rb") as fifo:
            running.stdout.close()
            written = fifo.read()
    assert len(orjson.loads(written)["runs"]) == 1
    assert len(written) > PIPE_BYTES, "so the command still wrote it when its reader went"
    assert running.returncode == 141


@pytest.mark.parametrize(
    "verb",
    [
        (*SHORT, "--json", "{out}"),
        ("predictor", "train", "--law", "coding", "--trajectories", "25", "--out", "{out}"),
        ("import", "{trace}", "--out", "{out}"),
    ],
    ids=lambda verb: verb[0],
)
def test_a_disk_that_is_full_at_the_end_costs_no_earlier_result(verb: tuple[str, ...], tmp_path: Path) -> None:
    """The file to write was emptied first: what an earlier run had made was gone, and there was nothing new."""
    out, trace = tmp_path / "out", tmp_path / "trace.jsonl"
    out.write_text("earlier")
    call = '{"timestamp": 0, "input_length": 512, "output_length": 9, "hash_ids": [1]}\n'
    trace.write_text(call * 9)
    status, said = ended("-c", FULL, *(part.format(out=out, trace=trace) for part in verb))
    assert (status, said) == (2, f"heddle {verb[0]}{' train' * (verb[0] == 'predictor')}: [Errno 27] File too large\n")
    assert out.read_text() == "earlier"
    assert {file.name for file in tmp_path.iterdir()} == {"out", "trace.jsonl"}


def test_a_full_disk_is_reported_with_one_line() -> None:
    """`heddle ... > FILE`."""
    full = ended("-m", "heddle", "serve", "--settings", shell=">/dev/full")
    assert full == (1, "heddle: cannot write: No space left on device\n")


def test_a_command_works_without_standard_output() -> None:
    """As a service manager or a script may start it."""
    assert ended("-m", "heddle", *FEW, shell=">&-") == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_with_connections_works_without_standard_files(closed: str) -> None:
    """Its first sockets had their numbers, and libuv ended the process as it closed one: a gateway at its end, before
    it had written what it knew."""
    few = ("--law", "math", "--trajectories", "2", "--scale", "0.01", "--client", "raw")
    with serve(ToyChat()) as url:
        status, said = ended("-m", "heddle", "replay", "--base-url", f"{url}/v1", *few, shell=closed)
    assert (status, "Assertion" in said) == (0, False)


def test_names_that_standard_output_cannot_express_are_written_otherwise(tmp_path: Path) -> None:
    """A server may have another locale than its users. The work was done, and then there was a traceback."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 9, "hash_ids": [1]}\n')
    command = ("-m", "heddle", "import", str(trace), "--out", str(tmp_path / "läufe.jsonl"))
    assert ended(*command, PYTHONIOENCODING="ascii") == (0, "")


def test_a_file_that_may_not_be_written_is_refused_before_the_work() -> None:
    """Be it for its folder, or for a folder on the way that may not be entered."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for sub in ("read_only", "closed", "closed/inner"):
            (folder / sub).mkdir()
        (folder / "read_only").chmod(0o555)
        (folder / "closed").chmod(0o700 if os.geteuid() == 0 else 0o000)
        errors = [ended("-c", AS_NOBODY, name, file)[1] for file in ("read_only/a.json", "closed/inner/a.json")]
        (folder / "closed").chmod(0o700)
    assert errors == [
        "no permission to write 'read_only/a.json'",
        "must be a file in an existing folder, not 'closed/inner/a.json'",
    ]
