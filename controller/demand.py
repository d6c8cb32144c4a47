"""The work at hand, as the gateway reports it: requested from it, or read from the stream on its store's Redis.

Both report the same. A request gives the present state, and needs the gateway's address and admin key. The stream needs
only Redis, and gives a state that is some seconds old. A report that is older than a limit, or that never came, is no
demand: nothing is planned then, and running engines go on.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from controller.fleet_file import DemandTable
from controller.gateway_client import GatewayAway, GatewayClient, GatewayRefused
from scheduling.estimate import Remaining
from store import DEMAND, StoreAway, StoreSettings, Stream, open_stream

_UNKNOWN = "the gateway's report cannot be read; is it of another version?"


class DemandAway(Exception):
    """There is no report of the work at hand, or none for too long; the message names the source and the cause. Retry
    later."""


@dataclass(frozen=True, slots=True)
class LastRollout:
    """The final lengths of each trajectory of a rollout, from its start.

    Args:
        ended_at: by the gateway's clock, seconds since the epoch.
    """

    trajectories: tuple[Remaining, ...]
    ended_at: float


@dataclass(frozen=True, slots=True)
class Work:
    """The work at hand, one entry per active trajectory, and how accurate such predictions were so far.

    Args:
        last_rollout: None: none has ended since the time that the caller gave.
    """

    remaining: tuple[Remaining, ...]
    correlation: float | None
    last_rollout: LastRollout | None = None


class Demand(Protocol):
    """A source of reports about the work."""

    async def work(self, since: float = 0.0) -> Work:
        """The work at hand, and the last rollout if it ended after `since`. Raises DemandAway."""

    async def aclose(self) -> None: ...


class AskedDemand:
    """Requests the demand from the gateway itself, whatever its store.

    Args:
        gateway: closed by its owner.
    """

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway

    async def work(self, since: float = 0.0) -> Work:
        try:
            return _work(await self._gateway.demand(since), since)
        except (GatewayAway, GatewayRefused) as fault:
            raise DemandAway(str(fault)) from None
        except (KeyError, TypeError):
            raise DemandAway(_UNKNOWN) from None

    async def aclose(self) -> None:
        pass


class ReadDemand:
    """Reads the demand from one gateway's stream.

    Args:
        max_age_s: older reports are not acted on.
    """

    def __init__(self, stream: Stream, max_age_s: float) -> None:
        self._stream = stream
        self._max_age_s = max_age_s

    async def work(self, since: float = 0.0) -> Work:
        try:
            entry = await self._stream.newest()
        except StoreAway as fault:
            raise DemandAway(str(fault)) from None
        if entry is None:
            raise DemandAway(
                "no gateway has reported its work there; is it the gateway's `store`, and its `store_namespace`?"
            )
        if entry.age_s > self._max_age_s:
            raise DemandAway(
                f"the gateway was silent for {entry.age_s:.0f} s, longer than demand.max_age_s ({self._max_age_s:g} s)"
            )
        try:
            return _work(orjson.loads(entry.value), since)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise DemandAway(_UNKNOWN) from None

    async def aclose(self) -> None:
        await self._stream.aclose()


def demand_of(table: DemandTable, gateway: GatewayClient) -> Demand:
    """The source that the fleet file names."""
    settings = StoreSettings(namespace=table.namespace)
    stream = open_stream(table.redis.get_secret_value(), DEMAND, settings) if table.redis else None
    return ReadDemand(stream, table.max_age_s) if stream else AskedDemand(gateway)


def _work(told: Any, since: float) -> Work:
    remaining = (
        Remaining(one["output_tokens"], one["context_tokens"], one["new_tokens"]) for one in told["trajectories"]
    )
    last, at = told["last_rollout"], told["at"]
    return Work(
        tuple(remaining),
        told["correlation"],
        LastRollout(tuple(map(_whole, last["trajectories"])), last["ended_at"])
        # The second case: `since` is still to come, because the gateway's clock was set back after it.
        if last and (last["ended_at"] > since or last["ended_at"] <= at < since)
        else None,
    )


def _whole(one: dict[str, int]) -> Remaining:
    """A trajectory from its start: its first prompt has to be prefilled."""
    return Remaining(one["output_tokens"], one["context_tokens"], one["new_tokens"], one["context_tokens"])
