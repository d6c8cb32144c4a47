"""How vLLM's events of tokens are read (the numbers of log-probabilities alone say what their entries say), and how the
end of a stream is."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from engines.token_ids import TokenIds
from engines.tokens import Delta, Piece, Rendered
from engines.upstream import Upstream
from engines.vllm_tokens import VllmTokens, cut_logprobs

RENDERED = Rendered("vllm", TokenIds.of([1]), {}, 100, 0, (), False, False, False)
# Texts that look like what is sought in an event.
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(['"logprob":1', ']},"', "]}}]}", '"top_logprobs":[', '"logprobs":{"content":[']),
)
NUMBERS = st.floats(-100, 0)


@st.composite
def entries(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Of a few tokens, each with so many rivals, of which the first is the token itself."""
    num_rivals = draw(st.sampled_from([0, 1, 1, 2]))
    made = []
    for _ in range(draw(st.integers(0, 4))):
        own = {"token": draw(TEXTS), "logprob": draw(NUMBERS), "bytes": draw(st.lists(st.integers(0, 255), max_size=3))}
        others = [{"token": draw(TEXTS), "logprob": draw(NUMBERS), "bytes": None} for _ in range(num_rivals - 1)]
        made.append(own | {"top_logprobs": [own, *others] if num_rivals else []})
    return made


def read(data: bytes, only_numbers: bool) -> Piece:
    return VllmTokens().reader(RENDERED, only_numbers)(data)


@given(entries(), TEXTS, st.sampled_from(["last", "first"]), st.booleans())
def test_numbers_alone_are_those_of_the_entries(
    content: list[dict[str, Any]], text: str, place: str, is_told: bool
) -> None:
    """Wherever the entries stand, and whatever the texts of event and tokens are; all else of the event is the same."""
    logprobs = {"logprobs": {"content": content} if is_told else None}
    about = {"index": 0, "finish_reason": None, "stop_reason": None, "token_ids": [5] * len(content), "text": text}
    choice = about | logprobs if place == "last" else logprobs | about
    data = orjson.dumps({"request_id": "r", "choices": [choice]})
    whole, numbers = read(data, False), read(data, True)
    chosen = [entry["logprob"] for entry in content]
    assert [entry["logprob"] for entry in whole.logprobs or []] == (chosen if is_told else [])
    said = [entry["logprob"] if isinstance(entry, dict) else entry for entry in numbers.logprobs or []]
    assert said == (chosen if is_told else [])
    assert (numbers.ids, numbers.text, numbers.finish_reason) == (whole.ids, whole.text, whole.finish_reason)


def test_the_entries_of_a_real_event_are_not_read() -> None:
    """As vLLM orders an event's fields: entries last."""
    own = {"token": " a", "logprob": -0.5, "bytes": [32, 97]}
    choice = {"index": 0, "token_ids": [5, 6], "text": " a a", "finish_reason": None}
    content = [own | {"top_logprobs": [own]}, own | {"logprob": -1.5, "top_logprobs": [own | {"logprob": -1.5}]}]
    data = orjson.dumps({"request_id": "r", "choices": [choice | {"logprobs": {"content": content}}]})
    text, numbers = cut_logprobs(data)
    assert b"top_logprobs" not in text and numbers == [-0.5, -1.5]


async def test_the_last_token_of_a_stream_is_read_by_itself() -> None:
    """A parser that gets the name of a call and the end of the answer at once adds arguments that were not made."""
    asked: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "tool_calls": [{"index": 0, "function": {"name": "run"}}]},
        {"content": "b", "tool_calls": []},
    ]

    async def ask(upstream: Upstream) -> bytes:
        asked.append(orjson.loads(upstream.body))
        choice = {"index": 0, "delta": parts[len(asked) - 1], "finish_reason": "length"}
        return orjson.dumps({"chunk": {"choices": [choice]}, "stream_state": {"asked": len(asked)}})

    end = Delta([7, 8, 9], "length", None, {"asked": 0})
    choice, state = await VllmTokens().derender(ask, {}, TokenIds.of([1]), end)
    chunks = [call["generate_chunk"]["choices"][0] for call in asked]
    assert [(chunk["token_ids"], chunk["finish_reason"]) for chunk in chunks] == [([7, 8], None), ([9], "length")]
    assert [call["stream_state"] for call in asked] == [{"asked": 0}, {"asked": 1}]
    assert state == {"asked": 2}
    told = {"role": "assistant", "content": "ab", "tool_calls": [{"index": 0, "function": {"name": "run"}}]}
    assert choice == {"index": 0, "delta": told, "finish_reason": "length"}
