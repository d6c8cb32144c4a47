"""A private, real redis-server for tests: it has its own directory and port, and tests may kill and restart it.

Other tests use it by importing the fixture: `from tests.support.redis_server import redis_server`.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.children import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 10.0
"""A redis-server is ready in about 20 ms; a loaded machine gets 500 times as long."""


PATIENT: dict[str, Any] = {"connect_timeout_s": 30.0, "op_timeout_s": 30.0}
"""Store settings for tests that time nothing: each write waits for the disk, which others may keep busy for seconds."""


class RedisServer:
    """One redis-server process on a fixed port of 127.0.0.1, with these further options; every write is synced to its
    append-only file.
    """

    def __init__(self, binary: str, directory: Path, *options: str) -> None:
        self.binary = binary
        self.options = options
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None

    def url(self, database: int = 0) -> str:
        """The store URL of one of its sixteen databases."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server and return when it answers."""
        assert self._process is None, "already running"
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always", *self.options]
        self._process = subprocess.Popen(
            [self.binary, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        # The server logs when it is ready, so there is no polling.
        assert self._process.stdout
        log_lines = []
        for line in self._process.stdout:
            log_lines.append(line)
            if "Ready to accept connections" in line:
                return
        self.kill()
        pytest.fail(f"{self.binary} did not start:\n{''.join(log_lines)}", pytrace=False)

    def kill(self) -> None:
        """Send SIGKILL; its append-only file stays."""
        if self._process:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout
            self._process.stdout.close()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It accepts connections but answers nothing until exit."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def restart(self, *, empty: bool = False) -> None:
        """Start it again on the same port, with its data or without."""
        self.kill()
        if empty:
            shutil.rmtree(self.directory)
            self.directory.mkdir()
        self.start()


def find_redis_server() -> str:
    """The path of a redis-server that deploy/get-redis.sh finds without downloading one; fails the test if there is
    none."""
    script = ROOT / "deploy" / "get-redis.sh"
    environment = {**os.environ, "HEDDLE_REDIS_FROM": " "}
    found = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    if found.returncode:
        pytest.fail("there is no redis-server; get one with: deploy/get-redis.sh", pytrace=False)
    return found.stdout.strip()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A running server for the whole session. A test that kills it must restart it."""
    # Not pytest's tmp_path, which stays after the run, and may be too long or shared.
    with tempfile.TemporaryDirectory(prefix="heddle-redis-") as directory:
        server = RedisServer(find_redis_server(), Path(directory) / "data")
        server.directory.mkdir()
        server.start()
        yield server
        server.kill()
