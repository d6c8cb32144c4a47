"""How a token leg's relay reads the blocks of events that come from an engine."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.sse import data_of, split_events
from gateway.turns.token_relay import data_of_each

PIECES = st.sampled_from([b"data: ", b"data:", b"\n", b"\n\n", b"\r", b"\r\n", b"{}", b": c", b"event: e", b"[DONE]"])


@given(st.lists(PIECES, max_size=12))
def test_a_block_has_the_data_of_its_events(pieces: list[bytes]) -> None:
    """In the form that engines use, which is read at once, and in any other that the standard allows."""
    block = b"".join(pieces)
    expected = [data_of(event) for event in split_events(block)]
    assert [data for data in data_of_each(block) if data] == [data for data in expected if data]
