"""The gateway as the controller uses it: its HTTP API with the admin key."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import orjson

from engines.http import FAULTS, HttpClient

_TIMEOUT_S = 10.0


class GatewayAway(Exception):
    """The gateway did not answer; the message names its URL. Nothing follows from that, least of all that its engines
    are idle."""


class GatewayRefused(Exception):
    """The gateway refused; the message is its own. Repeating helps only once the cause is gone, such as a wrong key."""


@dataclass(frozen=True, slots=True)
class Member:
    """A server as the gateway reports it: an engine, or several if it has data-parallel ranks.

    Args:
        engine_id: its, or its first engine's; what the gateway does to that one, it does to the whole server.
        is_starting: the gateway has not observed it yet.
        is_cordoned: it gets no turns: an operator or the controller cordoned it, or the gateway holds it back.
        cordon_reason: why the gateway holds it back; "" if it does not.
        num_turns: turns that run on it, by the gateway's count or, while it is ready, its own if that is larger.
    """

    engine_id: str
    url: str
    is_ready: bool
    is_cordoned: bool
    num_turns: int
    is_starting: bool = False
    cordon_reason: str = ""


class GatewayClient:
    """One gateway. Every method raises GatewayAway and GatewayRefused; all are safe to repeat."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        headers = (("authorization", f"Bearer {admin_key}"),) if admin_key else ()
        self._http = HttpClient(url, headers=headers)
        self._url = url

    async def engines(self) -> list[Member]:
        """All servers whose engines it knows."""
        target = "/v1/engines"
        answer = await self._ask("GET", target)
        by_url: dict[str, list[Any]] = {}
        try:
            for engine in answer["data"]:
                by_url.setdefault(engine["url"], []).append(engine)
            return [_member(engines) for engines in by_url.values()]
        except (KeyError, TypeError):
            raise GatewayAway(f"{self._asked('GET', target)}: not the answer of a gateway") from None

    async def demand(self, since: float = 0.0) -> Any:
        """The work at hand, and the last rollout if it ended after `since`: see `GET /v1/demand`."""
        return await self._ask("GET", f"/v1/demand?since={since!r}")

    async def add(self, engine: dict[str, Any]) -> None:
        """Add an engine to the fleet: its `url` and further fields. An engine that is already known stays as it is."""
        if all(one.url != engine["url"] for one in await self.engines()):
            await self._ask("POST", "/v1/engines", orjson.dumps(engine))

    async def drain(self, engine_id: str) -> None:
        """Stop giving it turns, and move those that can go on elsewhere now; does not wait for any of them."""
        await self._ask("POST", f"/v1/engines/{quote(engine_id, safe='')}/drain?timeout_s=0")

    async def evacuate(self, engine_id: str, timeout_s: float) -> None:
        """Move the KV of trajectories that live there to their new homes; what takes longer than `timeout_s`
        is left."""
        target = f"/v1/engines/{quote(engine_id, safe='')}/evacuate?timeout_s={timeout_s:g}"
        await self._ask("POST", target, timeout_s=timeout_s + _TIMEOUT_S)

    async def uncordon(self, engine_id: str) -> None:
        """Give it turns again."""
        await self._ask("POST", f"/v1/engines/{quote(engine_id, safe='')}/uncordon")

    async def remove(self, engine_id: str) -> None:
        """Forget it."""
        await self._ask("DELETE", f"/v1/engines/{quote(engine_id, safe='')}")

    def close(self) -> None:
        self._http.close()

    async def _ask(self, method: str, target: str, body: bytes = b"", timeout_s: float = _TIMEOUT_S) -> Any:
        asked = self._asked(method, target)
        try:
            response = await self._http.request(method, target, body, timeout_s=timeout_s)
            said = await response.body(64 * 2**20, _TIMEOUT_S)
        except FAULTS as fault:
            raise GatewayAway(f"{asked}: {str(fault) or type(fault).__name__}") from None
        if response.status == 404 and method != "GET":
            return None  # it is already gone
        is_away = response.status >= 500
        try:
            answer = orjson.loads(said)
        except orjson.JSONDecodeError:
            why = f"status {response.status}" if is_away else "not the answer of a gateway"
            raise GatewayAway(f"{asked}: {why}") from None
        if response.status >= 400:
            kind = GatewayAway if is_away else GatewayRefused
            raise kind(f"{asked}: {_message(answer) or f'status {response.status}'}")
        return answer

    def _asked(self, method: str, target: str) -> str:
        """A request in words: its fault is read far from the file that names the gateway."""
        return f"the gateway at {self._url}: {method} {target}"


def _member(engines: list[Any]) -> Member:
    """A server, of its engines."""
    one = engines[0]
    is_ready = one["state"] == "ready"
    return Member(
        engine_id=one["id"],
        url=one["url"],
        is_ready=is_ready,
        is_starting=one["state"] == "starting",
        is_cordoned=one["is_cordoned"],
        cordon_reason=one.get("cordon_reason") or "",
        num_turns=sum(max(engine["num_legs"], (engine["num_running"] or 0) if is_ready else 0) for engine in engines),
    )


def _message(answer: Any) -> str:
    """The message of an error in a gateway's form; "" for any other form."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else ""
