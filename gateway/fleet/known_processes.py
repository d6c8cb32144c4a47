"""Records which process was last seen at each engine's address, so that homes survive a restart of the gateway."""

from collections.abc import Mapping, Set
from typing import Any

import orjson

from gateway.fleet.server import Server
from store.port import Store

_STATE_NAME = "fleet"
# Addresses of engines that left. All are written at each change, and no trajectory still lives at one that left long
# ago.
_MAX_LEFT = 1_000


class KnownProcesses:
    """The last process of each address, by its URL."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, dict[str, Any]] = {}

    async def restore(self) -> None:
        """Read what an earlier process knew. Raises StoreAway."""
        self._known = orjson.loads(await self._store.get_state(_STATE_NAME) or b"{}")

    def at(self, url: str) -> dict[str, Any]:
        """What `note` wrote about the process there; empty if none was ever seen."""
        return self._known.get(url, {})

    def note(self, server: Server) -> None:
        """Write down an engine's present state; its models as they were last seen, if it was not seen yet."""
        models = [(model.model_id, model.max_context_tokens) for model in server.models]
        self._known[server.settings.url] = {
            "generation": server.generation,
            "started_at": server.started_at,
            "is_cordoned": server.is_cordoned,
            "is_in_doubt": server.is_in_doubt,
            "models": models or self.at(server.settings.url).get("models", []),
        }
        self.remember()

    def left(self, server: Server) -> None:
        """It left the fleet. Another process may come to this address, and must not get its id.

        If the same process comes back, its weights are still in doubt if they were, and its models have their names.
        One that does not tell when it started counts as the same.
        """
        is_in_doubt = server.is_in_doubt
        before = self._known.pop(server.settings.url, {})
        self._known[server.settings.url] = {
            "generation": server.generation + 1,
            "started_at": server.started_at if is_in_doubt else None,
            "is_in_doubt": is_in_doubt,
            "models": before.get("models", []),
            "has_left": True,
        }
        self._forget_some()
        self.remember()

    def present(self) -> set[str]:
        """The addresses of engines that are in the fleet, or were before a restart."""
        return {url for url, known in self._known.items() if not _has_left(known)}

    def only(self, urls: Set[str]) -> None:
        """No other engine is in the fleet. One that comes back as the same process keeps its id all the same."""
        if missing := self.present() - urls:
            for url in missing:
                self._known[url]["has_left"] = True
            self._forget_some()
            self.remember()

    def remember(self) -> None:
        """Write everything down; also after the store lost it."""
        self._store.put_state(_STATE_NAME, orjson.dumps(self._known))

    def _forget_some(self) -> None:
        have_left = [url for url, known in self._known.items() if _has_left(known)]
        for url in have_left[:-_MAX_LEFT]:
            del self._known[url]


def _has_left(known: Mapping[str, Any]) -> bool:
    has_left: bool = known.get("has_left", "models" not in known)  # older records of engines that left have no models
    return has_left
