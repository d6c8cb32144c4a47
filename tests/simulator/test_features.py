"""Engine features beyond the basics: how long each takes, computed by hand."""

from dataclasses import replace

import pytest

from engines.profiles import load_profile
from engines.simulated.features import Features, HostTier, Speculation
from engines.simulated.model import SimulatedEngine
from engines.simulated.sequence import SimulatedSequence

TP1 = load_profile("qwen3-14b-h100-tp1")


def own(name: str):  # type: ignore[no-untyped-def]
    """One piece that grows."""
    return lambda num_tokens: [(name, num_tokens)]


def run_s(engine: SimulatedEngine, at: float, *sequences: SimulatedSequence) -> float:
    """Seconds until all sequences have ended."""
    for sequence in sequences:
        engine.submit(at, sequence)
    end = at
    while (due := engine.next_event_at()) is not None:
        end = due
        engine.advance(due)
    return end - at


def decoding_s(speculation: Speculation | None, number: int) -> float:
    """Time of like sequences without their prefill."""
    times = [
        run_s(
            SimulatedEngine(TP1, features=Features(speculation)),
            0.0,
            *(SimulatedSequence(f"{n}", 100, num_tokens, own(f"{n}")) for n in range(number)),
        )
        for num_tokens in (1, 1001)
    ]
    return times[1] - times[0]


def test_speculation_speeds_up_small_batches_only() -> None:
    """Up to `max_batch` sequences take the time divided by the speed-up; one more takes the plain time."""
    speculation = Speculation(speed_up=1.6, max_batch=3)
    for number in (1, 3):
        assert decoding_s(speculation, number) == pytest.approx(decoding_s(None, number) / 1.6)
    assert decoding_s(speculation, 4) == decoding_s(None, 4)


def test_speculation_does_not_speed_up_prefill() -> None:
    """In a step in which no sequence decodes, there is nothing to draft."""
    prompt = SimulatedSequence("s", 30_000, 1, own("s"))
    drafting, plain = (run_s(SimulatedEngine(TP1, features=Features(s)), 0.0, prompt) for s in (Speculation(), None))
    assert drafting == plain


@pytest.mark.parametrize("bytes_per_s", [5e9, 50e9])
def test_evicted_kv_comes_back_from_the_host_at_its_bandwidth(bytes_per_s: float) -> None:
    """The next turn of an evicted context pays for the copy; without the host tier, for the prefill."""
    shape = replace(TP1, kv_capacity_tokens=20_000)
    first = SimulatedSequence("first", 10_000, 1, own("a"))
    crowd = SimulatedSequence("crowd", 19_000, 1, own("b"))
    again = SimulatedSequence("again", 10_016, 1, own("a"))

    def again_s(features: Features) -> tuple[float, int]:
        engine = SimulatedEngine(shape, features=features)
        run_s(engine, 0.0, first)
        run_s(engine, 100.0, crowd)
        kept = engine.num_cached(199.0, [("a", 10_000)])
        return run_s(engine, 200.0, again), kept

    copied_s, kept = again_s(Features(host_tier=HostTier(10**6, bytes_per_s)))
    computed_s, _ = again_s(Features())
    assert kept < 2_000  # tokens of it that were not evicted
    copy_s = (10_000 - kept) * shape.kv_bytes_per_token / bytes_per_s
    step_s = shape.decode_step_s(0, 0)
    assert copied_s - step_s == pytest.approx(copy_s + shape.prefill_s(16, 10_000), rel=0.02)
    assert computed_s - 2 * step_s == pytest.approx(shape.prefill_s(10_016 - kept, kept), rel=0.02)  # in two chunks


def test_a_full_host_tier_drops_the_oldest_evicted_context() -> None:
    """Of two evicted contexts the older one is computed again."""
    engine = SimulatedEngine(
        replace(TP1, kv_capacity_tokens=10_000), features=Features(host_tier=HostTier(10_000, 1e15))
    )
    for at, name in enumerate("abc"):
        run_s(engine, 100.0 * at, SimulatedSequence(name, 9_500, 1, own(name)))
    assert run_s(engine, 300.0, SimulatedSequence("b again", 9_500, 1, own("b"))) < 0.1
    assert run_s(engine, 400.0, SimulatedSequence("a again", 9_500, 1, own("a"))) > 0.3


def test_adopted_kv_is_a_prefix_hit_if_there_is_room() -> None:
    """It need not be computed again, but it takes no room from running sequences."""
    engine = SimulatedEngine(replace(TP1, kv_capacity_tokens=12_000))
    engine.adopt(0.0, [("a", 10_000)])
    assert engine.num_cached(0.0, [("a", 10_000)]) == 10_000
    assert run_s(engine, 1.0, SimulatedSequence("a", 10_001, 1, own("a"))) < 0.05
    engine.submit(10.0, SimulatedSequence("busy", 9_000, 100, own("b")))
    engine.adopt(10.0, [("c", 4_000)])
    assert engine.num_cached(10.0, [("c", 4_000)]) == 0
    assert engine.counts().kv_usage <= 1


def test_adopted_kv_takes_the_room_of_cached_contexts() -> None:
    """An engine never holds more than its capacity, and a running sequence can evict all that was adopted."""
    contexts = [[(name, 5_000)] for name in "abc"]
    engine = SimulatedEngine(replace(TP1, kv_capacity_tokens=12_000))
    for at, pieces in enumerate(contexts):
        engine.adopt(float(at), pieces)
    kept = [engine.num_cached(3.0, pieces) for pieces in contexts]
    assert kept[1:] == [5_000, 5_000] and 0 < kept[0] <= 2_000
    assert run_s(engine, 4.0, SimulatedSequence("all", 11_900, 100, own("d"))) > 0
    assert sum(engine.num_cached(1e6, pieces) for pieces in contexts) <= 12
