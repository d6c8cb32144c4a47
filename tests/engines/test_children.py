"""Processes of our own: where their servers listen."""

import random

from engines.children import free_port


def test_processes_that_are_seeded_alike_draw_different_ports() -> None:
    """Two test processes began a Redis within properties, whose dice are seeded, and both took the same port."""
    state = random.getstate()
    try:
        drawn = []
        for _ in range(2):
            random.seed(0)
            drawn.append([free_port() for _ in range(3)])
    finally:
        random.setstate(state)
    assert drawn[0] != drawn[1]
