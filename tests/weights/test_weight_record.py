"""Which weights the fleet should have, and how old others are: across updates, failed updates and restarts."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from engines.weights import NewWeights, UpdateMode
from gateway.weights.record import WeightRecord
from store import StoreSettings, open_store

VERSIONS = [f"step-{number}" for number in range(5)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(VERSIONS), st.sampled_from([None, "/weights/a", "/weights/b"])),
        st.tuples(st.just("refused"), st.sampled_from(VERSIONS), st.sampled_from([None, "/weights/a"])),
        st.tuples(st.just("broken off"), st.sampled_from(VERSIONS), st.none()),
        st.tuples(st.just("taken and broken off"), st.sampled_from(VERSIONS), st.none()),
        st.tuples(st.just("restart"), st.just(""), st.none()),
    ),
    max_size=15,
)


@given(steps)
def test_the_age_of_a_version_counts_those_set_since(steps: list[tuple[str, str, str | None]]) -> None:
    """A version that is set again is new again, one that no engine took was never set, one that none has taken yet ages
    no other, and a restart changes nothing."""
    store = open_store("memory:", StoreSettings())
    record = WeightRecord(store)
    run_id, is_written = record.run_id, False
    set_so_far: list[str] = []
    num_taken = 0
    current: tuple[str, str | None] | None = None
    paths: set[str] = set()
    for step, version, path in steps:
        if step == "restart":
            is_unfinished = record.is_unfinished
            record = WeightRecord(store)
            asyncio.run(record.restore())
            assert record.is_unfinished == is_unfinished
            assert (record.run_id == run_id) or not is_written, "a restart keeps the run id"
            run_id = record.run_id
        else:
            record.begin(NewWeights(version, UpdateMode.KEEP, path))
            is_written = True
            assert record.is_unfinished and record.current is not None and record.current.version == version
            paths |= {path} if path else set()
            if step == "refused":
                record.take_back()
                num_taken = len(set_so_far)
            else:
                if not current or current[0] != version:
                    set_so_far.append(version)
                current = version, path
            if step == "set":
                record.end()
            elif step == "taken and broken off":
                record.took(version)
            if step in ("set", "taken and broken off"):
                num_taken = len(set_so_far)
            assert record.is_unfinished == step.endswith("broken off")
        assert (record.current and (record.current.version, record.current.path)) == current
        for one in VERSIONS:
            is_known = one in set_so_far
            last = len(set_so_far) - set_so_far[::-1].index(one) if is_known else 0
            assert (record.number(one), record.age(one)) == (last, max(num_taken - last, 0))
        assert all(record.is_path(one) == (one in paths) for one in ("/weights/a", "/weights/b", "a-model"))


def test_the_record_keeps_the_last_thousand_versions() -> None:
    """Older versions count as older than all known ones."""
    record = WeightRecord(open_store("memory:", StoreSettings()))
    for number in range(1_500):
        record.begin(NewWeights(f"step-{number}", UpdateMode.KEEP, f"/weights/{number}"))
        record.end()
    assert record.number("step-499") == 0 and record.age("step-499") == 1_500
    assert record.number("step-500") == 501 and record.age("step-1499") == 0
    assert not record.is_path("/weights/499") and record.is_path("/weights/500")
