"""What an engine offers at token level: a request to prompt ids, ids to further ids, ids to an answer.

A turn that is served so can stop at any token and go on from there, on any engine of the same model. Each method pair
is one request and the reading of its answer; the gateway sends it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from engines.token_ids import TokenIds
from engines.upstream import Upstream
from scheduling.values import value_class

Event = Mapping[str, Any]
Asking = Callable[[Upstream], Awaitable[bytes]]
"""Sends a request to an engine and gives the body of its answer, if that is a good one."""


@value_class(frozen=True, slots=True)
class Rendered:
    """A request at token level.

    Args:
        kind: of the engine that rendered it, and whose kind can be sent the `call`.
        call: what the engine is to be sent with the ids, in its own words.
        stop: strings that end the answer; with `includes_stop` they belong to it.
        needs_parser: the text holds tool calls or reasoning, which only the engine can tell apart.
        has_grammar: the answer is held to a grammar, whose state is lost where a leg ends.
        chat: what `derender` is to know of the request.
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


@value_class(frozen=True, slots=True)
class TokenLeg:
    """What one leg asks for.

    Args:
        prompt_ids: the prompt and all that was made after it.
        num_made: how many of them were made.
        index: which choice it is of those that the client wants; each is asked for by itself.
        cache_salt: KV is shared only under the same salt; "" for none but the client's own.
        event_tokens: how many tokens one event may have; 1 where the client waits for each.
        wants_logprobs: of the chosen tokens, even where the request asks for none.
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


@value_class(frozen=True, slots=True)
class Piece:
    """What one event of a leg's stream says.

    Args:
        text: what came to the text by these tokens; "" where a parser is needed.
        logprobs: for each token its entry in the engine's form, or the number alone; None where not asked for.
        versions: weight version, first and last + 1 of the leg's tokens; told at the end, if at all.
    """

    ids: list[int]
    text: str = ""
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    versions: tuple[tuple[str, int, int], ...] = ()
    cached_tokens: int | None = None


class ErrorEvent(Exception):
    """An event that says what went wrong, in place of tokens."""

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
    """How one kind of engine is spoken to at token level.

    Attributes:
        stream_form: what the streams of engines that have the same can be read by.
        stop_field: what an answer's choice calls the stop string or token that ended it.
        limits: which requests only the engine's own routes can serve, for people to read; "" where there is no more
            to say than of any engine.
        passed: the APIs whose answers cannot be made of its tokens, and why.
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
        """Ask for the prompt ids of a request; None where there is nothing to ask."""
        ...

    def rendered(self, path: str, request: Mapping[str, Any], answer: bytes) -> Rendered | None:
        """What came of it, b"" where nothing was asked; None for a request that only the engine's own route serves."""
        ...

    def generate(self, rendered: Rendered, leg: TokenLeg) -> Upstream:
        """Ask for further ids, as a stream."""
        ...

    def reader(self, rendered: Rendered, only_numbers: bool) -> Callable[[bytes], Piece]:
        """Reads the data of the events of one such stream.

        Args:
            only_numbers: nobody is told more of a log-probability than the number.

        The reader raises ErrorEvent; ValueError, KeyError, TypeError or AttributeError for nonsense.
        """
        ...

    def texts(self, rendered: Rendered, outputs: Sequence[Sequence[int]]) -> Upstream:
        """Ask for the texts of several outputs of the same prompt."""
        ...

    def read_texts(self, answer: bytes) -> list[str]:
        """What came of it; a character that is not complete is not in it."""
        ...

    async def derender(
        self, ask: Asking, rendered: Rendered, prompt_ids: TokenIds, last: "Whole | Delta"
    ) -> tuple[dict[str, Any], Any]:
        """The message that an output is, whole or what some tokens add to it.

        Args:
            rendered: by an engine of the same kind.

        Returns: the choice of an OpenAI answer or chunk, and the state to ask on with, of an engine of the same kind.
        Raises: what `ask` does; KeyError, IndexError, TypeError or ValueError for nonsense.
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
    """New tokens of an output that is streamed.

    Args:
        state: what `derender` gave for the tokens before; None at the first.
    """

    ids: Sequence[int]
    finish_reason: str | None
    stop_reason: str | int | None
    state: Any


def has_tools(request: Mapping[str, Any]) -> bool:
    """Whether the answer may call a tool."""
    return bool(request.get("tools")) and request.get("tool_choice") != "none"
