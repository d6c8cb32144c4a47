"""SGLang's native `/generate`: text or token ids in, text and token ids out; a stream repeats its earlier output."""

from functools import partial
from typing import Any

import orjson

from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import ANY_OBJECT, Body, flag, integer, mapping, wishes_of
from engines.simulated.live import Generation
from engines.simulated.openai_api import prompts_of, run
from engines.simulated.openai_stream import DONE
from engines.simulated.running import Asked, Running
from engines.simulated.service import EngineService
from engines.simulated.sglang_tokens import tools_in

_KNOWN = frozenset(
    {
        "text",
        "input_ids",
        "sampling_params",
        "stream",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "rid",
        "priority",
        "session_params",
        "session_id",
        "extra_key",
        "cache_salt",
        "kv_hints",
        "return_text_in_logprobs",
        "routing_key",
        "return_hidden_states",
        "log_metrics",
        "custom_labels",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "data_parallel_rank",
    }
)


async def generate(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    """Answers one native request. Unknown fields are refused, as the real server does."""
    body = await exchange.json()
    if unknown := sorted(set(body) - _KNOWN):
        raise ApiError(400, f"Unknown field: {unknown[0]}", param=unknown[0])
    prompts = prompts_of(service, body, "input_ids" if body.get("input_ids") is not None else "text")
    if len(prompts) != 1:
        raise ApiError(400, "The simulated engine takes one prompt per request.", param="input_ids")
    sampling = mapping(body, "sampling_params")
    max_tokens = service.answer_limit(prompts[0], integer(sampling, "max_new_tokens", 128, lowest=1))
    form: Body = {
        "n": sampling.get("n"),
        "stop": sampling.get("stop"),
        "stop_token_ids": sampling.get("stop_token_ids"),
        "ignore_eos": sampling.get("ignore_eos"),
        "include_stop_str_in_output": sampling.get("no_stop_trim"),
        "tools": tools_in(prompts[0], service.tokenizer),
        "min_tokens": sampling.get("min_new_tokens"),
        "temperature": sampling.get("temperature"),
        "seed": sampling.get("sampling_seed"),
        "structured_outputs": _structured(sampling),
    }
    num_logprobs = (integer(body, "top_logprobs_num", 0) or 0) if flag(body, "return_logprob") else None
    wishes = wishes_of(form, max_tokens, num_logprobs)
    asked = Asked(
        dialect.answer_id(exchange, body, ""),
        prompts * len(wishes),
        wishes,
        dialect.priority(exchange, body),
        str(body.get("cache_salt") or body.get("extra_key") or ""),
        flag(body, "stream"),
    )
    names_tokens = flag(body, "return_text_in_logprobs")
    interval = integer(sampling, "stream_interval", 1, lowest=1) or 1
    await run(
        service,
        dialect,
        exchange,
        asked,
        partial(_GenerateStream, service, names_tokens, interval),
        partial(_whole, service, names_tokens),
    )


def _structured(sampling: Body) -> Body | None:
    schema = sampling.get("json_schema")
    if schema is None:
        return None
    try:
        form = orjson.loads(schema) if isinstance(schema, str) else schema
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"json_schema: {error}", param="sampling_params") from error
    return {"json": ANY_OBJECT if form == {"type": "object"} else form}


def _whole(service: EngineService, names_tokens: bool, running: Running) -> Any:
    answers = [
        _answer(service, names_tokens, running, index, 0, generation.num_done)
        for index, generation in enumerate(running.generations)
    ]
    return answers[0] if len(answers) == 1 else answers


def _answer(service: EngineService, names_tokens: bool, running: Running, index: int, begin: int, end: int) -> Body:
    generation = running.generations[index]
    is_last = generation.ended_at is not None and end == generation.num_done
    meta: Body = {
        "id": running.asked.id,
        "finish_reason": _finish_reason(generation) if is_last else None,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": end,
        "cached_tokens": generation.cached_tokens,
        "weight_version": service.weight_version,
        "weight_versions": generation.weight_versions(),
        "num_retractions": generation.num_preemptions,
    }
    if generation.answer.logprobs is not None:

        def entry(value: float, id: int) -> tuple[float, int, str | None]:
            return value, id, service.tokenizer.decode([id]) if names_tokens else None

        rated = generation.answer.logprobs[begin:end]
        spans = zip(rated, generation.answer.token_ids[begin:end], strict=True)
        meta["output_token_logprobs"] = [entry(own, id) for (own, _), id in spans]
        if any(rivals for _, rivals in rated):
            meta["output_top_logprobs"] = [[entry(value, id) for id, value in rivals] for _, rivals in rated]
    text = "".join(generation.answer.texts[begin:end])
    return {
        "text": text,
        "output_ids": generation.answer.token_ids[begin:end],
        "meta_info": meta,
        "index": index,
    }


def _finish_reason(generation: Generation) -> Body:
    if generation.is_aborted:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if generation.answer.finish_reason == "length":
        return {"type": "length", "length": generation.num_done}
    matched = generation.answer.stop_reason
    return {"type": "stop", "matched": generation.answer.token_ids[-1] if matched is None else matched}


class _GenerateStream:
    """Events of a native stream: all output so far, or only what is new if the server is configured that way.

    One event for each token, or for `interval` of them; the first comes at once. If chunks have an interval, one for
    everything new.
    """

    def __init__(self, service: EngineService, names_tokens: bool, interval: int, running: Running) -> None:
        self._service = service
        self._names_tokens = names_tokens
        self._interval = interval
        self._merges = service.settings.chunk_interval_s > 0
        self._running = running
        self._is_incremental = service.settings.incremental_streaming_output
        self._seen = [0] * len(running.generations)
        self._has_ended = [False] * len(running.generations)

    def new_events(self) -> list[bytes]:
        events = []
        for index, generation in enumerate(self._running.generations):
            while (begin := self._seen[index]) < (done := generation.num_done):
                size = done - begin if self._merges else self._interval if begin else 1
                if begin + size > done and generation.ended_at is None:
                    break
                self._seen[index] = end = min(begin + size, done)
                self._has_ended[index] = generation.ended_at is not None and end == done
                events.append(self._event(index, begin if self._is_incremental else 0, end))
            if generation.ended_at is not None and not self._has_ended[index]:  # aborted between two tokens
                self._has_ended[index] = True
                events.append(self._last_of_aborted(index, generation))
        return events

    def _event(self, index: int, first: int, end: int) -> bytes:
        answer = _answer(self._service, self._names_tokens, self._running, index, first, end)
        return b"data: " + orjson.dumps(answer) + b"\n\n"

    def _last_of_aborted(self, index: int, generation: Generation) -> bytes:
        """All of the text, in any stream; in an incremental one also the last token once more."""
        done = generation.num_done
        answer = _answer(self._service, self._names_tokens, self._running, index, 0, done)
        if self._is_incremental:
            answer["output_ids"] = answer["output_ids"][-1:]
        return b"data: " + orjson.dumps(answer) + b"\n\n"

    def last_events(self) -> list[bytes]:
        return [DONE]
