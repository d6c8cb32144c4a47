"""What each trajectory's KV was computed from and where it is: the request that has an engine bring it elsewhere.

Turns at token level are in the token book already, exact to the token. For other turns the last request is kept, up to
a limit in bytes. Its answer is not in it, and is prefilled at the new home with the tool's output.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engines.token_ids import TokenIds
from gateway.tokens.book import TokenBook
from gateway.tokens.packed import all_ids, chain
from gateway.turns.turn import Turn
from store.port import StoreError

COMPLETIONS = "/v1/completions"
# Engines whose tier is known; a fleet has 64 or so, and those that left are useful while their trajectories go on.
_MAX_TIERS = 1_000


@dataclass(slots=True)
class Context:
    """One trajectory's context.

    Args:
        engine_id: where its last leg ran.
        num_tokens: prompt and output of its last finished turn.
        path, body: its last request; `body` is None until it has been answered, if its tokens are in the book, or if it
            was dropped.
        cache_salt: the client's own; the engine finds its KV only with it.
        tier: the KV tier in which its last turn's engine also keeps it for others; "" if there is none.
        version: of the weights that its KV there was computed with.
        brought_by: how its KV came to `engine_id` for the next turn: a move's outcome, or "".
        is_awaited: the next turn should find it in the tier.
    """

    engine_id: str
    num_tokens: int
    model: str
    path: str
    body: bytes | None
    cache_salt: str | None
    tier: str
    version: str
    brought_by: str = ""
    is_awaited: bool = False


class Contexts:
    """The contexts of all trajectories.

    Args:
        max_bytes: for kept requests; the least recently used go first.
        tier_of: the KV tier of an engine, by id; None as long as it has not told.
    """

    def __init__(self, book: TokenBook, max_bytes: int, tier_of: Callable[[str], str | None]) -> None:
        self._book = book
        self._tier_of = tier_of
        self._tiers: dict[str, str] = {}  # by engine: another process is another engine
        self._max_bytes = max_bytes
        self._contexts: dict[str, Context] = {}
        self._with_body: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0

    def get(self, trajectory_id: str) -> Context | None:
        """A trajectory's context, if a turn of it has run."""
        return self._contexts.get(trajectory_id)

    def ran(self, turn: Turn, engine_id: str) -> None:
        """A leg of a turn ran there, to its end or not."""
        context = self._contexts.get(turn.ask.trajectory_id)
        if context is not None:
            context.engine_id, context.tier = engine_id, self._tier(engine_id)
            context.version = _version(turn)
        else:
            self._contexts[turn.ask.trajectory_id] = self._new(turn, engine_id, 0, None)

    def finished(self, turn: Turn, engine_id: str, num_tokens: int) -> None:
        """A turn finished there; a request whose tokens the book keeps is not kept here."""
        trajectory_id = turn.ask.trajectory_id
        self._num_bytes -= self._with_body.pop(trajectory_id, 0)
        body = None if turn.choices and turn.ask.keeps_tokens else turn.ask.body
        context = self._new(turn, engine_id, num_tokens, body)
        self._contexts[trajectory_id] = context
        if context.body is not None:
            self._with_body[trajectory_id] = len(context.body)
            self._num_bytes += len(context.body)
            while self._num_bytes > self._max_bytes:
                self._drop_body(next(iter(self._with_body)))

    def forget(self, trajectory_id: str) -> None:
        """A trajectory is over."""
        self._drop_body(trajectory_id)
        self._contexts.pop(trajectory_id, None)

    async def request(self, trajectory_id: str, turn: Turn | None) -> tuple[str, dict[str, Any]] | None:
        """The route and request whose prompt is a trajectory's context.

        Args:
            turn: the turn that is about to run; None in a tool call.

        Returns:
            None if nothing is known of it.
        Raises:
            ValueError: a value that no turn has read so far is not JSON to us; it may be to an engine.
        """
        context = self._contexts.get(trajectory_id)
        ids: Sequence[int] | None = None
        if turn is not None and turn.choices:
            ids = [*turn.choices[0].chain.prompt_ids, *turn.choices[0].chain.output_ids]
        elif context is None or context.body is None:
            ids = await self._kept_ids(trajectory_id)
        if ids:
            model = turn.ask.model if turn is not None else context.model if context is not None else None
            salt = turn.ask.request.get("cache_salt") if turn is not None else context and context.cache_salt
            return COMPLETIONS, _of_ids(ids, model, salt)
        if turn is not None:
            return turn.ask.path, dict(turn.ask.request)
        if context is None or context.body is None:
            return None
        return context.path, orjson.loads(context.body)

    async def _kept_ids(self, trajectory_id: str) -> TokenIds | None:
        try:
            turns = await self._book.turns(trajectory_id)
        except StoreError:
            return None
        last = max(turns.values(), key=lambda turn: turn.ended_at, default=None)
        return all_ids(chain(turns, last)) if last is not None else None

    def _new(self, turn: Turn, engine_id: str, num_tokens: int, body: bytes | None) -> Context:
        ask = turn.ask
        salt = ask.request.get("cache_salt")
        return Context(  # by position, as everything that is made at every turn
            engine_id,
            num_tokens,
            ask.model,
            ask.path,
            body,
            salt if isinstance(salt, str) else None,
            self._tier(engine_id),
            _version(turn),
        )

    def _tier(self, engine_id: str) -> str:
        tier = self._tiers.get(engine_id)
        if tier is None:
            if (tier := self._tier_of(engine_id)) is None:
                return ""
            self._tiers[engine_id] = tier
            if len(self._tiers) > _MAX_TIERS:
                del self._tiers[next(iter(self._tiers))]
        return tier

    def _drop_body(self, trajectory_id: str) -> None:
        self._num_bytes -= self._with_body.pop(trajectory_id, 0)
        context = self._contexts.get(trajectory_id)
        if context is not None:
            context.body = None


def _version(turn: Turn) -> str:
    """Of the weights that its leg began with: the engine finds its KV by them."""
    return turn.versions[0] if turn.versions else ""


def _of_ids(ids: Sequence[int], model: str | None, cache_salt: object) -> dict[str, Any]:
    request: Mapping[str, Any] = {"model": model, "prompt": list(ids), "temperature": 0, "cache_salt": cache_salt}
    return {name: value for name, value in request.items() if value is not None}
