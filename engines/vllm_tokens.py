"""vLLM's token routes: render, generate, derender (vLLM 0.32, entrypoints/scale_out; `--enable-scale-out`).

If no parser is needed, generate returns text beside the ids (`output_mode: text`): exactly the text of vLLM's chat
route, with stop strings held back and cut off. Otherwise the ids go to derender, which parses a whole output at once,
or new tokens after a replay of all before them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from engines.dialect import has_route, told
from engines.http import HttpClient
from engines.token_ids import TokenIds, cut_ids, with_ids, with_prompt
from engines.tokens import Asking, Delta, Piece, Rendered, TokenLeg, Whole, has_tools
from engines.upstream import VLLM_GENERATE, Upstream, salted, with_fields
from engines.vllm_events import completion_piece, piece_of_numbers, whole_piece
from engines.vllm_messages import chat_of_chat, chat_of_messages
from engines.vllm_responses import chat_of_response

_RESPONSES = "/v1/responses"
_COMPLETIONS = "/v1/completions"
_RENDER = f"{_COMPLETIONS}/render"
_DERENDER = f"{_COMPLETIONS}/derender"
# These came later than the routes of chats and completions.
_FURTHER = {"messages": "/v1/messages/render", "responses": "/v1/responses/render"}
_LIMITS = {
    "messages": "messages with thinking disabled pass through",
    "responses": "responses of models that think pass through",
}
_LIMIT_OF_STORING = "responses pass through without `store: false`"
# Nothing is generated for it: a server that keeps no responses has no background mode, and one that does lacks this
# response.
_IN_BACKGROUND = b'{"input":"","background":true,"store":true,"previous_response_id":"resp_0"}'
# Of the prompt, for a parser that uses the last special token in it, and for the text of the first token.
_TAIL_TOKENS = 512
# The render leaves out values that are vLLM's defaults, also if the client asked for them; generate would then take
# another limit.
_DEFAULT_MAX_TOKENS = 16
# What samples by the output so far. A repetition penalty counts the prompt too, so it counts what earlier legs made.
_COUNTING = ("presence_penalty", "frequency_penalty", "bad_words", "repetition_detection")
# How tokens become text; derender assumes the defaults.
_DECODING = ("skip_special_tokens", "spaces_between_special_tokens")
# The ids that derender of vLLM 0.32 makes up for calls of a whole answer (renderers/online_derenderer.py), and those of
# calls that have none of their model's own.
_MADE_UP = re.compile("[0-9a-f]{16}")
_RANDOM = "chatcmpl-tool-"
# A request with images passes through: its tensors, tens of megabytes for an image, would be sent and read for nothing.
_WITHOUT_TENSORS = {"mm_payload": "none"}
# Further fields of the render that generate needs.
_PASSED_ON = ("model", "reasoning_ended", "reasoning_parser_kwargs", "cache_salt")


async def token_routes(http: HttpClient, timeout_s: float) -> "VllmTokens | None":
    """A server's token routes, if it has them and does not forbid them."""
    for path in (_RENDER, _DERENDER):
        if not await has_route(http, path, timeout_s):
            return None
    lacks = [api for api, path in _FURTHER.items() if not await has_route(http, path, timeout_s)]
    return VllmTokens(lacks, is_storing="responses" not in lacks and await _is_storing(http, timeout_s))


async def _is_storing(http: HttpClient, timeout_s: float) -> bool:
    """Whether a server may keep responses; one that does not understand the question counts as keeping them."""
    status, body = await told(http, _RESPONSES, _IN_BACKGROUND, timeout_s)
    try:
        return status != 400 or orjson.loads(body)["error"]["param"] != "background"
    except (KeyError, TypeError, ValueError):
        return True


class VllmTokens:
    """Talks to `vllm serve --enable-scale-out`."""

    kind = stream_form = "vllm"
    stop_field = "stop_reason"

    def __init__(self, lacks: Sequence[str] = (), is_storing: bool = False) -> None:
        self.passed: Mapping[str, str] = {api: f"it has no {_FURTHER[api]}" for api in lacks}
        limits = [limit for api, limit in _LIMITS.items() if api not in lacks]
        self.limits = "; ".join([*limits, _LIMIT_OF_STORING] if is_storing else limits)
        self._is_storing = is_storing
        self._may_lose_ids = True  # until calls were seen that their model does not name

    def render(self, path: str, request: Mapping[str, Any], body: bytes) -> Upstream:
        return Upstream(f"{path}/render", b"", with_fields(body, request, _WITHOUT_TENSORS))

    def rendered(
        self, path: str, request: Mapping[str, Any], answer: bytes, num_calls: int | None = None
    ) -> Rendered | None:
        try:
            chat = _chat_of(path, request, self._is_storing, num_calls)
        except (AttributeError, KeyError, TypeError):
            return None  # malformed, which the engine's own route reports in its own words
        if chat is None:
            return None
        made, ids = cut_ids(answer, "token_ids")
        if isinstance(made, list):  # one for each prompt of a completion
            if len(made) != 1:
                return None
            made = made[0]
        if made.get("features"):
            return None
        if ids is None or made["token_ids"]:
            ids = TokenIds.of(made["token_ids"])
        if path == _RESPONSES and made.get("reasoning_parser_kwargs") is not None:
            return None  # a response reports how many of its tokens were reasoning
        sampling = made["sampling_params"]
        if path == _COMPLETIONS and sampling.get("logprobs"):
            sampling["logprobs"] += 1  # its own route lists a token beside the likeliest, generate among them
        needs_parser = has_tools(chat) or made.get("reasoning_parser_kwargs") is not None
        stop = sampling.get("stop") or ()
        return Rendered(
            self.kind,
            ids,
            {"sampling_params": sampling} | {name: made[name] for name in _PASSED_ON if made.get(name) is not None},
            sampling.get("max_tokens", _DEFAULT_MAX_TOKENS),
            sampling.get("min_tokens") or 0,
            (stop,) if isinstance(stop, str) else tuple(stop),
            bool(sampling.get("include_stop_str_in_output")),
            needs_parser,
            sampling.get("structured_outputs") is not None,
            chat,
            counts_output=any(sampling.get(name) for name in _COUNTING),
            stops_after=sampling.get("min_tokens") or 0,
            # A response is incomplete if its limit cut it, whatever was called; for chats see `_called`.
            knows_end=path == _RESPONSES or "parse_context" in made,
        )

    def generate(self, rendered: Rendered, leg: TokenLeg) -> Upstream:
        sampling: dict[str, Any] = {**rendered.call["sampling_params"], "n": 1}
        sampling["max_tokens"] = rendered.max_tokens - leg.num_made
        if leg.num_made:
            sampling["min_tokens"] = max(rendered.min_tokens - leg.num_made, 0)
        if sampling.get("seed") is not None:
            # vLLM also gives each choice its own seed; and with the same seed a later leg would repeat the samples of
            # the start.
            sampling["seed"] += leg.index + leg.num_made
        if leg.wants_logprobs and sampling.get("logprobs") is None:
            sampling["logprobs"] = 0
        if leg.event_tokens > 1:
            sampling["stream_interval"] = leg.event_tokens
        call: dict[str, Any] = {
            **rendered.call,
            "request_id": leg.request_id,
            "sampling_params": sampling,
            "output_mode": "tokens" if rendered.needs_parser else "text",
            "priority": leg.priority,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if leg.cache_salt:
            call |= salted(call, leg.cache_salt)
        headers = f"x-request-id: {leg.request_id}\r\nx-session-id: {leg.trajectory_id}\r\n"
        body = with_prompt(call, "token_ids", leg.prompt_ids)
        return Upstream(VLLM_GENERATE, headers.encode("latin-1", "replace"), body)

    def reader(self, rendered: Rendered, only_numbers: bool) -> Callable[[bytes], Piece]:
        if only_numbers:
            return piece_of_numbers
        num_listed = rendered.call["sampling_params"].get("logprobs")
        return partial(completion_piece, num_listed - 1) if num_listed and not rendered.chat else whole_piece

    def texts(self, rendered: Rendered, outputs: Sequence[Sequence[int]]) -> Upstream:
        made = [_response(f"part-{i}", {"token_ids": ids, "finish_reason": "length"}) for i, ids in enumerate(outputs)]
        call: dict[str, Any] = {"generate_responses": made}
        call["prompt_token_ids"] = [rendered.prompt_ids.tail(16)] * len(made)
        sampling = rendered.call["sampling_params"]
        if decoding := {name: sampling[name] for name in _DECODING if sampling.get(name) is not None}:
            call["completion_request"] = {"prompt": "-", **decoding}
        return Upstream(_DERENDER, b"", with_ids(call))

    def read_texts(self, answer: bytes) -> list[str]:
        return [choice["text"] for choice in orjson.loads(answer)["choices"]]

    async def derender(
        self, ask: Asking, rendered: Rendered, prompt_ids: TokenIds, last: Whole | Delta
    ) -> tuple[dict[str, Any], Any]:
        chat, ids = rendered.chat, last.ids
        # The whole prompt is needed only to tell whether it left reasoning open.
        before = prompt_ids if "reasoning_parser_kwargs" in rendered.call else prompt_ids.tail(_TAIL_TOKENS)
        if last.finish_reason == "stop" and not isinstance(last.stop_reason, str):
            # The token that ended the answer is not part of its text, unless the request asked for it.
            ids = ids if chat.get("include_stop_str_in_output") else ids[:-1]
        if isinstance(last, Delta):
            return await self._derender_delta(ask, chat, before, last, ids)
        if not ids:
            choice, _ = await self._derender_delta(ask, chat, before, last, ids)
            content = choice.pop("delta").get("content")
            if content is None and "reasoning_parser_kwargs" not in rendered.call:
                content = ""  # as in a whole answer; of an answer without tokens, only a reasoning parser makes null
            return choice | {"message": {"role": "assistant", "content": content}}, None
        choice = _choice(ids, last)
        if last.logprobs is not None and chat.get("include_reasoning") is not False:
            choice["logprobs"] = {"content": last.logprobs}
        # Only here does a parser look for the prompt.
        made = _response("whole", choice) | {"prompt_token_ids": before}
        whole = await _asked(ask, {"chat_request": chat, "generate_response": made})
        choice = _called(chat, whole["choices"][0], rendered.knows_end)
        calls = choice["message"].get("tool_calls") or ()
        if self._may_lose_ids and any(_MADE_UP.fullmatch(call["id"]) for call in calls):
            await self._name(calls, ask, chat, before, last, ids)
        return choice, None

    async def _name(
        self,
        calls: Sequence[dict[str, Any]],
        ask: Asking,
        chat: Mapping[str, Any],
        prompt_ids: TokenIds,
        last: Whole,
        ids: Sequence[int],
    ) -> None:
        """Give the calls of a whole answer the ids that they have in a stream: those of a model that names its calls
        itself, such as Kimi K2, are in its template.
        """
        choice, _ = await self._derender_delta(ask, chat, prompt_ids, last, ids)
        named = {call["index"]: call["id"] for call in choice["delta"].get("tool_calls") or () if call.get("id")}
        self._may_lose_ids = not named or any(not id.startswith(_RANDOM) for id in named.values())
        for index, call in enumerate(calls):
            call["id"] = named.get(index, call["id"])

    async def _derender_delta(
        self, ask: Asking, chat: Mapping[str, Any], prompt_ids: TokenIds, last: Whole | Delta, ids: Sequence[int]
    ) -> tuple[dict[str, Any], Any]:
        """The tokens that come with the end are parsed separately (one or none), as the chat route does: if a call's
        name and the end come together, the parser takes it for a call without arguments (hermes).
        """
        state, before = (last.state if isinstance(last, Delta) else None), {}
        call: dict[str, Any] = {"chat_request": chat, "stream": True, "prompt_token_ids": prompt_ids}
        alone = 1 if last.finish_reason is not None and len(ids) == len(last.ids) else 0
        if last.finish_reason is not None and len(ids) > alone:
            ids, first = ids[len(ids) - alone :], ids[: len(ids) - alone]
            part = {"token_ids": first, "finish_reason": None, "stop_reason": None}
            made = await _asked(ask, call | {"generate_chunk": _response("part", part), "stream_state": state})
            before, state = made["chunk"]["choices"][0]["delta"], made["stream_state"]
        part = _choice(ids, last)
        made = await _asked(ask, call | {"generate_chunk": _response("part", part), "stream_state": state})
        choice = made["chunk"]["choices"][0]
        return choice | {"delta": _joined(before, choice["delta"])}, made["stream_state"]


def _chat_of(
    path: str, request: Mapping[str, Any], is_storing: bool, num_calls: int | None
) -> Mapping[str, Any] | None:
    """What its parsers must know; None for a request that only its own route serves."""
    if path == "/v1/messages":
        return chat_of_messages(request)
    if path == _RESPONSES:
        return chat_of_response(request, is_storing)
    return chat_of_chat(request, num_calls) if path == "/v1/chat/completions" else {}


def _joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Two deltas merged into one: fields in both are texts or lists, and are concatenated."""
    both = {name: before[name] + after[name] for name in before.keys() & after.keys() if before[name] and after[name]}
    told = [(name, value) for delta in (before, after) for name, value in delta.items() if value]
    return dict(told) | both


def _called(chat: Mapping[str, Any], choice: dict[str, Any], knows_end: bool) -> dict[str, Any]:
    """The choice of a whole answer, with what the chat route adds for calls and derender may not: whether calls ended
    it, and only the first call if only one is wanted.

    vLLM 0.32's route calls an answer with calls that its limit cut `tool_calls`; that of 0.33, whose render has a
    `parse_context`, says `length`, and so does its derender (openai/chat_completion/serving.py).
    """
    chosen, calls, reason = chat.get("tool_choice"), choice["message"].get("tool_calls"), choice["finish_reason"]
    is_auto, has_stopped = chosen in (None, "auto"), reason == "stop"
    if knows_end:  # a response has no such reason: it is for the record
        ended_by_call = calls and has_stopped and (is_auto or chosen == "required")
    else:
        ended_by_call = (calls and is_auto) or (has_stopped and chosen == "required")
    if ended_by_call:
        choice["finish_reason"] = "tool_calls"
    if calls and chat.get("parallel_tool_calls") is False:
        choice["message"]["tool_calls"] = calls[:1]
    return choice


def _choice(ids: Sequence[int], last: Whole | Delta) -> dict[str, Any]:
    return {"token_ids": ids, "finish_reason": last.finish_reason, "stop_reason": last.stop_reason}


async def _asked(ask: Asking, call: Any) -> Any:
    return orjson.loads(await ask(Upstream("/v1/chat/completions/derender", b"", with_ids(call))))


def _response(request_id: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": request_id, "choices": [{"index": 0, **choice}]}
