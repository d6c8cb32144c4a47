"""Whether a trajectory's tokens come from weights too old to learn from, and what then happens to its turns.

A trajectory is as stale as its oldest token, counted in versions set since the one that made it. Beyond
`max_staleness`, with `stale = "refuse"`, its turns are refused, and a running one ends with that error. With `stale =
"restart"` only the running turn counts: it begins again under the new weights; if some of its answer is out, it ends
with that error too.
"""

from collections.abc import Iterable, Sequence

from gateway.config import Settings
from gateway.fleet.server import Server
from gateway.http.errors import ApiError, api_error
from gateway.http.refusals import Refused
from gateway.state.ledger import Ledger
from gateway.turns.outcome import LegFailed, Stopped
from gateway.turns.turn import Turn
from gateway.weights.record import WeightRecord
from scheduling.types import Fault


class Staleness:
    """Knows which trajectories and turns are too stale."""

    def __init__(self, settings: Settings, record: WeightRecord, ledger: Ledger) -> None:
        self._limit = settings.max_staleness
        self._restarts = settings.stale == "restart"
        self._record = record
        self._ledger = ledger

    def check(self, trajectory_id: str) -> None:
        """Raises Refused (409) if a turn of this trajectory would be useless. Not safe to repeat."""
        if self._limit is None or self._restarts:
            return
        if (version := self._too_old(self._made_before(trajectory_id))) is not None:
            raise Refused(self._error(version), should_retry=False)

    def check_leg(self, turn: Turn) -> None:
        """Check a turn that waited for a leg: versions may have been set meanwhile.

        Raises: LegFailed: it became too stale, and cannot begin again.
        """
        if self._limit is None:
            return
        version = self._stale(turn, turn.versions_made)
        if version is not None and not (self._restarts and turn.begin_again()):
            raise self._failed(version)

    def stop_stale(self, turns: Iterable[Turn], server: Server) -> None:
        """Stop turns that became too stale when their server took new weights."""
        if self._limit is None:
            return
        engine_ids = {member.engine_id for member in server.members}
        for turn in turns:
            if turn.engine_id in engine_ids:
                turn.stale_version = self._stale(turn, turn.versions_made or turn.versions)
                if turn.stale_version is not None:
                    turn.stop(Fault.ENGINE)

    def stopped(self, turn: Turn) -> LegFailed | Stopped:
        """How the leg of a turn stopped for staleness ended: a turn that begins again paused without any output."""
        assert turn.stale_version is not None
        version, turn.stale_version = turn.stale_version, None
        return Stopped(None) if self._restarts and turn.begin_again() else self._failed(version)

    def _stale(self, turn: Turn, own: Sequence[str]) -> str | None:
        return self._too_old(own if self._restarts else [*self._made_before(turn.ask.trajectory_id), *own])

    def _made_before(self, trajectory_id: str) -> list[str]:
        """The versions of its tokens, as far as its history is kept. The first need not be the oldest, because setting
        a version again makes it new.
        """
        entry = self._ledger.get(trajectory_id)
        rows = entry.turns if entry is not None else ()
        return [version for row in rows if row["outcome"] == "finished" for version in row.get("weight_versions") or ()]

    def _too_old(self, versions: Sequence[str]) -> str | None:
        """The oldest of these, if it is beyond the limit."""
        assert self._limit is not None
        oldest = max(versions, key=self._record.age, default=None)
        return oldest if oldest is not None and self._record.age(oldest) > self._limit else None

    def _failed(self, version: str) -> LegFailed:
        return LegFailed(Fault.REQUEST, self._error(version), should_retry=False)

    def _error(self, version: str) -> ApiError:
        behind = self._record.age(version)
        message = (
            f"The trajectory has tokens of weights {version!r}, {behind} versions behind (max_staleness {self._limit})."
        )
        return api_error(409, message, "too_stale")
