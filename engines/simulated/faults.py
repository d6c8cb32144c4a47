"""Deliberate faults: set when the engine is built, or at any time by `POST /simulate/faults`."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

from engines.simulated.exchange import AnswerSpoiled, ApiError, Exchange
from engines.simulated.settings import Fault, FaultKind

_HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>Bad Gateway</h1></body></html>"


class FaultBox:
    """The active faults, and the random numbers that decide which requests they hit."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self._dice = random.Random(seed)
        self._faults: list[Fault] = []
        self._left: list[int | None] = []
        self._set(faults)

    async def meet(self, exchange: Exchange) -> None:
        """Lets the first fault happen that is due for this request; a request meets at most one."""
        for number, fault in enumerate(self._faults):
            left = self._left[number]
            if not exchange.path.startswith(fault.path) or left == 0:
                continue
            if self._dice.random() < fault.probability:
                if left is not None:
                    self._left[number] = left - 1
                await _happen(fault, exchange)
                return

    def routes(self) -> dict[tuple[str, str], Callable[[Exchange], Awaitable[None]]]:
        """Routes to show, replace and remove faults."""
        path = "/simulate/faults"
        return {("GET", path): self._show, ("POST", path): self._replace, ("DELETE", path): self._remove}

    def _set(self, faults: Sequence[Fault]) -> None:
        self._faults = list(faults)
        self._left = [fault.count for fault in faults]

    async def _show(self, exchange: Exchange) -> None:
        await exchange.respond_json({"faults": [asdict(fault) for fault in self._faults], "left": self._left})

    async def _replace(self, exchange: Exchange) -> None:
        body = await exchange.json()
        self._set([_fault(given) for given in body.get("faults", [])])
        await self._show(exchange)

    async def _remove(self, exchange: Exchange) -> None:
        self._set([])
        await self._show(exchange)


def _fault(given: Any) -> Fault:
    known, kinds = {field.name for field in fields(Fault)}, get_args(FaultKind)
    if not isinstance(given, dict) or given.get("kind") not in kinds or set(given) - known:
        raise ApiError(400, f"a fault has the fields {sorted(known)}; kind is one of {', '.join(kinds)}")
    return Fault(**given)


async def _happen(fault: Fault, exchange: Exchange) -> None:
    match fault.kind:
        case "refuse":
            if fault.retry_after_s is not None:
                exchange.further_headers.append((b"retry-after", b"%d" % fault.retry_after_s))
            raise ApiError(503, "The engine refuses (simulated fault).", "Service Unavailable")
        case "error":
            raise ApiError(500, "The engine failed (simulated fault).", "InternalServerError")
        case "slow":
            await asyncio.sleep(fault.delay_s)
        case "hang":
            await exchange.body()
            await exchange.wait_for_disconnect()
            raise AnswerSpoiled
        case "reset" if fault.after_chunks == 0:
            exchange.close_connection(reset=True)
        case "reset" | "die":
            exchange.break_at_chunk = fault.after_chunks
            exchange.break_with = "reset" if fault.kind == "reset" else "close"
        case "nonsense":
            exchange.break_at_chunk = fault.after_chunks
            exchange.break_with = "nonsense"
        case "html":
            await exchange.body()
            await exchange.respond(_HTML, 502, (b"content-type", b"text/html"))
            raise AnswerSpoiled
