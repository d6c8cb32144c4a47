"""One engine of a simulated rollout, with the data that a report needs."""

from engines.simulated.features import Features
from engines.simulated.model import SimulatedEngine
from scheduling.cost import EngineProfile
from simulator.outcome import EngineOutcome, Timeline

SAMPLE_S = 1.0
"""Least time between two samples of a timeline."""


class Host:
    """An engine from its start to its end.

    Args:
        due_at: when something in it changes next, as last put on the rollout's agenda.
        ended_at: when it died.
    """

    def __init__(
        self, engine_id: str, profile: EngineProfile, features: Features, began_at: float, *, by_priority: bool
    ) -> None:
        self.engine_id = engine_id
        self.profile = profile
        self.engine = SimulatedEngine(profile, order="priority" if by_priority else "fcfs", features=features)
        self.due_at: float | None = None
        self.ended_at: float | None = None
        self._takes_at = began_at
        self._began_at = began_at
        self._timeline = Timeline()
        self._sample_at = began_at

    def take(self, at: float) -> float:
        """When a request that is sent now reaches the engine's steps: its front end takes one after the other."""
        gap_s, request_s = self.profile.request_gap_ms / 1000, self.profile.request_ms / 1000
        self._takes_at = max(at, self._takes_at) + gap_s
        return self._takes_at + max(0.0, request_s - gap_s)

    def sample(self, at: float, kv_claimed_tokens: int) -> None:
        """Record how full it is, if the last sample is old enough."""
        if at < self._sample_at:
            return
        self._sample_at = at + SAMPLE_S
        counts, timeline = self.engine.counts(), self._timeline
        timeline.at.append(at)
        timeline.num_running.append(counts.num_running)
        timeline.num_waiting.append(counts.num_waiting)
        timeline.kv_share.append(counts.kv_usage)
        timeline.kv_claimed_share.append(kv_claimed_tokens / self.profile.kv_capacity_tokens)

    def end(self, at: float) -> None:
        """End it, and everything that it ran."""
        self.ended_at = at
        self.due_at = None

    def outcome(self) -> EngineOutcome:
        """Its part in the rollout."""
        counts = self.engine.counts()
        return EngineOutcome(
            engine_id=self.engine_id,
            profile=self.profile.name,
            tp=self.profile.tp,
            slots=self.profile.slots,
            kv_capacity_tokens=self.profile.kv_capacity_tokens,
            began_at=self._began_at,
            ended_at=self.ended_at,
            num_preemptions=counts.num_preemptions,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_generated_tokens=counts.num_generated_tokens,
            timeline=self._timeline,
        )
