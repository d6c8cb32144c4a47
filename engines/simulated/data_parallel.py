"""How one server runs several engines (`--data-parallel-size`): which of its ranks answers a request.

Each rank has a table of all routes. A turn goes to one rank. What controls engines goes to all ranks at once, and rank
0's answer goes out, or that of one that failed. What shows load is merged. All else is alike, so rank 0 answers it.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Literal, cast

import orjson

from engines.simulated.exchange import ApiError, Exchange, Message
from engines.simulated.fields import integer
from engines.simulated.routes import Handler, Routes

_RANK = b"x-data-parallel-rank"
# The routes of turns, with the fields in which SGLang also takes a rank.
_TURNS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("routed_dp_rank",),
    "/v1/completions": ("routed_dp_rank",),
    "/generate": ("routed_dp_rank", "data_parallel_rank"),
    "/v1/messages": (),
    "/v1/responses": (),
    "/inference/v1/generate": (),
}
# Conversions touch no engine, and are too much work to do for nothing.
_CONVERSIONS = ("/v1/", "/tokenize", "/detokenize")

Answer = tuple[bytes, int, tuple[bytes, bytes]]
"""Body, status and content type."""


def data_parallel_routes(ranks: Sequence[Routes], kind: Literal["vllm", "sglang"]) -> Routes:
    """The routes of a server of these ranks, all of which have the same ones."""
    turns = _Turns(kind, len(ranks))
    return {route: _handler(route, [routes[route] for routes in ranks], turns) for route in ranks[0]}


def _handler(route: tuple[str, str], handlers: Sequence[Handler], turns: "_Turns") -> Handler:
    method, path = route
    if path in _TURNS:
        return partial(turns.answer, handlers)
    if path == "/metrics":
        return partial(_merged, handlers, _merged_metrics)
    if path == "/v1/loads":
        return partial(_merged, handlers, _merged_loads)
    if path != "/flush_cache" and (method == "GET" or path.startswith(_CONVERSIONS)):
        return handlers[0]
    return partial(_on_all, handlers)


class _Turns:
    """Gives each turn to the rank that it names, or else to the one with the fewest turns."""

    def __init__(self, kind: Literal["vllm", "sglang"], num_ranks: int) -> None:
        self._kind = kind
        self._num_turns = [0] * num_ranks
        self._first_choice = 0

    async def answer(self, handlers: Sequence[Handler], exchange: Exchange) -> None:
        named = _named_to_vllm(exchange) if self._kind == "vllm" else await _named_to_sglang(exchange)
        rank = self._least_loaded() if named is None else self._checked(named)
        self._num_turns[rank] += 1
        try:
            await handlers[rank](exchange)
        finally:
            self._num_turns[rank] -= 1

    def _least_loaded(self) -> int:
        """Ranks with equally few take turns."""
        num_ranks = len(self._num_turns)
        in_order = [(self._first_choice + number) % num_ranks for number in range(num_ranks)]
        rank = min(in_order, key=self._num_turns.__getitem__)
        self._first_choice = rank + 1
        return rank

    def _checked(self, rank: int) -> int:
        num_ranks = len(self._num_turns)
        if 0 <= rank < num_ranks:
            return rank
        if self._kind == "vllm":
            raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {num_ranks}).")
        raise ApiError(400, f"routed_dp_rank={rank} out of range [0, {num_ranks})")


def _named_to_vllm(exchange: Exchange) -> int | None:
    try:
        return int(exchange.header(_RANK) or "")
    except ValueError:
        return None


async def _named_to_sglang(exchange: Exchange) -> int | None:
    """Raises ApiError: it is no integer."""
    if (given := exchange.header(_RANK)) is not None:
        try:
            return int(given)
        except ValueError:
            problem = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{given}'"
            raise ApiError(400, problem) from None
    raw = await exchange.body()
    exchange.unread(raw)
    if b"_rank" not in raw:  # parsing takes much longer
        return None
    body = await exchange.json()
    exchange.unread(raw)
    ranks = (integer(body, name) for name in _TURNS[exchange.path])
    return next((rank for rank in ranks if rank is not None), None)


async def _on_all(handlers: Sequence[Handler], exchange: Exchange) -> None:
    await exchange.respond(*max(await _answers(handlers, exchange), key=itemgetter(1)))


async def _merged(handlers: Sequence[Handler], merge: Callable[[list[bytes]], bytes], exchange: Exchange) -> None:
    bodies, statuses, content_types = zip(*await _answers(handlers, exchange), strict=True)
    await exchange.respond(merge(list(bodies)), statuses[0], content_types[0])


async def _answers(handlers: Sequence[Handler], exchange: Exchange) -> list[Answer]:
    """What each rank answers to the same request. Raises what the first of them raises, once all are done."""
    body = await exchange.body()
    asked = (_answer(handler, exchange, body) for handler in handlers)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(list[Answer], answers)


async def _answer(handler: Handler, exchange: Exchange, body: bytes) -> Answer:
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        messages.append(message)

    await handler(Exchange(exchange.scope, receive, send))
    start, *rest = messages
    return b"".join(message["body"] for message in rest), start["status"], start["headers"][0]


def _merged_metrics(pages: list[bytes]) -> bytes:
    """Family by family, with the series of each rank; what has no labels is the process's, and is there once."""
    families: dict[str, list[str]] = {}
    for page in pages:
        for line in page.decode().splitlines():
            if line.startswith("# TYPE "):
                samples = families.setdefault(line, [])
            elif "{" in line or not samples:
                samples.append(line)
    return "".join(f"{line}\n" for head, samples in families.items() for line in (head, *samples)).encode()


def _merged_loads(pages: list[bytes]) -> bytes:
    first, *others = map(orjson.loads, pages)
    loads = [load for page in (first, *others) for load in page["loads"]]
    sums = {name: sum(load[name] for load in loads) for name in loads[0] if name.startswith(("num_", "max_"))}
    return orjson.dumps(first | {"dp_rank_count": len(loads), "loads": loads, "aggregate": sums})
