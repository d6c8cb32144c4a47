"""The simulated model's text: tokenization, answers that can be resumed, and answers with a prescribed form."""

from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.simulated.answers import Wish, answer
from engines.simulated.chat import parse_call, render
from engines.simulated.json_shapes import instance_of
from engines.simulated.text import ASSISTANT, END, Tokenizer

tokenizer = Tokenizer()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "depth": {"type": "integer", "minimum": 3}},
                "required": ["path", "depth"],
            },
        },
    }
    for name in ("look", "find")
]


@given(text=st.text())
def test_every_text_survives_tokenization(text: str) -> None:
    """Exactly, whatever the script. The pieces that a stream sends add up to the same text."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.texts(ids)) == text
    assert all(127 < id < 2**31 for id in ids)


def test_english_has_about_four_characters_per_token() -> None:
    """So that contexts are about as long as a real model's."""
    text = "The quick brown fox jumps over the lazy dog, and finds a file in the tree. " * 50
    assert 3 < len(text) / len(tokenizer.encode(text)) < 5


def test_an_answer_sent_back_as_a_message_has_the_same_tokens() -> None:
    """Otherwise no second turn would find its first one in the prefix cache."""
    prompt = render([{"role": "user", "content": "Hi"}], None, tokenizer)
    made = answer(prompt, Wish(max_tokens=40, ignore_eos=True), tokenizer, "default", 128)
    text = "".join(made.texts)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    assert render(messages, None, tokenizer) == [*prompt, *made.token_ids, END, ASSISTANT]


wishes = st.builds(
    Wish,
    max_tokens=st.integers(2, 60),
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(0, 5),
    index=st.integers(0, 2),
    tools=st.sampled_from([(), TOOLS]),
    tool_choice=st.sampled_from(["none", "auto", "required", "=find"]),
    schema=st.sampled_from([None, {"type": "object", "properties": {"a": {"type": "string", "minLength": 50}}}]),
)


@given(text=st.text(max_size=20), wish=wishes, cut=st.integers(1, 59))
def test_an_answer_resumed_from_its_prefix_continues_identically(text: str, wish: Wish, cut: int) -> None:
    """Free text, JSON and tool calls: this lets a turn move between engines."""
    prompt = render([{"role": "user", "content": text}], None, tokenizer)
    whole = answer(prompt, wish, tokenizer, "default", 40)
    cut = min(cut, len(whole.token_ids) - 1)
    if cut < 1:
        return
    begun = whole.token_ids[:cut]
    rest_wish = Wish(**{**_fields(wish), "max_tokens": wish.max_tokens - cut})
    rest = answer([*prompt, *begun], rest_wish, tokenizer, "default", 40)
    assert begun + rest.token_ids == whole.token_ids
    assert rest.finish_reason == whole.finish_reason


def _fields(wish: Wish) -> dict[str, Any]:
    return {name: getattr(wish, name) for name in Wish.__slots__}


def test_answers_depend_on_choice_seed_and_weights_only() -> None:
    """The same request gives the same answer; each of the three changes it."""
    prompt = tokenizer.encode("Tell me")
    wish = Wish(max_tokens=20, ignore_eos=True)

    def answer_ids(wish: Wish, version: str = "default") -> list[int]:
        return answer(list(prompt), wish, tokenizer, version, 128).token_ids

    assert answer_ids(wish) == answer_ids(wish)
    others = [
        answer_ids(Wish(max_tokens=20, ignore_eos=True, index=1)),
        answer_ids(Wish(max_tokens=20, ignore_eos=True, seed=7)),
        answer_ids(wish, "v2"),
    ]
    assert len({tuple(ids) for ids in [answer_ids(wish), *others]}) == 4


def test_a_stop_string_ends_the_answer_and_is_cut_off() -> None:
    """Unless it is to be included. It may span two tokens."""
    prompt = list(tokenizer.encode("Tell me"))
    free = answer(prompt, Wish(max_tokens=30, ignore_eos=True), tokenizer, "default", 128)
    text = "".join(free.texts)
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    made = answer(prompt, Wish(max_tokens=30, ignore_eos=True, stop=[stop]), tokenizer, "default", 128)
    assert "".join(made.texts) == text[: text.index(stop)]
    assert (made.finish_reason, made.stop_reason) == ("stop", stop)
    assert made.token_ids == free.token_ids[: len(made.token_ids)]
    kept = answer(
        prompt, Wish(max_tokens=30, ignore_eos=True, stop=[stop], include_stop=True), tokenizer, "default", 128
    )
    assert "".join(kept.texts) == text[: text.index(stop) + len(stop)]


@given(text=st.text(max_size=20))
def test_a_required_tool_call_is_valid_for_its_schema(text: str) -> None:
    """Its text, parsed again, calls a declared function with valid arguments."""
    prompt = render([{"role": "user", "content": text}], TOOLS, tokenizer)
    made = answer(prompt, Wish(max_tokens=500, tools=TOOLS, tool_choice="required"), tokenizer, "default", 128)
    call = parse_call(tokenizer.decode(made.token_ids))
    assert call is not None and call == made.call
    schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call.name)
    jsonschema.validate(orjson.loads(call.arguments), schema)


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"enum": [1, "x"]}, "b": {"const": None}}, "required": ["a", "c"]},
    {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 9}, "minItems": 3, "uniqueItems": True},
    {"type": "string", "minLength": 30, "maxLength": 31},
    {"type": "string", "format": "date-time"},
    {"type": ["null", "number"], "exclusiveMinimum": 2, "exclusiveMaximum": 3},
    {"type": "integer", "multipleOf": 7, "minimum": 20},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]},
    {
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
        },
        "$ref": "#/$defs/node",
    },
    {"type": "object", "additionalProperties": False, "properties": {"deep": {"prefixItems": [{"type": "null"}]}}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_instances_are_valid_for_their_schema(schema: dict[str, Any]) -> None:
    """For every seed, and the same seed gives the same instance."""
    for seed in range(50):
        value = instance_of(schema, seed * 2654435761)
        jsonschema.validate(value, schema)
        assert value == instance_of(schema, seed * 2654435761)
