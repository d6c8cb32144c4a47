"""Whether a trajectory's tokens are of weights too old to learn from, and what then becomes of its turns.

A trajectory is as stale as its oldest token: by how many versions were set since the one that made it. Beyond
`max_staleness`, with `stale = "refuse"`, its turns are refused, and one that runs ends with that error. With
`stale = "restart"` only the turn that runs counts: it begins again under the new weights, unless some of its answer is
out; then it ends with that error too.
"""

from collections.abc import Iterable, Sequence

from gateway.config import Settings
from gateway.fleet.member import Member
from gateway.fleet.weight_record import WeightRecord
from gateway.http.errors import ApiError, api_error
from gateway.http.refusals import Refused
from gateway.state.driver import LiveTurn
from gateway.state.ledger import Ledger
from gateway.turns.outcome import LegFailed
from gateway.turns.turn import Turn
from scheduling.types import Fault


class Staleness:
    """Knows which trajectories and turns are too stale."""

    def __init__(self, settings: Settings, record: WeightRecord, ledger: Ledger) -> None:
        self._limit = settings.max_staleness
        self._restarts = settings.stale == "restart"
        self._record = record
        self._ledger = ledger

    def check(self, trajectory_id: str) -> None:
        """Raises Refused (409): a turn of this trajectory would be in vain. Not safe to repeat."""
        if self._limit is None or self._restarts:
            return
        oldest = self._oldest(trajectory_id)
        if oldest is not None and self._record.age(oldest) > self._limit:
            raise Refused(self._error(oldest), should_retry=False)

    def stop_stale(self, turns: Iterable[LiveTurn], member: Member) -> None:
        """Stop what runs on an engine that took new weights and became too stale by it."""
        if self._limit is None:
            return
        for turn in turns:
            if isinstance(turn, Turn) and turn.engine_id == member.engine_id and self._is_stale(turn):
                turn.is_stale = True
                turn.stop(Fault.ENGINE)

    def stopped(self, turn: Turn) -> LegFailed:
        """How the leg of such a turn ended."""
        turn.is_stale = False
        if self._restarts and turn.begin_again():
            return LegFailed(Fault.BUSY, api_error(503, "The turn begins again under new weights.", "too_stale"))
        return LegFailed(Fault.REQUEST, self._error(self._own_oldest(turn) or ""))

    def _is_stale(self, turn: Turn) -> bool:
        assert self._limit is not None
        versions = [self._own_oldest(turn), None if self._restarts else self._oldest(turn.ask.trajectory_id)]
        return any(version is not None and self._record.age(version) > self._limit for version in versions)

    def _own_oldest(self, turn: Turn) -> str | None:
        return self._oldest_of(turn.versions_made or turn.versions)

    def _oldest(self, trajectory_id: str) -> str | None:
        """The version of its oldest token, as far as its history is kept."""
        entry = self._ledger.get(trajectory_id)
        for row in entry.turns if entry is not None else ():
            if row["outcome"] == "finished" and row.get("weight_versions"):
                return self._oldest_of(row["weight_versions"])
        return None

    def _oldest_of(self, versions: Sequence[str]) -> str | None:
        return max(versions, key=self._record.age, default=None)

    def _error(self, version: str) -> ApiError:
        behind = self._record.age(version)
        message = f"The trajectory has tokens of weights {version!r}, {behind} versions ago; {self._limit} are allowed."
        return api_error(409, message, "too_stale")
