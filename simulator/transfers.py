"""KV in transfer from a trajectory's old engine to its new one."""

from collections.abc import Sequence

from engines.simulated.prefix_cache import Piece
from simulator.conditions import Transfer
from simulator.host import Host


class Transfers:
    """The links of a fleet: each engine sends or receives one trajectory's KV at a time.

    A transfer may begin with the tool call before the turn, as a gateway that plans ahead would begin it: the part that
    the tool hides costs nothing.
    """

    def __init__(self, settings: Transfer | None) -> None:
        self._settings = settings
        self._free_at: dict[str, float] = {}

    def arrival(self, at: float, tool_began_at: float, old: Host, new: Host, pieces: Sequence[Piece]) -> float | None:
        """When the KV of these pieces is there, if it is sent.

        Returns:
            None if computing what the new engine lacks would be faster, or if there is nothing to send: the KV stays.
        """
        if self._settings is None:
            return None
        cached = new.engine.num_cached(at, pieces)
        num_tokens = old.engine.num_cached(at, pieces) - cached
        if num_tokens <= 0:
            return None
        takes_s = self._settings.start_s + num_tokens * old.profile.kv_bytes_per_token / self._settings.bytes_per_s
        free_at = max(self._free_at.get(old.engine_id, 0.0), self._free_at.get(new.engine_id, 0.0))
        sent_at = max(tool_began_at, free_at) + takes_s
        if sent_at - at >= new.profile.prefill_s(num_tokens, cached):
            return None
        self._free_at[old.engine_id] = self._free_at[new.engine_id] = sent_at
        return max(sent_at, at)
