"""The conditions of a rollout: optional features of engines, and what goes wrong."""

import math
from dataclasses import dataclass, field, replace

from engines.simulated.features import Features
from scheduling.scaling import Role

# Plans at shorter intervals only take time: a simulation with an interval near 0 would not end.
_MIN_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV that is sent to a trajectory's new engine when it moves; each engine handles one transfer at a time.

    If computing the context again would be faster, that is done instead.

    Args:
        start_s: time before the first byte arrives; 50 ms is an assumption of the performance model.
        bytes_per_s: 25 to 35 GB/s are assumed for GPUDirect over 400 Gb/s; 9 GB/s fit 200 Gb/s, 20 GB/s one node.
    """

    start_s: float = 0.05
    bytes_per_s: float = 30e9

    def __post_init__(self) -> None:
        assert self.start_s >= 0 and self.bytes_per_s > 0, "start_s from 0, bytes_per_s above 0"


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, drawn from the run's seed.

    Args:
        leaving_share: trajectories whose client leaves without notice before one of their turns is over.
        deaths_per_hour: engines that die, in the whole fleet; one of those alive is drawn. Its KV is lost.
        relaunch_s: time until a dead engine is back, cold, as another one; 45 s is a pessimistic cold start.
        slow_start_s: engines first report at times drawn from 0 to this. 0: all at once.
        tool_timeout_share: tool calls that hang until `tool_timeout_s` are over.
        turn_retries: how often a client asks again for a turn that the scheduler rejected.
    """

    leaving_share: float = 0.0
    deaths_per_hour: float = 0.0
    relaunch_s: float = 45.0
    slow_start_s: float = 0.0
    tool_timeout_share: float = 0.0
    tool_timeout_s: float = 60.0
    turn_retries: int = 2

    def __post_init__(self) -> None:
        for share in (self.leaving_share, self.tool_timeout_share):
            assert 0 <= share <= 1, "leaving_share and tool_timeout_share: from 0 to 1"
        assert 0 <= self.deaths_per_hour <= 3_600, "deaths_per_hour: from 0 to 3,600, one a second"
        for least in (self.relaunch_s, self.slow_start_s, self.tool_timeout_s, self.turn_retries):
            assert 0 <= least < math.inf, "times and retries: from 0"


@dataclass(frozen=True, slots=True)
class Reshape:
    """The fleet may be reshaped while the rollout runs.

    Args:
        every_s: interval between plans.
        first_s: time until the first plan; None: `every_s`.
        relaunch_s: time until a reshaped engine serves; 45 cold, 10.8 activated, 3 woken.
        expected_s: what a plan assumes for that time, if the planner knows no better; None: `relaunch_s`.
        min_gain_share: required gain beyond the relaunch, as a share of the time left.
        roles: only engines launched for the tail have speculation, because drafting costs memory.
    """

    every_s: float = 30.0
    relaunch_s: float = 45.0
    min_gain_share: float = 0.15
    gpus_per_node: int = 8
    roles: bool = False
    expected_s: float | None = None
    first_s: float | None = None

    def __post_init__(self) -> None:
        assert self.every_s >= _MIN_EVERY_S, f"every_s: above 0, at least {_MIN_EVERY_S}"
        assert 0 <= self.relaunch_s < math.inf, "relaunch_s: from 0, and finite"
        assert self.min_gain_share >= 0, "min_gain_share: from 0"
        for told in (self.expected_s, self.first_s):
            assert told is None or told >= 0, "expected_s and first_s: from 0"
        assert self.gpus_per_node > 0, "gpus_per_node: at least 1"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Features of all engines, KV transfers, faults, and changes of the fleet.

    Args:
        transfer: None: contexts are computed again on the new engine.
        reshape: None: the fleet does not change.
        tells_profiles: the scheduler knows the engines' profiles, as if they had been measured.
        tells_slots: and how many turns they run at once.
    """

    features: Features = field(default_factory=Features)
    transfer: Transfer | None = None
    faults: Faults = field(default_factory=Faults)
    reshape: Reshape | None = None
    tells_profiles: bool = True
    tells_slots: bool = True

    def features_of(self, role: Role) -> Features:
        """The features of an engine that is launched in this role."""
        is_plain = self.reshape is not None and self.reshape.roles and role is not Role.TAIL
        return replace(self.features, speculation=None) if is_plain else self.features


PLAIN = Conditions()
