"""A scenario: which agents, on which fleets, under which policies. Read from TOML; a fleet file is one without agents.

name = "coding-14b"
policies = ["heddle", "verl"]               # the others are compared with the first
seeds = [1, 2, 3]
predictor = "tabular"                       # or siblings, tree, oracle, noisy:0.7
earlier = 1                                 # rollouts of other prompts that the predictor learned from
epochs = 1                                  # rollouts of the same prompts in a row; the last one counts

[workload]
law = "coding"                              # or trace = "FILE.jsonl.gz"
trajectories = 6400

[fleet]
gpus = 64
profile = "qwen3-14b-h100"
tp = [1, 2, 4, 8]                           # one fleet for each; or [[fleet.engines]] with profile and count

[limits] [features.speculation] [features.host_tier] [transfer] [faults] [reshape]
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engines.profiles import load_profile, profile_names
from engines.simulated.features import Features
from scheduling.cost import EngineProfile
from scheduling.fleets import in_words
from scheduling.limits import Limits
from simulator.conditions import Conditions, Faults, Reshape, Transfer
from simulator.tables import from_table
from workloads.laws import draw, law_named
from workloads.traces import load_trace
from workloads.trajectories import MAX_SCALE, Workload

# Offset of the seeds of earlier rollouts; no scenario uses such seeds.
_OTHER_SEEDS = 1_000_000
# Larger values are a slip, not a workload.
_MAX_PREAMBLE_TOKENS = 1_000_000
_MAX_ENGINES = 100_000
# The JSON of a run has its seed, in 64 bits.
_MAX_SEED = 2**63 - 1
# A trainer waits for its rollout as long as it takes. A gateway's limits would end trajectories only under policies
# that keep turns in the gateway's queue: turns in an engine's queue wait without a limit.
_PATIENCE: Mapping[str, Any] = {"queue_timeout_s": 10**9, "max_waiting_turns": 10**9}


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What agents do: trajectories of a law, or of a trace, which the command line may name.

    Args:
        law: as `workloads.laws.law_named` knows it, such as `coding-heavy`.
        trace: a file of this project's trace form, relative to the working directory.
        trajectories: their number; for a trace the largest number, in whole groups drawn by the seed. None: all of a
            trace.
        scale, tool_scale: multiply lengths and tool times; without `tool_scale`, tool times scale like lengths.
        max_context_tokens, max_turns, max_tool_s: of a trace, see `Workload.within`.
        preamble_tokens: length of the text before every first prompt, the same for all: system prompt and tools.
    """

    law: str | None = None
    trace: str | None = None
    trajectories: int | None = None
    scale: float = 1.0
    tool_scale: float | None = None
    max_context_tokens: int | None = None
    max_turns: int | None = None
    max_tool_s: float | None = None
    preamble_tokens: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.preamble_tokens <= _MAX_PREAMBLE_TOKENS, "preamble_tokens: from 0, a million at most"
        assert self.law is None or self.trace is None, "a law or a trace, not both"
        assert self.trajectories is None or self.trajectories > 0, "trajectories: at least 1"
        assert self.law is None or self.trajectories, "a law needs a number of trajectories"
        assert 0 < self.scale <= MAX_SCALE, "scale: above 0, a million at most"
        assert self.tool_scale is None or 0 <= self.tool_scale <= MAX_SCALE, "tool_scale: from 0, a million at most"
        assert self.max_tool_s is None or self.max_tool_s >= 0, "max_tool_s: from 0"
        for least in (self.max_context_tokens, self.max_turns):
            assert least is None or least > 0, "max_context_tokens and max_turns: at least 1"
        of_traces = (self.max_context_tokens, self.max_turns, self.max_tool_s)
        are_heeded = self.law is None or not any(setting is not None for setting in of_traces)
        assert are_heeded, "max_context_tokens, max_turns and max_tool_s are for traces, not for a law"


@dataclass(frozen=True, slots=True)
class Engines:
    """`count` engines of one profile."""

    profile: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The engines: listed, or as many of each TP size as the GPUs allow.

    Args:
        profile: of a model on a GPU, without the TP size: `qwen3-14b-h100`.
        tp: sizes; each makes a fleet of its own, for the same scenario.
        slots_per_gpu: turns that an engine runs at once, for each of its GPUs. None: the profile's.
    """

    engines: tuple[Engines, ...] = ()
    gpus: int | None = None
    profile: str | None = None
    tp: tuple[int, ...] = ()
    slots_per_gpu: int | None = None

    def __post_init__(self) -> None:
        assert self.gpus is None or 0 < self.gpus <= _MAX_ENGINES, f"gpus: at least 1, {_MAX_ENGINES:,} at most"
        assert self.slots_per_gpu is None or self.slots_per_gpu > 0, "slots_per_gpu: at least 1"
        by_size = (self.gpus is not None, self.profile is not None, bool(self.tp))
        assert all(by_size) if not self.engines else not any(by_size), "either engines, or gpus, profile and tp"
        for engines in self.engines:
            assert 0 < engines.count <= _MAX_ENGINES, f"engines: a count of at least 1, {_MAX_ENGINES:,} at most"
        repeated = next((tp for tp in self.tp if self.tp.count(tp) > 1), None)
        assert repeated is None, f"tp: {repeated} is there twice"  # a mean would count the same run twice
        for tp in self.tp:
            assert tp > 0 and self.gpus and self.gpus % tp == 0, f"tp {tp} does not divide {self.gpus} GPUs"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines under a name for tables.

    Args:
        family: profiles of the same model and GPU at all TP sizes, of which a best fleet might be made.
    """

    name: str
    profiles: tuple[EngineProfile, ...]
    family: tuple[EngineProfile, ...]

    @property
    def gpus(self) -> int:
        return sum(profile.tp for profile in self.profiles)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The whole scenario; see the module's docstring. Later fields are tables of their own."""

    fleet: FleetSettings
    name: str = "unnamed"
    about: str = ""
    policies: tuple[str, ...] = ("heddle", "slime", "verl", "verl-hybrid")
    seeds: tuple[int, ...] = (1,)
    predictor: str = "tabular"
    earlier: int = 0
    epochs: int = 1
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    limits: Limits = field(default_factory=lambda: Limits(**_PATIENCE))
    features: Features = field(default_factory=Features)
    transfer: Transfer | None = None
    faults: Faults = field(default_factory=Faults)
    reshape: Reshape | None = None

    def __post_init__(self) -> None:
        assert self.policies and self.seeds, "policies and seeds: at least one of each"
        # Python's generators draw the same from -1 as from 1.
        assert all(0 <= seed <= _MAX_SEED for seed in self.seeds), f"seeds: from 0 to {_MAX_SEED}"
        for name, listed in (("policies", self.policies), ("seeds", self.seeds)):
            # A mean would count the same run twice.
            repeated = next((one for one in listed if listed.count(one) > 1), None)
            assert repeated is None, f"{name}: {repeated} is there twice"
        assert self.epochs >= 1, "epochs: at least 1"
        assert self.earlier >= 0, "earlier: at least 0"
        assert 0 < self.limits.kv_watermark <= 1, "limits.kv_watermark: a share above 0, 1 at most"
        for limit, value in asdict(self.limits).items():
            # JSON has no infinity, and the log of a run contains its limits.
            assert value is None or 0 <= value < math.inf, f"limits.{limit}: at least 0, and finite"
        has_one_rollout = self.epochs == 1 and not self.earlier
        assert has_one_rollout or self.workload.law is not None, "epochs need a law, as does earlier"

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.features, self.transfer, self.faults, self.reshape)

    def fleets(self) -> list[Fleet]:
        """The fleets that each policy is tried on.

        Raises:
            ValueError: there is no such profile, or a fleet cannot do what the scenario requires.
        """
        if self.fleet.engines:
            kinds = [(engines, load_profile(engines.profile)) for engines in self.fleet.engines]
            stems = {engines.profile.removesuffix(f"-tp{profile.tp}") for engines, profile in kinds}
            # If engines differ only in TP size, that is the shortest name; tables have many columns.
            names = [f"{e.count} x {f'TP{profile.tp}' if len(stems) == 1 else e.profile}" for e, profile in kinds]
            return [self._fleet(" + ".join(names), [profile for e, profile in kinds for _ in range(e.count)])]
        assert self.fleet.gpus is not None
        counts = {tp: self.fleet.gpus // tp for tp in self.fleet.tp}
        return [
            self._fleet(f"{count} x TP{tp}", [load_profile(f"{self.fleet.profile}-tp{tp}")] * count)
            for tp, count in counts.items()
        ]

    def fleet_of(self, tps: Sequence[int]) -> Fleet:
        """A fleet of engines of these TP sizes.

        Raises:
            ValueError: there is no such profile.
        """
        return self._fleet(in_words(tuple(tps)), [load_profile(f"{self.fleet.profile}-tp{tp}") for tp in tps])

    def earlier_workloads(self, seed: int) -> list[Workload]:
        """Rollouts of other prompts under the same law, from which a predictor learned before."""
        asked = self.workload
        if asked.law is None or asked.trajectories is None:
            return []
        law = law_named(asked.law)
        return [
            draw(law, asked.trajectories, other, scale=asked.scale, tool_scale=asked.tool_scale).with_preamble(
                asked.preamble_tokens
            )
            for other in range(_OTHER_SEEDS + seed * self.earlier, _OTHER_SEEDS + (seed + 1) * self.earlier)
        ]

    def workloads(self, seed: int) -> list[Workload]:
        """The rollouts of all epochs.

        Raises:
            ValueError: there is neither law nor trace, no such law, or the trace is malformed.
            OSError: the trace cannot be read.
        """
        return [workload.with_preamble(self.workload.preamble_tokens) for workload in self._without_preamble(seed)]

    def _without_preamble(self, seed: int) -> list[Workload]:
        asked = self.workload
        if asked.law is not None:
            assert asked.trajectories is not None
            law = law_named(asked.law)
            return [
                draw(law, asked.trajectories, seed, scale=asked.scale, tool_scale=asked.tool_scale, epoch=epoch)
                for epoch in range(self.epochs)
            ]
        if asked.trace is None:
            raise ValueError("no agents: the scenario has neither law nor trace; give --trace FILE")
        recorded = load_trace(asked.trace, asked.trajectories, seed, asked.scale, tool_scale=asked.tool_scale)
        return [recorded.within(asked.max_turns, asked.max_context_tokens, asked.max_tool_s)]

    def _fleet(self, name: str, profiles: list[EngineProfile]) -> Fleet:
        slots = self.fleet.slots_per_gpu
        if slots is not None:
            profiles = [replace(profile, slots=slots * profile.tp) for profile in profiles]
        if self.reshape is not None:
            _check_that_it_can_be_cut_anew(profiles, self.reshape.gpus_per_node)
        if self.transfer is not None or self.features.host_tier is not None:
            _check_that_bytes_are_known(profiles)
        _check_that_they_serve_one_model(profiles)
        return Fleet(name, tuple(profiles), _family(profiles, slots))


def load_scenario(path: Path) -> Scenario:
    """The scenario, or the fleet, that a file describes.

    Raises:
        ValueError: it is malformed; the message states where.
        OSError: it cannot be read.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(limits := table.get("limits"), dict):
            table["limits"] = {**_PATIENCE, **limits}
        return from_table(Scenario, {"name": path.stem, **table})
    except ValueError as error:  # malformed TOML also raises a ValueError
        raise ValueError(f"{path}: {error}") from error


def _check_that_it_can_be_cut_anew(profiles: Sequence[EngineProfile], gpus_per_node: int) -> None:
    largest = max(profiles, key=lambda profile: profile.tp)
    if largest.tp > gpus_per_node:
        gpus = f"{gpus_per_node} GPU{'s' if gpus_per_node > 1 else ''}"
        raise ValueError(f"reshape: {largest.name} does not fit a node of {gpus} (gpus_per_node)")
    stems = dict.fromkeys(profile.name.rpartition("-tp")[0] for profile in profiles)
    if len(stems) > 1:
        raise ValueError(f"reshape: all engines must be of one model and GPU, not of {' and '.join(stems)}")
    if len({profile.tp for profile in profiles}) < len(set(profiles)):
        raise ValueError("reshape: all engines of one TP size must have one profile")


def _check_that_bytes_are_known(profiles: Sequence[EngineProfile]) -> None:
    unknown = next((profile.name for profile in profiles if not profile.kv_bytes_per_token), None)
    if unknown is not None:
        raise ValueError(f"{unknown} does not say its kv_bytes_per_token, without which KV would be sent in no time")


def _check_that_they_serve_one_model(profiles: Sequence[EngineProfile]) -> None:
    models = dict.fromkeys(profile.model for profile in profiles)
    if len(models) > 1:
        raise ValueError(
            f"fleet: all agents ask for one model, but the engines' profiles are of {' and '.join(models)}; "
            "if these are one, the profiles must name it alike"
        )


def _family(profiles: list[EngineProfile], slots_per_gpu: int | None) -> tuple[EngineProfile, ...]:
    """The fleet's own profiles, and built-in ones of the same model and GPU under other names; small engines first."""
    taken = {profile.name for profile in profiles}
    stems = {name.rpartition("-tp")[0] for name in taken}
    names = [name for name in profile_names() if name.rpartition("-tp")[0] in stems and name not in taken]
    others = [load_profile(name) for name in names]
    if slots_per_gpu is not None:
        others = [replace(profile, slots=slots_per_gpu * profile.tp) for profile in others]
    # Two files may describe different engines under one name.
    return tuple(sorted(dict.fromkeys([*others, *profiles]), key=lambda profile: profile.tp))
