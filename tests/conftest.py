"""For all tests: a busy machine may stall for seconds, so no example of a property has a deadline."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Each HTTP client reads the system's certificates when it is made: 20 to 50 ms of CPU time, and nearly every test makes
# one. No test needs them, so they are looked for in a folder that has none, once one is asked for.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a time limit of their own begin first: one that began last would leave the other cores idle."""
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


def pytest_collection_finish() -> None:
    """Exempts what was imported from garbage collection: to look through it, 300,000 objects, took a sixth of the CPU
    time of a file."""
    gc.collect()
    gc.freeze()
