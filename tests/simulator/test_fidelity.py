"""Whether the simulator can be believed: measured rows, a closed form, a published crossover."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import load_profile
from scheduling.cost import EngineProfile
from simulator.fidelity import (
    TpotCheck,
    a800_profile,
    check_crossover,
    check_tpot,
    closed_form_makespan_s,
    makespan_s,
    mape,
    read_measured,
    report,
    simulated_tpot_ms,
)


@pytest.fixture(scope="module")
def tpot_checks() -> list[TpotCheck]:
    return check_tpot(read_measured())


def flat_profile(base_ms: float, per_sequence_ms: float) -> EngineProfile:
    """An engine whose KV and prompts cost nothing, and which has room for everything."""
    return replace(
        load_profile("toy-cpu-tp1"),
        slots=1_000,
        kv_capacity_tokens=100_000_000,
        decode_base_ms=base_ms,
        decode_per_sequence_ms=per_sequence_ms,
        decode_per_kv_ktoken_ms=0.0,
        prefill_per_ktoken_ms=0.0,
        prefill_per_ktoken2_ms=0.0,
    )


def test_time_per_output_token_is_within_five_percent_of_measured_rows(tpot_checks: list[TpotCheck]) -> None:
    """In rows where the KV fits and answers have at least 512 tokens; and, as a check without selection, in all rows
    where it fits."""
    usable = [check for check in tpot_checks if check.excluded is None]
    fitting = [check for check in tpot_checks if check.excluded != "KV does not fit"]
    assert (len(usable), len(fitting), len(tpot_checks)) == (36, 55, 60)
    assert mape(usable) < 0.05
    assert mape(fitting) < 0.05


def test_each_excluded_row_has_its_reason_in_the_data(tpot_checks: list[TpotCheck]) -> None:
    """If the KV does not fit, vLLM queued, so its own first tokens came late. The other excluded rows, and no others,
    have short answers."""
    for check in tpot_checks:
        assert (check.excluded == "KV does not fit") == (check.row.ttft_ms > 2_000)
        assert (check.excluded == "short answers") == (check.row.output_tokens == 128 and check.row.ttft_ms <= 2_000)


def test_a_profile_with_a_slower_base_step_exceeds_the_tolerance(tpot_checks: list[TpotCheck]) -> None:
    """A base step 20 % slower lengthens the time per output token by more than the 5 % allowed."""
    row = next(check.row for check in tpot_checks if check.excluded is None and check.row.num_requests == 64)
    profile = load_profile(f"qwen3-32b-h100-tp{row.tp}")
    slower = replace(profile, decode_base_ms=profile.decode_base_ms * 1.2)
    sizes = (row.input_tokens, row.output_tokens, row.num_requests)
    assert simulated_tpot_ms(slower, *sizes) > 1.05 * simulated_tpot_ms(profile, *sizes)


@given(
    st.lists(st.integers(1, 3_000), min_size=1, max_size=40),
    st.floats(0.1, 50.0),
    st.floats(0.0, 2.0),
)
def test_the_closed_form_of_the_makespan_is_exact(lengths: list[int], base_ms: float, per_sequence_ms: float) -> None:
    """`sum_j L_j (tau(j) - tau(j-1))` if KV does not grow, except for rounding of floats."""
    profile = flat_profile(base_ms, per_sequence_ms)
    simulated_s, num_preemptions = makespan_s(profile, [(1, length) for length in lengths])
    assert math.isclose(simulated_s, closed_form_makespan_s(profile, lengths), rel_tol=1e-12)
    assert num_preemptions == 0


def test_the_closed_form_by_hand() -> None:
    """Three answers of 3, 2 and 1 tokens: a prefill step, a step of two, a step of one."""
    profile = flat_profile(10.0, 1.0)
    assert closed_form_makespan_s(profile, [3, 1, 2]) == pytest.approx(0.010 + 0.012 + 0.011)


def test_short_sequences_are_faster_on_eight_tp1_and_long_ones_on_tp8() -> None:
    """The direction of Libra's crossover. Its size is reported but not reached (see the report)."""
    short, long = check_crossover()
    assert (short.lengths, long.lengths) == ("short", "long")
    assert short.ratio > 1.05
    assert long.ratio < 0.85
    assert long.num_preemptions[0] > long.num_preemptions[1] > 0, "long sequences must exceed the KV"


def test_an_a800_of_tp1_is_an_a100() -> None:
    """At TP 1 there is no all-reduce. At TP 8 it is slower, by less than half."""
    assert a800_profile(1) == load_profile("qwen3-14b-a100-tp1")
    a800, a100 = a800_profile(8), load_profile("qwen3-14b-a100-tp8")
    assert 1.0 < a800.decode_step_s(512, 0) / a100.decode_step_s(512, 0) < 1.5
    assert 1.0 < a800.prefill_s(1_000) / a100.prefill_s(1_000) < 1.5


def test_the_report_has_every_row_and_every_check() -> None:
    """The docs quote it."""
    rows = read_measured()
    text = report(rows)
    assert text.count("\n| 2 |") + text.count("\n| 8 |") == len(rows)
    assert text.count("### ") == 3
