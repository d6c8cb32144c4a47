"""SGLang's token routes: `/v1/tokenize`, `/generate` with `input_ids`, `/v1/detokenize` (0.5.23, srt/entrypoints).

`/v1/tokenize` takes a chat's body without `stream` and returns the prompt that the chat route would make of it;
messages and responses are converted into chats first (`sglang_anthropic.py`, `sglang_responses.py`). `/generate` does
not know chats: its sampling parameters are built here as the chat route builds them (openai/protocol.py), and requests
for which that route would make its own grammar pass through. `sglang_messages.py` parses tool calls and reasoning.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from engines.sglang_anthropic import chat_of_messages
from engines.sglang_events import EventReader
from engines.sglang_facts import DETOKENIZE, TOKENIZE, ServerFacts
from engines.sglang_messages import MessageReader
from engines.sglang_responses import chat_of_response
from engines.token_ids import TokenIds, cut_ids, with_ids, with_prompt
from engines.tokens import Asking, Delta, Piece, Rendered, TokenLeg, Whole
from engines.upstream import SGLANG_GENERATE, TooDeep, Upstream, encoded, salted, without_field

_CHATS = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
# The defaults of `/generate`; a server may have others of its own, so all are sent.
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
# What samples by the output so far.
_COUNTING = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# The model's generation_config.json may set these for a chat, unless the server is told otherwise.
_SET_BY_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ALIKE = (*_DEFAULTS, "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias", "regex", "ebnf")
# `/generate` as used here does not do or report what these fields ask for; or they change the render.
_BEYOND = (
    "add_generation_prompt",
    "add_special_tokens",
    "bootstrap_host",
    "custom_logit_processor",
    "custom_params",
    "data_parallel_rank",
    "input_ids",
    "json_schema",
    "lora_path",
    "return_cached_tokens_details",
    "return_hidden_states",
    "return_input_ids_in_sglext",
    "return_meta_info",
    "return_output_ids_in_sglext",
    "return_prompt_token_ids",
    "return_routed_experts",
    "return_sampling_mask",
    "return_spec_tokens_details",
    "routed_dp_rank",
    "session_params",
    "stop_regex",
    "watermark",
)
# The engine's own route refuses lower values.
_LOWEST = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "top_logprobs": 0, "seed": -(2**63)}
_TAIL_TOKENS = 16  # of the prompt, because a token's text depends on the tokens before it


class SglangTokens:
    """Talks to `python -m sglang.launch_server`."""

    kind = "sglang"
    stop_field = "matched_stop"

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts
        self.stream_form = "sglang incremental" if facts.is_incremental else "sglang"
        self._messages = MessageReader(facts.tool_parser, facts.reasoning_parser)

    @property
    def limits(self) -> str:
        """Which requests pass through anyway, in addition to those of any engine."""
        limits = [self._messages.limits]
        if self._facts.has_own_defaults:
            limits.append(f"a chat must name {', '.join(_SET_BY_MODEL)} (or start it with --sampling-defaults openai)")
        elif not self._messages.passed:
            limits.append("messages with thinking, an effort or a system message among the others pass through")
        if "responses" not in self.passed:
            kept = " without `store: false`," if self._facts.is_storing else ""
            limits.append(f"responses pass through{kept} with several system messages or tools without a description")
        return "; ".join(limits)

    @property
    def passed(self) -> Mapping[str, str]:
        """The APIs whose answers cannot be built from its tokens, and why."""
        if self._messages.passed:
            return dict.fromkeys(("chat", "messages", "responses"), self._messages.passed)
        passed = {}
        if self._facts.has_own_defaults:
            passed["messages"] = "a message cannot name all that the model sets (--sampling-defaults openai helps)"
        if self._facts.reasoning_parser is not None:
            passed["responses"] = "a response tells how many of its tokens were thought"
        elif self._facts.has_preferred:
            passed["responses"] = "it runs with --preferred-sampling-params"
        return passed

    def render(self, path: str, request: Mapping[str, Any], body: bytes) -> Upstream | None:
        if path == _COMPLETIONS:
            prompt = request.get("prompt")
            return Upstream(TOKENIZE, b"", orjson.dumps({"prompt": prompt})) if isinstance(prompt, str) else None
        try:
            if path == _CHATS:
                # The route takes a chat's every field, but answers a stream with 501.
                return Upstream(TOKENIZE, b"", without_field(body, request, "stream")[0])
            chat = self._chat_of(path, request)
            return Upstream(TOKENIZE, b"", encoded(chat)) if chat is not None else None
        except TooDeep:
            return None  # the engine's own route gets the body as it came

    def rendered(
        self, path: str, request: Mapping[str, Any], answer: bytes, num_calls: int | None = None
    ) -> Rendered | None:
        is_chat = path != _COMPLETIONS
        asked = self._chat_of(path, request)
        if asked is None or (is_chat and not answer):
            return None
        made, ids = cut_ids(answer, "tokens") if answer else ({"tokens": request.get("prompt")}, None)
        if not isinstance(made["tokens"], list):
            return None
        try:
            if ids is None or made["tokens"]:
                ids = TokenIds.of(made["tokens"])
            return self._rendered(is_chat, asked, ids)
        except (AttributeError, TypeError, ValueError):
            return None  # malformed, which the engine's own route reports in its own words

    def _chat_of(self, path: str, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A request in the form of the routes that `/v1/tokenize` knows; None if it has no such form."""
        if path in (_CHATS, _COMPLETIONS):
            return request
        try:
            if path == "/v1/messages":
                return chat_of_messages(request, self._facts.reasoning_parser)
            return chat_of_response(request, self._facts.is_storing)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return None  # malformed, as above, or nested too deeply

    def _rendered(self, is_chat: bool, request: Mapping[str, Any], ids: TokenIds) -> Rendered | None:
        grammar = _grammar(request)
        if grammar is None or not _is_within(request):
            return None
        if is_chat and self._facts.has_own_defaults and any(request.get(name) is None for name in _SET_BY_MODEL):
            return None
        needs_parser = is_chat and self._messages.is_needed(request)
        # With reasoning a grammar must begin after it, and with tools it forbids them; both are left to the chat route.
        if needs_parser and (grammar or not self._messages.can_read(request)):
            return None
        wanted = request.get("max_tokens")
        if is_chat:
            wanted = request.get("max_completion_tokens") or wanted
        fills_context = is_chat and not wanted
        if fills_context:
            wanted = self._facts.context_tokens - len(ids) - 1
        num_logprobs = _num_logprobs(request, is_chat)
        includes_stop = bool(request.get("no_stop_trim") or request.get("include_stop_str_in_output"))
        given = {name: request[name] for name in _ALIKE if request.get(name) is not None}
        further = {"no_stop_trim": includes_stop, "sampling_seed": request.get("seed")}
        sampling = {**_DEFAULTS, **given, **grammar, **further}
        stop = request.get("stop") or ()
        call = {
            "sampling_params": sampling,
            "return_logprob": num_logprobs is not None,
            "top_logprobs_num": num_logprobs or 0,
            "cache_salt": request.get("cache_salt"),
            "extra_key": request.get("extra_key"),
        }
        encoded(call)  # raises TooDeep if it cannot be sent on
        return Rendered(
            kind=self.kind,
            prompt_ids=ids,
            call=call,
            max_tokens=16 if wanted is None else wanted,
            min_tokens=request.get("min_tokens") or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            includes_stop=includes_stop,
            needs_parser=needs_parser,
            has_grammar=bool(grammar),
            chat=request,
            fills_context=fills_context,
            counts_output=any(sampling[name] != _DEFAULTS[name] for name in _COUNTING),
        )

    def generate(self, rendered: Rendered, leg: TokenLeg) -> Upstream:
        sampling: dict[str, Any] = {
            **rendered.call["sampling_params"],
            "max_new_tokens": rendered.max_tokens - leg.num_made,
            "min_new_tokens": max(rendered.min_tokens - leg.num_made, 0),
        }
        if sampling["sampling_seed"] is not None:
            # Its sampling also depends on a token's position, so a later leg samples as the first would have.
            sampling["sampling_seed"] += leg.index
        if rendered.needs_parser:
            sampling["skip_special_tokens"] = False
        if leg.event_tokens > 1:
            sampling["stream_interval"] = leg.event_tokens
        call: dict[str, Any] = {
            **rendered.call,
            "rid": leg.request_id,
            "sampling_params": sampling,
            "return_logprob": rendered.call["return_logprob"] or leg.wants_logprobs,
            "return_text_in_logprobs": True,
            "priority": leg.priority,
            "routing_key": leg.trajectory_id,
            "routed_dp_rank": leg.rank,  # this route alone does not read the header
            "stream": True,
            **salted(rendered.call, leg.cache_salt),
        }
        told = {name: value for name, value in call.items() if value is not None}
        return Upstream(SGLANG_GENERATE, b"", with_prompt(told, "input_ids", leg.prompt_ids))

    def reader(self, rendered: Rendered, only_numbers: bool) -> Callable[[bytes], Piece]:
        return EventReader(self._facts.is_incremental, rendered, only_numbers)

    def texts(self, rendered: Rendered, outputs: Sequence[Sequence[int]]) -> Upstream:
        tail = rendered.prompt_ids.tail(_TAIL_TOKENS)
        call: dict[str, Any] = {"tokens": [tail, *(tail + ids for ids in outputs)]}
        if rendered.call["sampling_params"].get("skip_special_tokens") is False:
            call["skip_special_tokens"] = False
        return Upstream(DETOKENIZE, b"", with_ids(call))

    def read_texts(self, answer: bytes) -> list[str]:
        before, *texts = orjson.loads(answer)["text"]
        return [text[len(before) :].rstrip("\ufffd") for text in texts]

    async def derender(
        self, ask: Asking, rendered: Rendered, prompt_ids: TokenIds, last: Whole | Delta
    ) -> tuple[dict[str, Any], Any]:
        tail = prompt_ids.tail(_TAIL_TOKENS)
        if isinstance(last, Delta):
            return await self._messages.delta(ask, rendered.chat, tail, last)
        return await self._messages.whole(ask, rendered.chat, tail, last), None


def _is_within(request: Mapping[str, Any]) -> bool:
    """Whether it asks only for what `/generate` can do, with values of the right type."""
    for name, lowest in _LOWEST.items():
        value = request.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < lowest):
            return False
    stop, salt = request.get("stop"), request.get("cache_salt")
    if not isinstance(salt, str | None) or not isinstance(stop, str | list | None):
        return False
    if ":" in (request.get("model") or "") or request.get("tool_choice") not in (None, "none", "auto"):
        return False  # a LoRA adapter follows the colon
    for message in request.get("messages") or ():
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            return False  # an image is not in the render's tokens
    return all(request.get(name) is None or request[name] is False for name in _BEYOND)  # a 0 asks for something


def _grammar(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sampling parameter that constrains an answer's format; None if only the chat route can build it."""
    form = request.get("response_format") or {}
    match form.get("type") if isinstance(form, dict) else "":
        case None | "text":
            return {name: request[name] for name in ("regex", "ebnf") if request.get(name)}
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema" if isinstance(schema := (form.get("json_schema") or {}).get("schema"), dict):
            return {"json_schema": orjson.dumps(schema).decode()}
        case _:
            return None


def _num_logprobs(request: Mapping[str, Any], is_chat: bool) -> int | None:
    """How many alternatives to report with each token; None for no log-probabilities."""
    if is_chat:
        return (request.get("top_logprobs") or 0) if request.get("logprobs") else None
    number = request.get("logprobs")
    return int(number) if number is not None else None
