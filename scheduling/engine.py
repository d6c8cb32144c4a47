"""The scheduler's state of an engine: what runs and waits there, its residents, and the work ahead of it.

An engine's *claims* are the KV tokens of its residents: trajectories that run there, wait for it, or are in a tool call
with their context kept. `kv_claimed` is always their sum; `kv_held` counts the prompts that they share only once.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from math import inf
from operator import itemgetter

from scheduling.cost import EngineProfile
from scheduling.estimate import Work, estimate_finish_s, vague_tokens
from scheduling.gathering import Gathering
from scheduling.placement import UNKNOWN_S, UNMEASURED, EngineFacts
from scheduling.prompts import Prompts
from scheduling.slot_search import SlotSearch
from scheduling.slowness import LEARNS_EVERY_S, Slowness
from scheduling.state import Queue, Trajectory, Turn
from scheduling.tool_calls import ToolCalls
from scheduling.transit import Transit
from scheduling.types import EngineLoad, EngineSpec

# After a trajectory left an engine, its longest remaining output is looked up again at most this often: a scan of its
# residents at every event would cost more than the precision is worth.
LONGEST_MAX_AGE_S = 1.0

_P90 = itemgetter(2)  # of a share

# Prompts remembered per engine: more than a cache holds, which would be 1,000 of 500 tokens and what follows them.
MAX_PROMPTS = 1_000


@dataclass(slots=True, eq=False)
class Engine:
    """One engine: what it runs, its residents, and the turns that wait for it.

    Args:
        returning: waiting turns of residents; their KV is already claimed.
        in_tool: residents without a live turn, the longest idle first, each with the instant from which it counts as
            idle.
        claims: each resident's KV tokens; `kv_claimed` is their sum, and `kv_held` what they occupy, with shared
            prompts counted once.
        shares: each resident's remaining output, mean context and 90th percentile of remaining output, as last added to
            `work`.
        prefills: tokens that new residents must have prefilled first; `uncached_tokens` is their sum.
        prompts: groups whose first turns came here, the latest last, each with the tokens of its longest first prompt,
            which may be in the cache.
        held_prompts: the first prompts of its residents.
        tool_calls: how long the fleet's tool calls take.
        reserved_for: a waiting turn that it gathers room for. Other turns enter only if they are more urgent.
        longest_at: when the longest remaining output of its residents was last looked up.
        slowness: how slow it is, if nobody measured it.
        transit: how long legs are on their way here.
        gathering: when they are sent.
        slots: turns that it runs at once, as far as is known.
        num_slots: legs that may be here: those that run, and those that are sent ahead (transit.py).
        room: tokens of the longest context that it can ever hold; infinite if unknown.
        may_gather: it is known that legs which begin together save it time.
        is_roomy: it was seen to run more than the slots that somebody set. So these are not its own limit, and nothing
            is sent ahead.
        was_used: it has run something since work came to an idle fleet.
        learns_at: from when on it learns from the next turn that ends here; never if its profile is known.
    """

    spec: EngineSpec
    accepting: bool
    running: dict[str, Turn] = field(default_factory=dict)
    returning: Queue = field(default_factory=Queue)
    in_tool: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    claims: dict[str, int] = field(default_factory=dict)
    kv_claimed: int = 0
    kv_held: int = 0
    shares: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    prefills: dict[str, int] = field(default_factory=dict)
    uncached_tokens: int = 0
    prompts: dict[str, int] = field(default_factory=dict)
    held_prompts: Prompts = field(default_factory=Prompts)
    work: Work = field(default_factory=Work)
    tool_calls: ToolCalls = field(default_factory=ToolCalls)
    reserved_for: Turn | None = None
    longest_at: float = 0.0
    slowness: Slowness = field(default_factory=Slowness)
    is_roomy: bool = False
    was_used: bool = False
    transit: Transit = field(init=False)
    gathering: Gathering = field(default_factory=Gathering)
    slot_search: SlotSearch = field(default_factory=SlotSearch)
    slots: int = field(init=False)
    num_slots: int = field(init=False)
    room: float = field(init=False)
    may_gather: bool = field(init=False)
    learns_at: float = field(init=False)
    _timing: EngineProfile = field(init=False)
    _facts: EngineFacts = field(init=False)
    _prefill_s: float | None = None

    def __post_init__(self) -> None:
        self.transit = Transit(_request_s(self.spec))
        self._facts = EngineFacts(self.spec.engine_id, UNMEASURED, num_turns=0, work=self.work, prompts=self.prompts)
        self._describe()

    @property
    def has_slot(self) -> bool:
        """Whether it may get one more leg."""
        return len(self.running) < self.num_slots

    @property
    def has_free_slot(self) -> bool:
        """Whether one more leg would run at once, as far as is known."""
        return len(self.running) < self.slots

    @property
    def refill_s(self) -> float:
        """Seconds to prefill as many contexts as run now (at least one), each of its residents' mean length. Needs a
        resident."""
        return max(len(self.running), 1) * self._context_s()

    @property
    def refill_all_s(self) -> float:
        """Seconds to prefill the contexts of all its residents. Needs a resident."""
        return len(self.claims) * self._context_s()

    @property
    def finish_s(self) -> float:
        """Estimated seconds until its present work is finished; too many for a while after its longest trajectory left.
        To look at: it changes nothing, as `facts` may.
        """
        return self._facts.finish_s

    def serves(self, model: str) -> bool:
        """Whether it accepts new turns of a model."""
        return self.accepting and model in self.spec.models

    def report(self, spec: EngineSpec, accepting: bool) -> None:
        """Apply what the engine reports about itself."""
        self.accepting = accepting
        if spec != self.spec:
            before, self.spec = self.spec, spec
            if before.profile != spec.profile:
                self.transit = Transit(_request_s(spec))
            self.is_roomy = self.is_roomy and before.slots == spec.slots
            self._describe()

    def look(self, load: EngineLoad, at: float, sends_ahead: bool) -> None:
        """Learn from what it says that it has at this moment: its slots, and how many legs may be sent ahead."""
        if self.spec.slots_are_assumed:
            self.slot_search.look(load)
            if self.slot_search.slots != self.slots:
                self._describe()
        elif load.num_running > self.slots:
            self.is_roomy = True
        num_running = len(self.running)
        gathers = self.may_gather and self.gathering.pays(self._timing.prefill_launch_s(0), num_running)
        # Legs that gather are not on their way yet.
        self.transit.look(at, None if gathers else num_running - load.num_running - load.num_waiting)
        may_send = sends_ahead and not gathers and not self.is_roomy
        self.num_slots = self.slots + (self.transit.num_ahead(self.slots) if may_send else 0)

    def learn(self, turn: Turn, prompt_tokens: int, output_tokens: int, at: float) -> None:
        """Learn how slow this engine is from a turn that ends here: its time against that of the assumed profile.

        A turn also waits for the prefills of those that run beside it, about as long as they wait for its own. So its
        own counts once for each running turn.
        """
        num_running, context_tokens = len(self.running), self.kv_claimed / max(len(self.claims), 1)
        step_s = UNMEASURED.decode_step_s(num_running, num_running * context_tokens)
        cached_tokens = min(turn.trajectory.context_tokens, prompt_tokens)
        prefill_s = UNMEASURED.prefill_s(prompt_tokens - cached_tokens, cached_tokens)
        made_tokens = max(output_tokens - turn.kept_tokens, 0)
        self.slowness.learn(at - turn.began_at, made_tokens * step_s + num_running * prefill_s)
        self._note_slowness()
        self.learns_at = at + LEARNS_EVERY_S

    def give_chance(self, least_ratio: float) -> None:
        """Work comes to an idle fleet, of which the fastest engine in use was this slow; nobody measured this one."""
        if self.slowness.give_chance(least_ratio, self.was_used):
            self._note_slowness()
        self.was_used = False

    def give_ranks(self, first: float, end: float) -> None:
        """Set the ranks that a partition gives to it, as shares of the number of trajectories."""
        self._facts.ranks = first, end

    def send_at(self, num_tokens: int, at: float, max_s: float) -> float:
        """When a leg that may begin now and prefills this many tokens is sent; 0: at once."""
        launch_s = self._timing.prefill_launch_s(num_tokens)
        send_at = self.gathering.send_at(at, launch_s, len(self.running), max_s)
        return send_at if send_at > at else 0.0

    def run(self, turn: Turn) -> None:
        """Count a leg that begins here."""
        self.running[turn.turn_id] = turn
        self.was_used = True
        self._facts.num_turns += 1

    def stop(self, turn: Turn) -> None:
        """Remove a leg that ended here."""
        del self.running[turn.turn_id]
        self.transit.note_end()
        self._facts.num_turns -= 1

    def hold(self, turn: Turn) -> None:
        """Queue a resident's turn here."""
        self.returning.push(turn)
        self._facts.num_turns += 1

    def let_go(self, turn: Turn) -> None:
        """Take a turn out of the queue here."""
        self.returning.remove(turn)
        self._facts.num_turns -= 1

    def claim(self, trajectory: Trajectory, tokens: int) -> None:
        """Count `tokens` of KV, and the work to come, for a resident."""
        trajectory_id = trajectory.trajectory_id
        share = remaining, context, p90 = trajectory.share(tokens)
        is_resident = trajectory_id in self.claims
        if is_resident:
            self._discount(trajectory_id)
        if tokens < trajectory.first_prompt_tokens:
            self.held_prompts.remove(trajectory_id)
            trajectory.cut_prompt(tokens)
            if is_resident:
                self.held_prompts.add(trajectory)
        if not is_resident:
            self._await_prefill(trajectory, tokens)
            self.held_prompts.add(trajectory)
        self.claims[trajectory_id] = tokens
        self.shares[trajectory_id] = share
        self.kv_claimed += tokens
        self.work.add(remaining, context, p90)
        self._note_claims()

    def restore(self, trajectory: Trajectory) -> None:
        """Count a resident of an earlier process. Its context is here: nothing is prefilled."""
        self.claim(trajectory, trajectory.context_tokens)
        self.uncached_tokens -= self.prefills.pop(trajectory.trajectory_id, 0)
        self._facts.uncached_tokens = self.uncached_tokens

    def release(self, trajectory_id: str) -> None:
        """Stop counting a trajectory's KV and work."""
        self.in_tool.pop(trajectory_id, None)
        if trajectory_id in self.claims:
            self.held_prompts.remove(trajectory_id)
            self._discount(trajectory_id)
            self._note_claims()

    def remember_prompt(self, group_id: str, tokens: int) -> None:
        """Note that a prompt of a group is in the cache here."""
        known = self.prompts.pop(group_id, 0)
        self.prompts[group_id] = known if known > tokens else tokens
        if len(self.prompts) > MAX_PROMPTS:
            del self.prompts[next(iter(self.prompts))]

    def facts(self, at: float) -> EngineFacts:
        """The placement's view of this engine."""
        if self._facts.is_stale and at - self.longest_at >= LONGEST_MAX_AGE_S:
            mean, _, longest = max(self.shares.values(), key=_P90, default=(0.0, 0.0, 0.0))
            self.work.longest_tokens, self.work.vague_tokens = longest, vague_tokens(mean, longest)
            self._facts.is_stale, self.longest_at = False, at
            self._facts.estimate_finish()
        return self._facts

    def work_without(self, trajectory_id: str) -> Work:
        """Its work if a resident left."""
        remaining, context, p90 = self.shares[trajectory_id]
        longest = self.work.longest_tokens
        return Work(
            longest if p90 < longest else self._longest_but(trajectory_id),
            self.work.total_tokens - remaining,
            self.work.token_context_products - remaining * context,
            room_share=self.work.room_share,
        )

    def _context_s(self) -> float:
        """Seconds to prefill a context of its residents' mean length."""
        if self._prefill_s is None:  # asked for each waiting turn; constant until this engine changes
            self._prefill_s = self._facts.profile.prefill_s(self.kv_claimed / len(self.claims))
        return self._prefill_s

    def _note_slowness(self) -> None:
        self._prefill_s = None
        self._facts.profile = self._timing.slower(self.slowness.ratio)
        self._facts.estimate_finish()

    def _longest_but(self, trajectory_id: str) -> float:
        return max([share[2] for name, share in self.shares.items() if name != trajectory_id], default=0.0)

    def _describe(self) -> None:
        facts, spec = self._facts, self.spec
        self._prefill_s = None
        timing = spec.profile or UNMEASURED
        self.slots = self.num_slots = self.slot_search.slots if spec.slots_are_assumed else spec.slots
        self._timing = replace(timing, slots=self.slots, kv_capacity_tokens=spec.kv_capacity_tokens)
        facts.profile = self._timing if spec.profile else self._timing.slower(self.slowness.ratio)
        self.learns_at = inf if spec.profile else 0.0
        self.may_gather = timing.prefill_launch_s(0) > 0.0
        self.room = spec.max_context_tokens or spec.kv_capacity_tokens or inf
        facts.tp = spec.tp
        facts.estimate_finish()

    def _await_prefill(self, trajectory: Trajectory, tokens: int) -> None:
        """Count the tokens that a new resident must have prefilled, until its claim is next updated."""
        uncached = tokens - self.held_prompts.found_by(trajectory.prompt)
        if uncached > 0:
            self.prefills[trajectory.trajectory_id] = uncached
            self.uncached_tokens += uncached

    def _discount(self, trajectory_id: str) -> None:
        self.kv_claimed -= self.claims.pop(trajectory_id)
        if trajectory_id in self.prefills:
            self.uncached_tokens -= self.prefills.pop(trajectory_id)
        remaining, context, p90 = self.shares.pop(trajectory_id)
        if p90 >= self.work.longest_tokens:
            self._facts.is_stale = True
        if self.claims:
            self.work.remove(remaining, context)
        else:
            self.work.clear()

    def _note_claims(self) -> None:
        facts, self._prefill_s = self._facts, None
        self.kv_held = self.kv_claimed - self.held_prompts.shared_tokens
        facts.kv_claimed, facts.num_trajectories = self.kv_claimed, len(self.claims)
        facts.uncached_tokens = self.uncached_tokens
        self.work.room_share = self.kv_held / self.kv_claimed if self.kv_claimed else 1.0
        facts.finish_s, facts.added_s = estimate_finish_s(facts.profile, self.work), UNKNOWN_S


def _request_s(spec: EngineSpec) -> float:
    """How long its profile says that a request is on its way."""
    return spec.profile.request_ms / 1000 if spec.profile else 0.0
