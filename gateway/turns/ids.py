"""Ids of turns, and of trajectories that a client does not name."""

import random

_random = random.Random()  # the system's own source is a system call each time; these ids are no secrets


def new_id() -> str:
    """An id that nobody else has: 32 hexadecimal digits."""
    return _random.randbytes(16).hex()
