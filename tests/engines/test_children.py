"""The ports of child processes."""

import random

from engines.children import free_port


def test_free_port_ignores_the_seed_of_random() -> None:
    """Two test processes started a Redis inside property tests, which seed `random`, and both took the same port."""
    state = random.getstate()
    try:
        drawn = []
        for _ in range(2):
            random.seed(0)
            drawn.append([free_port() for _ in range(3)])
    finally:
        random.setstate(state)
    assert drawn[0] != drawn[1]
