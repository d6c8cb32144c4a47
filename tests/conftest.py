"""For all tests: a busy machine may stall for seconds, so no example of a property has a deadline.

Every worker imports all tests. So what takes seconds to import (Anthropic's SDK has 3,000 modules) is imported by the
tests that use it, and pytest's configuration leaves out the plugin of Schemathesis, which no test needs.
"""

import gc
import inspect
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.bounded import bounded

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Each HTTP client reads the system's certificates when it is made: 20 to 50 ms of CPU time, and nearly every test makes
# one. No test needs them, so they are looked for in a folder that has none, once one is asked for.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a time limit of their own begin first: one that began last would leave the other cores idle."""
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is a coroutine has a time limit in its own task, too. The plugin raises in whichever task runs then:
    in another one than the test's, asyncio keeps the exception, and the test goes on. This limit is a little shorter,
    so that the report shows what the test was waiting for."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        marked = item.get_closest_marker("timeout")
        item.obj = bounded(item.obj, 0.95 * float(marked.args[0] if marked else item.config.getini("timeout")))


def pytest_collection_finish() -> None:
    """Exempts what was imported from garbage collection: to look through it, 300,000 objects, took a sixth of the CPU
    time of a file."""
    gc.collect()
    gc.freeze()
