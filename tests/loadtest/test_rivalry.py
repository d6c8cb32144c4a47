"""Rivals in a table: figures computed by hand, pairs by seed, counts read from an engine's metrics page."""

from dataclasses import replace

import orjson
import pytest

from loadtest.rivalry import Counts, Run, counts, order, run_of, spread, table

RUN = Run("binds", "ours", 1, 40.0, 20.0, Counts(1_000, 200, 3, 500), 60.0, 0)

PAGE = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1000.0
vllm:prompt_tokens_total{engine="1",model_name="tiny"} 10.0
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 300.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 700.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 4.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 5.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="tiny"} 50.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 50.0
vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 900.0
"""


def cells(server: str, *runs: Run) -> list[str]:
    rows = [line.strip("| ").split(" | ") for line in table(runs, "ours").splitlines()]
    return next(row[1:] for row in rows if row[0] == server)


def test_counts_are_read_from_an_engines_metrics_page() -> None:
    """They are summed over all engines of the server. Computed prompt tokens are distinguished from cached ones."""
    assert counts(PAGE) == Counts(1_010, 300, 4, 50)
    assert counts(PAGE) - Counts(10, 100, 1, 20) + Counts(steps=1) == Counts(1_000, 200, 3, 31)
    with pytest.raises(KeyError, match="prompt_tokens"):
        counts("up 1\n")


def test_times_are_compared_within_a_seed() -> None:
    """A rival that takes twice as long in each pair takes x2, however much seeds differ; a seed without a pair is left
    out."""
    ours = [replace(RUN, seed=seed, makespan_s=40.0 * seed, engine_cpu_s=60.0 * seed) for seed in (1, 2, 3)]
    theirs = [replace(run, server="theirs", makespan_s=2 * run.makespan_s) for run in ours[:2]]
    assert cells("theirs", *theirs, *ours)[:4] == ["120 (80 to 160)", "2.00", "1.00", "1.00"]
    assert cells("ours", *theirs, *ours)[:2] == ["80 (40 to 120)", "1.00"]
    alone = replace(RUN, server="theirs", seed=9)
    assert cells("theirs", *ours, alone)[:2] == ["40", "-"]


def test_counts_are_shown_beside_ours() -> None:
    """Tokens, the share that was cached, preemptions, steps and failures are shown."""
    theirs = replace(RUN, server="theirs", counts=Counts(1_000, 500, 0, 900), num_failed_turns=2)
    assert cells("theirs", RUN, theirs)[4:] == ["500", "2.50", "50%", "0", "900", "2"]
    assert cells("ours", RUN, theirs)[4:] == ["200", "1.00", "80%", "3", "500", "0"]


def test_servers_take_turns_to_begin() -> None:
    """The orders are ABC, BCA, CAB, and ABC again."""
    assert [order("ABC", repeat) for repeat in range(4)] == [list("ABC"), list("BCA"), list("CAB"), list("ABC")]


def test_a_spread_is_shown_if_there_is_one() -> None:
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert spread([1.001, 1.002], 2) == "1.00"
    assert spread([], 2) == "-"


def test_a_run_survives_json() -> None:
    assert run_of(orjson.loads(orjson.dumps(RUN.to_json()))) == RUN
