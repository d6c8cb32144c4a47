"""What an SGLang server reports that its token routes depend on (0.5.23, srt/entrypoints/http_server.py)."""

from dataclasses import dataclass

import orjson

from engines.dialect import has_route
from engines.http import HttpClient

TOKENIZE = "/v1/tokenize"
DETOKENIZE = "/v1/detokenize"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server reports of itself.

    Args:
        is_incremental: a stream's event has only what is new, not everything from the start.
        has_own_defaults: a chat that does not name its sampling parameters gets the model's.
        has_preferred: a response that does not name them gets those of an option.
        is_storing: responses are kept, unless their client declines.
    """

    context_tokens: int
    is_incremental: bool
    has_own_defaults: bool
    tool_parser: str | None
    reasoning_parser: str | None
    has_preferred: bool = False
    is_storing: bool = False


class NoTokenRoutes(Exception):
    """The server has no token routes; the message says why."""


async def facts_of(http: HttpClient, timeout_s: float) -> ServerFacts:
    """Ask a server whether it has these routes. Raises NoTokenRoutes, and what HttpClient raises."""
    for path in (TOKENIZE, DETOKENIZE):  # `/generate` is as old as SGLang
        if not await has_route(http, path, timeout_s):
            raise NoTokenRoutes(f"it has no {path}")
    answers = []
    for path in ("/server_info", "/model_info", "/v1/models"):
        status, body = await http.get(path, timeout_s)
        if status != 200:
            raise NoTokenRoutes(f"{path} answered {status}")
        answers.append(body)
    try:
        server, model, models = map(orjson.loads, answers)
        if server.get("skip_tokenizer_init"):
            raise NoTokenRoutes("it runs with --skip-tokenizer-init")
        return ServerFacts(
            context_tokens=int(models["data"][0]["max_model_len"]),
            is_incremental=bool(server.get("incremental_streaming_output")),
            has_own_defaults=server.get("sampling_defaults") != "openai",
            # 0.5.17 shows its parsers only among its arguments.
            tool_parser=model.get("tool_call_parser") or server.get("tool_call_parser"),
            reasoning_parser=model.get("reasoning_parser") or server.get("reasoning_parser"),
            has_preferred=bool(model.get("preferred_sampling_params")),
            is_storing=bool(server.get("enable_response_store")),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise NoTokenRoutes(f"it does not say what it is: {error!r}") from None
