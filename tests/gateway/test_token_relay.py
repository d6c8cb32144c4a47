"""What a token leg's relay reads of the blocks of events that come from an engine."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.sse import data_of, split_events
from gateway.turns.token_relay import data_of_each

PIECES = st.sampled_from([b"data: ", b"data:", b"\n", b"\n\n", b"\r", b"\r\n", b"{}", b": c", b"event: e", b"[DONE]"])


@given(st.lists(PIECES, max_size=12))
def test_a_block_says_what_its_events_say(pieces: list[bytes]) -> None:
    """Engines' own form, which is read at once, and whatever else the standard allows."""
    block = b"".join(pieces)
    said = [data_of(event) for event in split_events(block)]
    assert [data for data in data_of_each(block) if data] == [data for data in said if data]
