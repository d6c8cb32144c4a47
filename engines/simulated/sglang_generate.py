"""SGLang's native `/generate`: text or token ids in, text and token ids out; a stream repeats what it said before."""

from functools import partial
from typing import Any

import orjson

from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import Body, flag, integer, mapping, wishes_of
from engines.simulated.live import Generation
from engines.simulated.openai_api import prompts_of, run
from engines.simulated.openai_stream import DONE
from engines.simulated.service import Asked, EngineService, Running

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
        len(prompts[0]),
        dialect.priority(exchange, body),
        str(body.get("cache_salt") or body.get("extra_key") or ""),
        flag(body, "stream"),
    )
    await run(service, dialect, exchange, asked, partial(_GenerateStream, service), partial(_whole, service))


def _structured(sampling: Body) -> Body | None:
    schema = sampling.get("json_schema")
    if schema is None:
        return None
    try:
        return {"json": orjson.loads(schema) if isinstance(schema, str) else schema}
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"json_schema: {error}", param="sampling_params") from error


def _whole(service: EngineService, running: Running) -> Any:
    answers = [
        _answer(service, running, index, 0, generation.num_done) for index, generation in enumerate(running.generations)
    ]
    return answers[0] if len(answers) == 1 else answers


def _answer(service: EngineService, running: Running, index: int, begin: int, end: int) -> Body:
    generation = running.generations[index]
    meta: Body = {
        "id": running.asked.id,
        "finish_reason": _finish_reason(generation) if generation.ended_at is not None else None,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.num_done,
        "cached_tokens": generation.cached_tokens,
        "weight_version": service.weight_version,
        "weight_versions": generation.weight_versions(),
        "num_retractions": generation.num_preemptions,
    }
    if generation.answer.logprobs is not None:
        spans = zip(generation.answer.logprobs[begin:end], generation.answer.token_ids[begin:end], strict=True)
        meta["output_token_logprobs"] = [(own, id, None) for (own, _), id in spans]
        meta["output_top_logprobs"] = [
            [(value, id, None) for id, value in rivals] for _, rivals in generation.answer.logprobs[begin:end]
        ]
    text = "".join(generation.answer.texts[begin:end])
    return {
        "text": text,
        "output_ids": generation.answer.token_ids[begin:end],
        "meta_info": meta,
        "index": index,
    }


def _finish_reason(generation: Generation) -> Body:
    if generation.is_aborted:
        return {"type": "abort", "message": "Aborted"}
    if generation.answer.finish_reason == "length":
        return {"type": "length", "length": generation.num_done}
    matched = generation.answer.stop_reason
    return {"type": "stop", "matched": generation.answer.token_ids[-1] if matched is None else matched}


class _GenerateStream:
    """Events of a native stream: everything said so far, or only what is new where the server is set so."""

    def __init__(self, service: EngineService, running: Running) -> None:
        self._service = service
        self._running = running
        self._is_incremental = service.settings.incremental_streaming_output
        self._seen = [0] * len(running.generations)
        self._has_ended = [False] * len(running.generations)

    def new_events(self) -> list[bytes]:
        events = []
        for index, generation in enumerate(self._running.generations):
            begin, end = self._seen[index], generation.num_done
            has_ended = generation.ended_at is not None
            if begin == end and (not has_ended or self._has_ended[index]):
                continue
            self._seen[index], self._has_ended[index] = end, has_ended
            first = begin if self._is_incremental else 0
            answer = _answer(self._service, self._running, index, first, end)
            events.append(b"data: " + orjson.dumps(answer) + b"\n\n")
        return events

    def last_events(self) -> list[bytes]:
        return [DONE]
