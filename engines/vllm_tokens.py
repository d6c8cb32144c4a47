"""vLLM's token routes: render, generate, derender (vLLM 0.32, entrypoints/scale_out; `--enable-scale-out`).

Where no parser is needed, generate gives text beside the ids (`output_mode: text`): the very text of its own chat
route, stop strings held back and cut off. Where one is, the ids go to derender, which reads a whole output at once, or
new tokens after a replay of all before them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from engines.dialect import has_route
from engines.http import HttpClient
from engines.token_ids import TokenIds, cut_ids, with_ids
from engines.tokens import Asking, Delta, Event, Piece, Rendered, TokenLeg, Whole, has_tools, parsed
from engines.upstream import Upstream

_RENDER = "/v1/completions/render"
_DERENDER = "/v1/completions/derender"
# Where the entries of log-probabilities stand in an event, and what they have.
_LOGPROBS, _AFTER_LOGPROBS = b'"logprobs":{"content":[', b"]}}]}"
_LOGPROB = re.compile(rb'"logprob":(-?[0-9][0-9.eE+-]*)')
# What render says of a request besides, and generate wants to hear again.
_PASSED_ON = ("model", "reasoning_ended", "reasoning_parser_kwargs", "cache_salt")


async def offers_tokens(http: HttpClient, timeout_s: float) -> bool:
    """Whether these routes are there, and not forbidden."""
    return await has_route(http, _RENDER, timeout_s) and await has_route(http, _DERENDER, timeout_s)


class VllmTokens:
    """Speaks to `vllm serve --enable-scale-out`."""

    kind = "vllm"
    stop_field = "stop_reason"
    limits = ""
    passed: Mapping[str, str] = dict.fromkeys(
        ("responses", "messages"), "it renders them to tokens, but derenders only chat and completions"
    )

    def render(self, path: str, request: Mapping[str, Any], body: bytes) -> Upstream:
        return Upstream(f"{path}/render", b"", body)

    def rendered(self, request: Mapping[str, Any], answer: bytes) -> Rendered | None:
        made, ids = cut_ids(answer, "token_ids")
        if isinstance(made, list):  # one for each prompt of a completion
            if len(made) != 1:
                return None
            made = made[0]
        if made.get("features"):
            return None
        if ids is None or made["token_ids"]:
            ids = TokenIds.of(made["token_ids"])
        sampling = made["sampling_params"]
        needs_parser = has_tools(request) or made.get("reasoning_parser_kwargs") is not None
        stop = sampling.get("stop") or ()
        return Rendered(
            kind=self.kind,
            prompt_ids=ids,
            call={"sampling_params": sampling}
            | {name: made[name] for name in _PASSED_ON if made.get(name) is not None},
            max_tokens=sampling["max_tokens"],
            min_tokens=sampling.get("min_tokens") or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            includes_stop=bool(sampling.get("include_stop_str_in_output")),
            needs_parser=needs_parser,
            has_grammar=sampling.get("structured_outputs") is not None,
        )

    def generate(self, rendered: Rendered, leg: TokenLeg) -> Upstream:
        sampling: dict[str, Any] = {**rendered.call["sampling_params"], "n": 1}
        if leg.num_made:
            sampling["max_tokens"] = rendered.max_tokens - leg.num_made
            sampling["min_tokens"] = max(rendered.min_tokens - leg.num_made, 0)
        if sampling.get("seed") is not None:
            # As vLLM gives each choice its own; and in a later leg the dice would fall as they did at the start.
            sampling["seed"] += leg.index + leg.num_made
        if leg.wants_logprobs and sampling.get("logprobs") is None:
            sampling["logprobs"] = 0
        if leg.event_tokens > 1:
            sampling["stream_interval"] = leg.event_tokens
        call: dict[str, Any] = {
            **rendered.call,
            "request_id": leg.request_id,
            "token_ids": leg.prompt_ids,
            "sampling_params": sampling,
            "output_mode": "tokens" if rendered.needs_parser else "text",
            "priority": leg.priority,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if leg.cache_salt:
            own = call.get("cache_salt")
            call["cache_salt"] = f"{own}.{leg.cache_salt}" if own else leg.cache_salt
        headers = f"x-request-id: {leg.request_id}\r\nx-session-id: {leg.trajectory_id}\r\n"
        return Upstream("/inference/v1/generate", headers.encode("latin-1", "replace"), with_ids(call))

    def reader(self, rendered: Rendered, only_numbers: bool) -> Callable[[bytes], Piece]:
        return _piece_of_numbers if only_numbers else _whole_piece

    def texts(self, rendered: Rendered, outputs: Sequence[Sequence[int]]) -> Upstream:
        made = [_response(f"part-{i}", {"token_ids": ids, "finish_reason": "length"}) for i, ids in enumerate(outputs)]
        call = {"generate_responses": made, "prompt_token_ids": [rendered.prompt_ids[-16:]] * len(made)}
        return Upstream(_DERENDER, b"", orjson.dumps(call))

    def read_texts(self, answer: bytes) -> list[str]:
        return [choice["text"] for choice in orjson.loads(answer)["choices"]]

    async def derender(
        self, ask: Asking, request: Mapping[str, Any], prompt_ids: TokenIds, last: Whole | Delta
    ) -> tuple[dict[str, Any], Any]:
        if isinstance(last, Delta) and last.finish_reason is not None and len(last.ids) > 1:
            return await self._derender_end(ask, request, prompt_ids, last)
        choice: dict[str, Any] = {
            "token_ids": last.ids,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        call: dict[str, Any] = {"chat_request": request}
        if isinstance(last, Delta):
            made = _response("part", choice)
            call |= {"stream": True, "prompt_token_ids": prompt_ids, "generate_chunk": made, "stream_state": last.state}
        else:
            if last.logprobs is not None:
                choice["logprobs"] = {"content": last.logprobs}
            # Here, and nowhere else, a parser looks for the prompt that must know whether it left reasoning open.
            call["generate_response"] = _response("whole", choice) | {"prompt_token_ids": prompt_ids}
        made = orjson.loads(await ask(Upstream("/v1/chat/completions/derender", b"", with_ids(call))))
        state = made.get("stream_state")
        return (made["chunk"] if state is not None else made)["choices"][0], state

    async def _derender_end(
        self, ask: Asking, request: Mapping[str, Any], prompt_ids: TokenIds, last: Delta
    ) -> tuple[dict[str, Any], Any]:
        """With the last token read by itself, as the chat route does: where the name of a call and the end come at
        once, the parser takes the call for one without arguments and says so (vLLM 0.33, `{}` of hermes)."""
        first = Delta(last.ids[:-1], None, None, last.state)
        before, state = await self.derender(ask, request, prompt_ids, first)
        end = Delta(last.ids[-1:], last.finish_reason, last.stop_reason, state)
        choice, state = await self.derender(ask, request, prompt_ids, end)
        return choice | {"delta": _joined(before["delta"], choice["delta"])}, state


def _joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Two deltas as one: what both have is a text or a list."""
    both = {name: before[name] + after[name] for name in before.keys() & after.keys() if before[name] and after[name]}
    told = [(name, value) for delta in (before, after) for name, value in delta.items() if value]
    return dict(told) | both


def _response(request_id: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": request_id, "choices": [{"index": 0, **choice}]}


def _piece_of_numbers(data: bytes) -> Piece:
    """With the log-probabilities' numbers alone: to make objects of all that an event says of them takes twice as long
    as all else of it."""
    text, logprobs = cut_logprobs(data)
    return _piece(parsed(text), logprobs)


def cut_logprobs(data: bytes) -> tuple[bytes, list[float] | None]:
    """An event without its entries of log-probabilities, and the number of each; all of it, and None, where these are
    not what it ends with. Within a string its quotes would be escaped."""
    start = data.find(_LOGPROBS) + len(_LOGPROBS)
    entries = data[start : -len(_AFTER_LOGPROBS)]
    num_tokens = entries.count(b'"top_logprobs":[')
    if start < len(_LOGPROBS) or not data.endswith(_AFTER_LOGPROBS) or b']},"' in entries or not num_tokens:
        return data, None
    # Its first rival is the token itself, if any: no others were asked for.
    numbers = list(map(float, _LOGPROB.findall(entries)))
    if len(numbers) not in (num_tokens, 2 * num_tokens):
        return data, None
    return data[:start] + _AFTER_LOGPROBS, numbers[:: len(numbers) // num_tokens]


def _whole_piece(data: bytes) -> Piece:
    return _piece(parsed(data), None)


def _piece(event: Event, numbers: list[float] | None) -> Piece:
    choices = event["choices"]
    if not choices:
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        return Piece([], cached_tokens=details.get("cached_tokens"))
    choice = choices[0]
    logprobs, versions = choice.get("logprobs"), choice.get("weight_versions")
    return Piece(
        choice["token_ids"] or [],
        choice.get("text") or "",
        numbers or (logprobs["content"] if logprobs else None),
        choice["finish_reason"],
        choice.get("stop_reason"),
        tuple((span["version"], span["start"], span["end"]) for span in versions) if versions else (),
    )
