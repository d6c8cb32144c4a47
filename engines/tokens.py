"""What an engine offers at token level: a request to prompt ids, ids to further ids, ids to an answer.

A turn that is served this way can stop at any token and continue from there, on any engine of the same model. Each pair
of methods builds one request and reads its answer; the gateway sends it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from engines.token_ids import TokenIds
from engines.upstream import Upstream
from scheduling.values import value_class

Event = Mapping[str, Any]
Asking = Callable[[Upstream], Awaitable[bytes]]
"""Sends a request to an engine and returns the body of a successful answer."""


@value_class(frozen=True, slots=True)
class Rendered:
    """A request at token level.

    Args:
        kind: of the engine that rendered it; only that kind can be sent the `call`.
        call: what the engine is sent with the ids, in its own form.
        stop: strings that end the answer; with `includes_stop` they are part of it.
        needs_parser: the text contains tool calls or reasoning, which only the engine can separate.
        has_grammar: the answer is held to a grammar, whose state is lost when a leg ends.
        chat: what `derender` must know of the request.
        fills_context: the request has no limit: `max_tokens` is the room that these prompt ids leave.
        counts_output: what is sampled depends on the output so far (penalties, bad words), of which an engine counts
            only its own leg's.
        stops_after: a stop string counts only if it ends after so many tokens.
        knows_end: of a whole answer with calls, `derender` gets the right finish reason from the engine.
    """

    kind: str
    prompt_ids: TokenIds
    call: Mapping[str, Any]
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    includes_stop: bool
    needs_parser: bool
    has_grammar: bool
    chat: Mapping[str, Any]
    fills_context: bool = False
    counts_output: bool = False
    stops_after: int = 0
    knows_end: bool = False


@value_class(frozen=True, slots=True)
class TokenLeg:
    """What one leg asks for.

    Args:
        prompt_ids: the prompt and all tokens made after it.
        num_made: how many of them were made.
        index: which of the client's choices it is; each is requested separately.
        cache_salt: KV is shared only under the same salt; "" adds none to the client's own.
        event_tokens: how many tokens one event may have; 1 if the client waits for each.
        wants_logprobs: of the chosen tokens, even if the request does not ask for them.
        rank: see `Leg`.
    """

    request_id: str
    trajectory_id: str
    priority: int
    prompt_ids: TokenIds
    num_made: int
    cache_salt: str
    event_tokens: int
    wants_logprobs: bool
    index: int = 0
    rank: int | None = None


@value_class(frozen=True, slots=True)
class Piece:
    """What one event of a leg's stream contains.

    Args:
        text: what these tokens add to the text; "" if a parser is needed.
        logprobs: each token's entry in the engine's form, or only the number; None if not asked for.
        versions: weight version, first and last + 1 of the leg's tokens; reported at the end, if at all.
    """

    ids: list[int]
    text: str = ""
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    versions: tuple[tuple[str, int, int], ...] = ()
    cached_tokens: int | None = None


class ErrorEvent(Exception):
    """An event that reports an error instead of tokens."""

    def __init__(self, event: Event) -> None:
        super().__init__("the stream ended with an error")
        self.event = event


def parsed(data: bytes) -> Event:
    """An event of a stream. Raises ErrorEvent, ValueError."""
    event: Event = orjson.loads(data)
    if event.get("error"):
        raise ErrorEvent(event)
    return event


class TokenRoutes(Protocol):
    """How to talk to one kind of engine at token level.

    Attributes:
        stream_form: engines with the same form have streams that the same reader can read.
        stop_field: the field of an answer's choice for the stop string or token that ended it.
        limits: for people to read: which requests only the engine's own routes can serve; "" if there are none beyond
            those of any engine.
        passed: the APIs whose answers cannot be built from its tokens, and why.
    """

    @property
    def kind(self) -> str: ...

    @property
    def stream_form(self) -> str: ...

    @property
    def stop_field(self) -> str: ...

    @property
    def limits(self) -> str: ...

    @property
    def passed(self) -> Mapping[str, str]: ...

    def render(self, path: str, request: Mapping[str, Any], body: bytes) -> Upstream | None:
        """Ask for the prompt ids of a request; None if there is nothing to ask."""
        ...

    def rendered(
        self, path: str, request: Mapping[str, Any], answer: bytes, num_calls: int | None = None
    ) -> Rendered | None:
        """The result, from b"" if nothing was asked; None for a request that only the engine's own route serves.

        Args:
            num_calls: tool calls in a chat's messages, if they are counted.
        """
        ...

    def generate(self, rendered: Rendered, leg: TokenLeg) -> Upstream:
        """Ask for further ids, as a stream."""
        ...

    def reader(self, rendered: Rendered, only_numbers: bool) -> Callable[[bytes], Piece]:
        """A reader of the data of one such stream's events.

        Args:
            only_numbers: only the number of each log-probability is needed.

        The reader raises ErrorEvent; ValueError, KeyError, TypeError or AttributeError for malformed events.
        """
        ...

    def texts(self, rendered: Rendered, outputs: Sequence[Sequence[int]]) -> Upstream:
        """Ask for the texts of several outputs of the same prompt."""
        ...

    def read_texts(self, answer: bytes) -> list[str]:
        """The texts, without incomplete characters."""
        ...

    async def derender(
        self, ask: Asking, rendered: Rendered, prompt_ids: TokenIds, last: "Whole | Delta"
    ) -> tuple[dict[str, Any], Any]:
        """The message that an output forms: whole, or what some tokens add to it.

        Args:
            rendered: by an engine of the same kind.

        Returns: the choice of an OpenAI answer or chunk, and the state for the next call, to an engine of the same
        kind.
        Raises: what `ask` does; KeyError, IndexError, TypeError or ValueError for malformed answers.
        """
        ...


@value_class(frozen=True, slots=True)
class Whole:
    """A whole output."""

    ids: Sequence[int]
    logprobs: Sequence[Mapping[str, Any]] | None
    finish_reason: str
    stop_reason: str | int | None


@value_class(frozen=True, slots=True)
class Delta:
    """New tokens of a streamed output.

    Args:
        state: what `derender` returned for the tokens before; None for the first.
    """

    ids: Sequence[int]
    finish_reason: str | None
    stop_reason: str | int | None
    state: Any


def has_tools(request: Mapping[str, Any]) -> bool:
    """Whether the answer may call a tool."""
    return bool(request.get("tools")) and request.get("tool_choice") != "none"
