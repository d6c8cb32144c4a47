"""The soak finds what grows, and nothing else."""

from dataclasses import replace
from pathlib import Path

from loadtest.soak import Sample, grown, soak, stored_bytes

FLAT = Sample(
    memory_bytes=1e8,
    descriptors=50,
    processes=2,
    metric_series=100,
    trajectories=300,
    store_bytes=4e7,
    event_log_bytes=2e6,
)


def test_figures_that_grow_from_third_to_third_are_named() -> None:
    """For example, a kilobyte a turn in 20,000 turns, or a connection for each of 50 clients that left."""
    before = [replace(FLAT, memory_bytes=1e8 + 1e5 * second, descriptors=50 + second // 4) for second in range(200)]
    after = [replace(FLAT, memory_bytes=1e8 + 1e5 * second, descriptors=50 + second // 4) for second in range(200, 400)]
    assert grown(before, after) == ["memory_bytes", "descriptors"]


def test_a_passing_increase_is_not_a_leak() -> None:
    """Engines die and rollouts begin: for some seconds there is more of everything."""
    before = [FLAT] * 200
    after = [replace(FLAT, descriptors=300, trajectories=900, processes=3) if n % 4 == 0 else FLAT for n in range(200)]
    assert grown(before, after) == []


def test_the_log_of_the_store_counts_once_it_should_have_been_emptied(tmp_path: Path) -> None:
    """A soak of three minutes reported that the store had grown: from 17 to 21 MB, all of them SQLite's log, which is
    begun anew when nobody happens to read it, and emptied at 32 MB at the latest."""

    def seen(log_bytes: int, table_bytes: int = 1_500_000) -> list[Sample]:
        for name, size in {"": table_bytes, "-wal": log_bytes, "-pieces": 4_096, "-pieces-wal": 20_000}.items():
            with (tmp_path / f"store.sqlite3{name}").open("wb") as file:
                file.truncate(size)
        return [replace(FLAT, store_bytes=stored_bytes(tmp_path))]

    assert grown(seen(12_000_000), seen(35_000_000)) == []
    assert grown(seen(35_000_000), seen(160_000_000)) == ["store_bytes"]
    assert grown(seen(35_000_000), seen(35_000_000, table_bytes=1_700_000)) == ["store_bytes"]


async def test_the_soak_samples_a_working_gateway(tmp_path: Path) -> None:
    """From outside, its resources are seen, and turns are served. A run of minutes tells that it works."""
    told: list[str] = []
    samples, num_turns = await soak(0.1, tmp_path, told.append)
    assert " of 6 s: " in told[0]
    assert num_turns > 0
    last = samples[-1]
    assert last.trajectories > 0 and last.store_bytes > 0 and last.event_log_bytes > 0
    assert last.metric_series > 50 and last.descriptors > 10 and last.memory_bytes > 2e7
