"""Limits of the stores, each with the reason of its default."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How much is kept, how much may wait, and how long anything is waited for."""

    max_turns_kept: int = 256
    """Newest turns kept per trajectory: coding agents reach 200 turns; older history only costs memory."""

    namespace: str = "heddle:"
    """Prefix of the Redis keys. Each fleet (cell) that shares a server needs its own."""

    max_pending_trajectories: int = 100_000
    """Trajectories that may wait for an absent Redis: ten times the largest rollout that a gateway is sized for."""

    max_pending_bytes: int = 256 * 2**20
    """Bytes that may wait, counted separately for what is being sent and what comes next: a small part of a gateway
    host."""

    batch_bytes: int = 2**20
    """Largest write sent at once: Redis serves nobody else while it applies one, and 1 MiB takes it about 3 ms."""

    piece_pause_s: float = 0.005
    """Pause between two writes of the embedded store's pieces: puts made meanwhile go to the thread, and into the file,
    together, which costs 100 us each time. A turn that ends with tokens just after another one waits for it."""

    load_batch: int = 200
    """Trajectories read at once, for the same reason as `batch_bytes`."""

    op_timeout_s: float = 2.0
    """A Redis that has not answered by then counts as away; a healthy one answers a batch in milliseconds."""

    connect_timeout_s: float = 1.0
    """Time to connect: a LAN takes a millisecond, and a lost SYN is sent again after one second."""

    backoff_min_s: float = 0.05
    """First pause after a fault: a restarted server is back in a fraction of a second."""

    backoff_max_s: float = 2.0
    """Longest pause: how late a gateway may notice that Redis is back."""

    check_every_s: float = 5.0
    """How often an idle store checks that Redis is there and still has its data."""

    close_timeout_s: float = 5.0
    """How long `close` waits for pending puts: less than the ten seconds that supervisors give a process."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            assert value if isinstance(value, str) else value > 0, f"{name} must not be empty or zero: {value!r}"
