"""Ids of turns, and of trajectories that their client does not name."""

import random

_random = random.Random()  # the system's own source costs a system call each time; these ids are not secrets


def new_id() -> str:
    """A unique id: 32 hexadecimal digits."""
    return _random.randbytes(16).hex()
