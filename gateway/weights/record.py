"""Which weights the fleet must have, and in which order versions were set; it outlives the process."""

import os
from typing import Any

import orjson

from engines.weights import NewWeights, UpdateMode
from store.port import Store

_STATE_NAME = "weights"
# A run sets a version per training step, and all are written each time. Dropped ones count as older than all known
# ones.
_MAX_VERSIONS = 1_000


class WeightRecord:
    """The current weights, and a number for each version that was set: 1 for the first, 2 for the next.

    Rules: the current version changes when an update begins, so that an engine that joins meanwhile takes the new
    weights. An update that no engine took is taken back. Other versions age only when an engine has taken the new one,
    because until then it may still be taken back.

    Attributes:
        current: None until a version is set. Its transfer is not kept, because engines that join later cannot get it.
        is_unfinished: an update began and was not ended; engines may be paused.
        run_id: of the run that these numbers belong to: KV outlives stores, and another run's first version differs.
    """

    def __init__(self, store: Store) -> None:
        self.current: NewWeights | None = None
        self.is_unfinished = False
        self.run_id = os.urandom(6).hex()
        self._store = store
        self._numbers: dict[str, int] = {}
        self._latest = self._latest_taken = 0
        self._paths: dict[str, None] = {}
        self._before: tuple[NewWeights | None, dict[str, int], int] = (None, {}, 0)

    @property
    def is_fenced(self) -> bool:
        """Whether another gateway has taken over the record, and gives engines their weights."""
        return self._store.is_fenced

    async def restore(self) -> None:
        """Read what an earlier process knew. Raises StoreAway."""
        stored = await self._store.get_state(_STATE_NAME)
        if stored is None:
            return
        known = orjson.loads(stored)
        self._numbers, self._latest = known["numbers"], known["latest"]
        self._latest_taken = known.get("latest_taken", self._latest)  # older records have none
        self._paths = dict.fromkeys(known["paths"])
        self.is_unfinished = known["is_unfinished"]
        self.run_id = known.get("run_id", self.run_id)  # older records have none
        if (current := known["current"]) is not None:
            self.current = NewWeights(current["version"], UpdateMode(current["mode"]), current["path"])

    def begin(self, weights: NewWeights) -> None:
        """These are the fleet's weights from now on."""
        self._before = (self.current, dict(self._numbers), self._latest)
        if self.current is None or self.current.version != weights.version:
            self._latest += 1
            self._numbers.pop(weights.version, None)
            self._numbers[weights.version] = self._latest
            _bound(self._numbers)
        if weights.path is not None:
            self._paths[weights.path] = None
            _bound(self._paths)
        self.current, self.is_unfinished = weights, True
        self.remember()

    def took(self, version: str) -> None:
        """An engine has this version."""
        if (number := self.number(version)) > self._latest_taken:
            self._latest_taken = number
            self.remember()

    def end(self) -> None:
        """The update is over, successful or not."""
        self.is_unfinished, self._latest_taken = False, self._latest
        self.remember()

    def take_back(self) -> None:
        """No engine took them: restore the state from before the update."""
        self.current, self._numbers, self._latest = self._before
        self.end()

    def number(self, version: str) -> int:
        """The number of a version; 0 for one that was never set here, such as the weights that engines start with."""
        return self._numbers.get(version, 0)

    def age(self, version: str) -> int:
        """How many versions were set since this one, without one that no engine has taken yet."""
        return max(self._latest_taken - self.number(version), 0)

    def is_path(self, model_id: str) -> bool:
        """Whether this is not a model's name but a weights path: SGLang uses the path as its name once it has loaded
        from it.
        """
        return model_id in self._paths

    def remember(self) -> None:
        """Write it down; also after the store lost it."""
        current = self.current
        known = {
            "numbers": self._numbers,
            "latest": self._latest,
            "latest_taken": self._latest_taken,
            "paths": list(self._paths),
            "is_unfinished": self.is_unfinished,
            "run_id": self.run_id,
            "current": current and {"version": current.version, "mode": current.mode, "path": current.path},
        }
        self._store.put_state(_STATE_NAME, orjson.dumps(known))


def _bound(known: dict[str, Any]) -> None:
    if len(known) > _MAX_VERSIONS:
        del known[next(iter(known))]
