"""Ids of requests, and of trajectories that their client does not name."""

import random

_random = random.Random()  # the system's own source costs a system call each time; these ids are not secrets


def new_id() -> str:
    """A unique id: 32 hexadecimal digits."""
    return _random.randbytes(16).hex()


def new_trajectory_id() -> str:
    """The id of a trajectory without a name of its client's."""
    return f"t-{new_id()[:24]}"
