"""The engine in virtual time: against a step-by-step reference, against closed forms, and rule by rule."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated.model import SimulatedEngine
from engines.simulated.prefix_cache import Piece
from engines.simulated.sequence import SequenceEvent, SimulatedSequence
from scheduling.cost import EngineProfile

from .reference_engine import ReferenceEngine

BLOCK_TOKENS = 4
CHUNK_TOKENS = 24


def profile(*, slots: int = 3, kv_capacity_tokens: int = 120, per_kv_ktoken_ms: float = 0.7) -> EngineProfile:
    """A small engine whose step is 1 ms and something for each sequence and token."""
    return EngineProfile(
        name="test",
        model="test",
        gpu="none",
        tp=1,
        slots=slots,
        kv_capacity_tokens=kv_capacity_tokens,
        kv_bytes_per_token=1,
        decode_base_ms=1.0,
        decode_per_sequence_ms=0.1,
        decode_per_kv_ktoken_ms=per_kv_ktoken_ms,
        prefill_per_ktoken_ms=20.0,
        prefill_per_ktoken2_ms=5.0,
        source="test",
    )


def blocks_of(content: str, num_shared: int = 0) -> Callable[[int], Sequence[Piece]]:
    """Blocks of one content, behind `num_shared` blocks that all contents share."""

    def pieces(num_tokens: int) -> Sequence[Piece]:
        return [(("shared" if i < num_shared else content, i), BLOCK_TOKENS) for i in range(num_tokens // BLOCK_TOKENS)]

    return pieces


def whole(content: str) -> Callable[[int], Sequence[Piece]]:
    """One growing piece, as used by a simulator without contents."""
    return lambda num_tokens: [(content, num_tokens)]


def nothing_cached(num_tokens: int) -> Sequence[Piece]:
    return ()


def run_to_end(engine: SimulatedEngine) -> list[SequenceEvent]:
    """Jumps from event to event until the engine idles."""
    events: list[SequenceEvent] = []
    while (at := engine.next_event_at()) is not None:
        events += engine.advance(at)
    return events


submissions = st.tuples(
    st.integers(0, 30),  # delay since the one before
    st.integers(1, 60),  # prompt tokens
    st.integers(1, 50),  # output tokens
    st.integers(-2, 2),  # priority
    st.sampled_from(["blocks", "blocks of a", "whole", "whole b", "none"]),
)
aborts = st.tuples(st.integers(1, 30), st.integers(0, 12))


def script_of(steps: list[tuple[int, ...]]) -> list[tuple[float, SimulatedSequence | str]]:
    """Times are multiples of 137 us plus an offset, so that they never coincide with the end of a step."""
    at, script = 0.0, []
    for number, step in enumerate(steps):
        at += step[0] * 0.000137 + 1e-7 * (step[0] > 0)
        if len(step) == 2:
            script.append((at, f"s{step[1]}"))
            continue
        _, num_prompt, num_output, priority, kind = step
        pieces = {
            "blocks": blocks_of(f"own {number}", 5),
            "blocks of a": blocks_of("a", 2),
            "whole": whole(f"own {number}"),
            "whole b": whole("b"),
            "none": nothing_cached,
        }[kind]
        script.append((at, SimulatedSequence(f"s{number}", num_prompt, num_output, pieces, priority)))
    return script


@settings(max_examples=300)
@given(
    steps=st.lists(st.one_of(submissions, submissions, aborts), max_size=14),
    by_priority=st.booleans(),
    slots=st.integers(1, 5),
    peeks=st.lists(st.floats(0, 0.01), max_size=5),
)
def test_the_engine_agrees_with_a_step_by_step_reference(
    steps: list[tuple[int, ...]], by_priority: bool, slots: int, peeks: list[float]
) -> None:
    """The same events at the same times. Looking at the engine in between changes nothing, and KV is never
    overdrawn."""
    script = script_of(steps)
    order = "priority" if by_priority else "fcfs"
    shape = profile(slots=slots)
    engine = SimulatedEngine(shape, order=order, chunk_tokens=CHUNK_TOKENS, block_tokens=BLOCK_TOKENS)
    events: list[SequenceEvent] = []
    for at, what in script:
        if isinstance(what, str):
            engine.abort(at, what)
        else:
            engine.submit(at, what)
        assert engine.counts().kv_usage <= 1
    now = script[-1][0] if script else 0.0
    for peek in peeks:
        now += peek
        events += engine.advance(now)
        assert engine.counts().kv_usage <= 1
    events += engine.advance(now)
    events += run_to_end(engine)

    reference = ReferenceEngine(shape, by_priority=by_priority, chunk_tokens=CHUNK_TOKENS, block_tokens=BLOCK_TOKENS)
    reference.run(script)
    happened = [(e.id, e.kind, e.num_generated, e.num_cached) for e in events]
    assert happened == [event[1:] for event in reference.events]
    assert [e.at for e in events] == pytest.approx([event[0] for event in reference.events], abs=1e-9)


@settings(max_examples=150)
@given(
    steps=st.lists(st.one_of(submissions, submissions, aborts), max_size=14),
    preempt_margin=st.sampled_from([None, 0, 1]),
    pauses=st.lists(st.tuples(st.sampled_from(["abort", "wait", "keep"]), st.integers(1, 20)), max_size=3),
)
def test_every_sequence_ends_once_and_totals_are_sums(
    steps: list[tuple[int, ...]], preempt_margin: int | None, pauses: list[tuple[str, int]]
) -> None:
    """With pauses and aborts. A sequence that was not aborted has all its tokens."""
    engine = SimulatedEngine(
        profile(),
        order="priority",
        preempt_margin=preempt_margin,
        chunk_tokens=CHUNK_TOKENS,
        block_tokens=BLOCK_TOKENS,
    )
    script = script_of(steps)
    events: list[SequenceEvent] = []
    now = 0.0
    for index, (at, what) in enumerate(script):
        if isinstance(what, str):
            engine.abort(max(at, now), what)
        else:
            engine.submit(max(at, now), what)
        now = max(at, now)
        if index < len(pauses):
            mode, length = pauses[index]
            engine.pause(now, mode)
            events += engine.advance(now + length / 1000)
            now += length / 1000
            engine.resume(now)
    events += engine.advance(now)
    events += run_to_end(engine)

    assert not engine.counts().num_running and not engine.counts().num_waiting
    assert [e.at for e in events] == sorted(e.at for e in events)
    ended = [e for e in events if e.kind in ("finished", "aborted")]
    sequences = {what.id: what for _, what in script if not isinstance(what, str)}
    assert sorted(e.id for e in ended) == sorted(sequences)
    for event in ended:
        if event.kind == "finished":
            assert event.num_generated == sequences[event.id].num_output_tokens
    counts = engine.counts()
    assert counts.num_generated_tokens == sum(e.num_generated for e in ended)
    assert counts.num_preemptions == sum(e.kind == "preempted" for e in events)
    # A prompt counts when it first enters; a query of the cache, with the output so far, every time.
    admitted = [e for e in events if e.kind == "admitted"]
    first = [e for e in admitted if not e.num_generated]
    assert counts.num_prompt_tokens == sum(sequences[e.id].num_prompt_tokens for e in first)
    assert counts.num_cached_tokens == sum(e.num_cached for e in first)
    assert counts.num_prefix_queries == sum(sequences[e.id].num_prompt_tokens + e.num_generated for e in admitted)
    assert counts.num_prefix_hits == sum(e.num_cached for e in admitted)
    assert counts.kv_usage == 0
    assert (counts.num_running, counts.num_waiting) == (0, 0)


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_without_kv_cost_the_makespan_is_the_closed_form(lengths: list[int]) -> None:
    """Unequal lengths that start together take sum_j L_j (tau(j) - tau(j - 1)), longest first."""
    shape = EngineProfile("t", "t", "t", 1, 100, 10**6, 1, 3.0, 0.25, 0.0, 0.0, 0.0, "test")
    engine = SimulatedEngine(shape)
    for number, length in enumerate(lengths):
        engine.submit(0, SimulatedSequence(str(number), 1, length + 1, nothing_cached))
    events = run_to_end(engine)
    first_token_at = next(e.at for e in events if e.kind == "first_token")

    longest_first = sorted(lengths, reverse=True)
    tau = [0.0] + [shape.decode_step_s(batch, 0) for batch in range(1, len(lengths) + 1)]
    makespan = sum(length * (tau[j] - tau[j - 1]) for j, length in enumerate(longest_first, start=1))
    assert events[-1].at - first_token_at == pytest.approx(makespan)


def test_a_lone_sequence_takes_prefill_and_then_growing_steps() -> None:
    """The time of one sequence, summed by hand from the profile."""
    shape = profile(kv_capacity_tokens=10_000)
    engine = SimulatedEngine(shape)
    engine.submit(0, SimulatedSequence("s", 500, 4, nothing_cached))
    events = run_to_end(engine)
    first = shape.decode_step_s(0, 0) + shape.prefill_s(500)
    assert events[1].kind == "first_token" and events[1].at == pytest.approx(first)
    rest = sum(shape.decode_step_s(1, kv) for kv in (501, 502, 503))
    assert events[-1].at == pytest.approx(first + rest)


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    """Decoding sequences generate one token per chunk, in steps that are longer by the chunk's prefill."""
    shape = profile(kv_capacity_tokens=10_000, per_kv_ktoken_ms=0)
    engine = SimulatedEngine(shape, chunk_tokens=100)
    engine.submit(0, SimulatedSequence("old", 1, 50, nothing_cached))
    engine.submit(0.002, SimulatedSequence("new", 1000, 2, nothing_cached))
    events = [*engine.advance(0.002)]
    admitted_at = engine.next_event_at() or 0
    events += engine.advance(admitted_at)
    made_before = engine.num_generated("old")
    first_token_at = engine.next_event_at() or 0
    events += engine.advance(first_token_at)
    assert (events[-1].id, events[-1].kind) == ("new", "first_token")
    assert engine.num_generated("old") == made_before + 10
    assert first_token_at - admitted_at == pytest.approx(10 * shape.decode_step_s(1, 0) + shape.prefill_s(1000))


def test_a_second_turn_finds_its_first_turn_in_the_cache() -> None:
    """A turn's prompt and answer are cached for the next one, in whole blocks. The last token is always computed."""
    engine = SimulatedEngine(profile(kv_capacity_tokens=1000), block_tokens=BLOCK_TOKENS)
    engine.submit(0, SimulatedSequence("turn 1", 50, 13, blocks_of("a")))
    run_to_end(engine)
    engine.submit(1, SimulatedSequence("turn 2", 80, 1, blocks_of("a")))
    assert next(e for e in run_to_end(engine) if e.kind == "admitted").num_cached == 60
    engine.submit(2, SimulatedSequence("turn 2 again", 80, 1, blocks_of("a")))
    assert next(e for e in run_to_end(engine) if e.kind == "admitted").num_cached == 76
    assert engine.clear_prefix_cache(3)
    engine.submit(4, SimulatedSequence("turn 2 once more", 80, 1, blocks_of("a")))
    assert next(e for e in run_to_end(engine) if e.kind == "admitted").num_cached == 0


@pytest.mark.parametrize("pieces", [blocks_of("a"), whole("a")], ids=["blocks", "whole"])
def test_a_stopped_prefill_leaves_only_what_it_computed(pieces: Callable[[int], Sequence[Piece]]) -> None:
    """All of its prompt used to be cached: a turn that was stopped and began again got the rest of its prefill for
    nothing. What was cached before stays."""
    prompt = pieces(1_000)
    engine = SimulatedEngine(profile(kv_capacity_tokens=10_000), chunk_tokens=100, block_tokens=BLOCK_TOKENS)
    engine.submit(0, SimulatedSequence("stopped", 1_000, 1, pieces))
    step_s = (engine.next_event_at() or 0.0) / 10
    engine.abort(2.5 * step_s, "stopped")
    run_to_end(engine)
    assert engine.num_cached(1, prompt) == 300
    engine.submit(1, SimulatedSequence("stopped at once", 1_000, 1, pieces))
    engine.abort(1, "stopped at once")
    assert engine.num_cached(1, prompt) == 300
    engine.submit(1, SimulatedSequence("whole", 1_000, 1, pieces))
    assert next(e for e in run_to_end(engine) if e.id == "whole").num_cached == 300
    engine.submit(2, SimulatedSequence("stopped again", 1_000, 1, pieces))
    engine.abort(2, "stopped again")
    assert engine.num_cached(2, prompt) == 1_000


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    """There is room for two contexts: a third one evicts the end of the older."""
    engine = SimulatedEngine(profile(kv_capacity_tokens=100), block_tokens=BLOCK_TOKENS)
    for at, name in enumerate("ab"):
        engine.submit(at, SimulatedSequence(name, 44, 4, blocks_of(name)))
        run_to_end(engine)
    engine.submit(5, SimulatedSequence("c", 12, 4, blocks_of("c")))
    run_to_end(engine)
    engine.submit(6, SimulatedSequence("b again", 48, 1, blocks_of("b")))
    assert run_to_end(engine)[0].num_cached == 44
    engine.submit(7, SimulatedSequence("a again", 48, 1, blocks_of("a")))
    assert 0 < run_to_end(engine)[0].num_cached < 44


def test_when_kv_runs_out_the_newest_is_preempted_and_resumes() -> None:
    """It is computed again, but each token is generated once."""
    engine = SimulatedEngine(profile(kv_capacity_tokens=100))
    engine.submit(0, SimulatedSequence("first", 40, 50, nothing_cached))
    engine.submit(0, SimulatedSequence("second", 40, 30, nothing_cached))
    events = run_to_end(engine)
    assert [e.id for e in events if e.kind == "preempted"] == ["second"]
    assert {e.id: e.num_generated for e in events if e.kind == "finished"} == {"first": 50, "second": 30}
    assert engine.counts().num_generated_tokens == 80


def test_lower_priority_numbers_go_first_and_are_preempted_last() -> None:
    """vLLM's convention, in the queue and among victims. A running sequence is not disturbed."""
    engine = SimulatedEngine(profile(slots=1), order="priority")
    engine.submit(0, SimulatedSequence("running", 2, 5, nothing_cached, 9))
    for priority in (0, 5, -5):
        engine.submit(0.001, SimulatedSequence(f"{priority}", 2, 5, nothing_cached, priority))
    assert [e.id for e in run_to_end(engine) if e.kind == "finished"] == ["running", "-5", "0", "5"]

    engine = SimulatedEngine(profile(kv_capacity_tokens=100), order="priority")
    engine.submit(0, SimulatedSequence("low", 40, 30, nothing_cached, 1))
    engine.submit(0, SimulatedSequence("high", 40, 30, nothing_cached, 0))
    assert [e.id for e in run_to_end(engine) if e.kind == "preempted"] == ["low"]


def test_with_a_margin_an_urgent_sequence_preempts_a_running_one() -> None:
    """SGLang's rule: only if the difference is larger than the margin."""
    engine = SimulatedEngine(profile(slots=2), order="priority", preempt_margin=10)
    engine.submit(0, SimulatedSequence("as urgent", 2, 90, nothing_cached, -11))
    engine.submit(0, SimulatedSequence("running", 2, 50, nothing_cached, 0))
    engine.submit(0.01, SimulatedSequence("not enough", 2, 5, nothing_cached, -10))
    engine.submit(0.01, SimulatedSequence("urgent", 2, 5, nothing_cached, -11))
    order = [(e.id, e.kind) for e in run_to_end(engine) if e.kind in ("preempted", "finished")]
    assert order == [
        ("running", "preempted"),
        ("urgent", "finished"),
        ("not enough", "finished"),
        ("running", "finished"),
        ("as urgent", "finished"),
    ]


def test_a_pause_in_keep_mode_freezes_and_loses_nothing() -> None:
    """The engine freezes after the current step; the rest takes as long as it would have."""
    engine = SimulatedEngine(profile())
    engine.submit(0, SimulatedSequence("s", 2, 20, nothing_cached))
    engine.pause(0.005, "keep")
    engine.advance(1)
    frozen = engine.num_generated("s")
    engine.advance(50)
    assert 0 < frozen == engine.num_generated("s") < 20
    assert engine.next_event_at() is None
    engine.resume(60)
    assert run_to_end(engine)[-1].at == pytest.approx(60 + 0.0011 * (20 - frozen), rel=0.01)


def test_kept_kv_leaves_room_for_the_step_under_way() -> None:
    """Pinning blocks during a step is refused if the step's token would find no room; later growth preempts."""
    kept = [(("kept", i), BLOCK_TOKENS) for i in range(4)]
    answers = []
    for num_steps in range(1, 8):
        engine = SimulatedEngine(profile(kv_capacity_tokens=120), chunk_tokens=100, block_tokens=BLOCK_TOKENS)
        engine.submit(0.0, SimulatedSequence("long", 100, 20, nothing_cached))
        for _ in range(num_steps):
            at = engine.next_step_at()
            assert at is not None
            engine.advance(at)
        ends_at = engine.next_step_at()
        assert ends_at is not None
        answers.append(engine.keep((at + ends_at) / 2, kept))
        events = engine.advance(60.0)
        if answers[-1]:
            assert "preempted" in [event.kind for event in events], "20 tokens grow beside 16 kept ones"
            engine.let_go(60.0, kept)
            events += run_to_end(engine)
        assert events[-1].kind == "finished"
        assert events[-1].num_generated == 20
    # 19 tokens are free after the first one: 16 are kept, and 1 is for the step under way.
    assert answers == [True, True, True, False, False, False, False]


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    """Otherwise it would be preempted forever."""
    engine = SimulatedEngine(profile(kv_capacity_tokens=100))
    with pytest.raises(ValueError, match="101 tokens exceed"):
        engine.submit(0, SimulatedSequence("s", 60, 41, nothing_cached))
    assert not engine.counts().num_running and not engine.counts().num_waiting


def test_stepping_token_by_token_meets_each_step_exactly() -> None:
    """A streaming server wakes at `next_step_at`: each wake gives one token."""
    engine = SimulatedEngine(profile(kv_capacity_tokens=10_000))
    engine.submit(0, SimulatedSequence("s", 10, 300, nothing_cached))
    for made in itertools.count():
        if not engine.holds("s"):
            break
        assert engine.num_generated("s") == made
        at = engine.next_step_at()
        assert at is not None
        engine.advance(at)
    assert made == 300
