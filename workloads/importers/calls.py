"""Turns single calls, as other programs record them, into trajectories.

Most public traces record requests, not trajectories. If a trace names sessions, the calls of a session are divided into
strands: an agent and its helpers share a session, but not a context. If it names none, a call continues the one whose
prompt and answer it repeats. No call continues one that still ran when it began. A trajectory here only grows, so a
context that an agent cut down begins a new one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, pairwise, repeat

from workloads.trajectories import Trajectory, Turn, Workload

# The assumed output rate of an engine, for traces without end times; the rest of the time between two calls counts as
# the tool's. A dense model of 30 billion parameters on a busy H100 server writes some 50 tokens a second.
ASSUMED_TOKENS_PER_S = 50.0
# A call that keeps less than this share of the previous context is another strand, or begins after a compaction.
_MIN_KEPT_SHARE = 0.5
# A leaf that no call continues: none has so many tokens.
_NO_STRAND = math.inf, math.inf


@dataclass(frozen=True, slots=True)
class Call:
    """One request and its answer. None: the trace does not record it.

    Args:
        blocks: One number for each whole block of the prompt, which identifies everything up to the block's end.
        started_at_s, ended_at_s: On any clock that all calls share.
        waited_s: From the end of the previous call in its strand to its own start. It may be too long, but not by more
            than `started_at_s` shows.
        early_s: `started_at_s` may be too early by this much, because the record's times are rounded.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    started_at_s: float | None = None
    ended_at_s: float | None = None
    waited_s: float | None = None
    early_s: float = 0.0


def whole_blocks(hash_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks of a prompt without its last one, which may be partial and then differs in the next prompt."""
    return hash_ids[:-1]


def blocks_of(content: Sequence[int] | str, size: int) -> tuple[int, ...]:
    """Whole blocks of token ids or of text."""
    blocks: list[int] = []
    for end in range(size, len(content) + 1, size):
        piece = content[end - size : end]
        blocks.append(hash((blocks[-1] if blocks else 0, piece if isinstance(piece, str) else tuple(piece))))
    return tuple(blocks)


def workload_of_sessions(
    name: str, sessions: Iterable[tuple[str, Sequence[Call]]], groups: Iterable[str] = ()
) -> Workload:
    """The strands of each session, `session-0`, `session-1` and so on, also where several sessions have one name.

    Args:
        groups: The group of each session, in their order; one without any, or with "", is a group of its own.
    """
    num_strands: Counter[str] = Counter()
    trajectories = []
    for (session_id, calls), group_id in zip(sessions, chain(groups, repeat("")), strict=False):
        for strand in _strands_of_session(calls):
            number = num_strands[session_id]
            trajectories.append(_trajectory(f"{session_id}-{number}", group_id or session_id, strand))
            num_strands[session_id] += 1
    return Workload(name, tuple(trajectories))


def workload_by_prefix(name: str, calls: Iterable[Call]) -> Workload:
    """Trajectories found by their content; those with the same first prompt are a group.

    Args:
        calls: In the order of their arrival.
    """
    groups: dict[object, str] = {}
    trajectories = []
    for number, strand in enumerate(_strands_by_prefix(calls)):
        first = strand[0]
        prompt = (first.prompt_tokens, first.blocks) if first.blocks else number
        group_id = groups.setdefault(prompt, f"{name}-prompt-{len(groups)}")
        trajectories.append(_trajectory(f"{name}-{number}", group_id, strand))
    return Workload(name, tuple(trajectories))


_Key = tuple[int, int] | None
"""A number of blocks, and the last of them; None without blocks."""


def _strands_of_session(calls: Sequence[Call]) -> list[list[Call]]:
    strands: list[list[Call]] = []
    # The numbers of strands by what a call must share with their last prompt to keep enough of it.
    strands_by_key: defaultdict[_Key, set[int]] = defaultdict(set)
    for call in calls:
        # Without blocks a call may continue any strand, and any call a strand whose last call has none.
        keys = [None, *enumerate(call.blocks, 1)] if call.blocks else list(strands_by_key)
        numbers = chain.from_iterable(strands_by_key[key] for key in keys if key in strands_by_key)
        fitting = [
            (share, strands[number][-1].prompt_tokens, number)
            for number in numbers
            if not _overlaps(strands[number][-1], call)
            and (share := _kept_share(strands[number][-1], call)) >= _MIN_KEPT_SHARE
        ]
        # Among strands that fit equally well, the longest, then the latest: a long prompt could also hold the few
        # tokens of a side call.
        if fitting:
            number = max(fitting)[-1]
            strands_by_key[_key(strands[number][-1])].remove(number)
        else:
            number = len(strands)
            strands.append([])
        strands[number].append(call)
        strands_by_key[_key(call)].add(number)
    return strands


def _key(last: Call) -> _Key:
    """What the blocks of a call hold that keeps just enough of this one's."""
    if not last.blocks:
        return None
    num_kept = math.ceil(len(last.blocks) * _MIN_KEPT_SHARE)
    return num_kept, last.blocks[num_kept - 1]


def _kept_share(last: Call, call: Call) -> float:
    """The share of the prompt of `last` with which the prompt of `call` begins."""
    if not last.blocks or not call.blocks:
        return min(1.0, call.prompt_tokens / max(last.prompt_tokens, 1))
    kept = 0
    for before, now in zip(last.blocks, call.blocks, strict=False):
        if before != now:
            break
        kept += 1
    return kept / len(last.blocks)


def _strands_by_prefix(calls: Iterable[Call]) -> list[list[Call]]:
    strands: list[list[Call]] = []
    open_strands: dict[tuple[int, int], _Open] = {}
    for call in calls:
        strand = _take_continued(call, open_strands)
        if strand is None:
            strand = []
            strands.append(strand)
        strand.append(call)
        if call.blocks:
            open_strands.setdefault((len(call.blocks), call.blocks[-1]), _Open()).add(strand)
    return strands


def _take_continued(call: Call, open_strands: Mapping[tuple[int, int], _Open]) -> list[Call] | None:
    for depth in range(len(call.blocks), 0, -1):
        candidates = open_strands.get((depth, call.blocks[depth - 1]))
        strand = candidates.take(call) if candidates is not None else None
        if strand is not None:
            return strand
    return None


class _Open:
    """Strands that a call may continue, because their last prompts end with the same block: thousands, if a load
    generator repeats a prompt.

    They are the leaves of a binary tree, the oldest leftmost. Each node has the least tokens below it, of which a call
    that continues a strand has no fewer, and the earliest end, before which it does not start. A strand that no call
    so far could continue because it still ran is not in the tree yet: few calls meet a leaf in vain.
    """

    def __init__(self) -> None:
        self._strands: list[list[Call]] = []
        self._nodes = [_NO_STRAND, _NO_STRAND]  # the root is the second; the latter half are the leaves
        self._running: list[tuple[float, int]] = []  # a heap: when a strand ends, and its place
        self._latest_start_s = -math.inf

    def add(self, strand: list[Call]) -> None:
        if 2 * len(self._strands) == len(self._nodes):
            self._make_room()
        self._strands.append(strand)
        ended_at_s = strand[-1].ended_at_s
        heappush(self._running, (-math.inf if ended_at_s is None else ended_at_s, len(self._strands) - 1))

    def take(self, call: Call) -> list[Call] | None:
        """The oldest strand that the call continues, which is no longer among these then.

        Cost: the logarithm of their number, if calls come in the order of their starts or of their ends.
        """
        started_at_s = math.inf if call.started_at_s is None else call.started_at_s + call.early_s
        self._latest_start_s = max(self._latest_start_s, started_at_s)
        while self._running and self._running[0][0] <= self._latest_start_s:
            ended_at_s, place = heappop(self._running)
            last = self._strands[place][-1]
            self._set(place, (last.prompt_tokens + last.output_tokens, ended_at_s))
        num_leaves, unseen = len(self._nodes) // 2, [1]
        while unseen:
            node = unseen.pop()
            tokens, ended_at_s = self._nodes[node]
            if tokens > call.prompt_tokens or ended_at_s > started_at_s:
                continue
            if node >= num_leaves:
                self._set(node - num_leaves, _NO_STRAND)
                return self._strands[node - num_leaves]
            unseen += (2 * node + 1, 2 * node)
        return None

    def _set(self, place: int, leaf: tuple[float, float]) -> None:
        nodes, node, least = self._nodes, len(self._nodes) // 2 + place, leaf
        while node and nodes[node] != least:
            nodes[node] = least
            node //= 2
            least = self._least_below(node)

    def _make_room(self) -> None:
        """For as many strands as there are."""
        leaves = self._nodes[len(self._strands) :]
        self._nodes = [_NO_STRAND] * 2 * len(leaves) + leaves + [_NO_STRAND] * len(leaves)
        for node in reversed(range(1, 2 * len(leaves))):
            self._nodes[node] = self._least_below(node)

    def _least_below(self, node: int) -> tuple[float, float]:
        (tokens, ended_at_s), (other_tokens, other_ended_at_s) = self._nodes[2 * node : 2 * node + 2]
        return min(tokens, other_tokens), min(ended_at_s, other_ended_at_s)


def _overlaps(last: Call, call: Call) -> bool:
    """Whether the call began while the last one still ran, and so cannot continue it."""
    if last.ended_at_s is None or call.started_at_s is None:
        return False
    return call.started_at_s + call.early_s < last.ended_at_s


def _trajectory(trajectory_id: str, group_id: str, strand: Sequence[Call]) -> Trajectory:
    context_tokens = max(1, strand[0].prompt_tokens)
    gaps_s = [*(_gap_s(last, call) for last, call in pairwise(strand)), 0.0]
    turns: list[Turn] = []
    reached = context_tokens
    for call, gap_s in zip(strand, gaps_s, strict=True):
        new_tokens = max(0, call.prompt_tokens - reached)
        output_tokens = max(1, call.output_tokens)
        turns.append(Turn(new_tokens, output_tokens, gap_s))
        reached += new_tokens + output_tokens
    return Trajectory(trajectory_id, group_id, context_tokens, tuple(turns))


def _gap_s(last: Call, call: Call) -> float:
    """The tool's time between two calls."""
    if call.started_at_s is None or last.started_at_s is None:
        return call.waited_s or 0.0
    if call.waited_s is not None:
        # kv-cache-tester counts from the last call whose end it knows, which may be an earlier one. Times that do not
        # rise are no times: load generators write 0 beside each delay.
        since_last_began_s = call.started_at_s - last.started_at_s
        return min(call.waited_s, since_last_began_s) if since_last_began_s > 0 else call.waited_s
    ended_at_s = last.ended_at_s
    if ended_at_s is None:
        ended_at_s = last.started_at_s + last.output_tokens / ASSUMED_TOKENS_PER_S
    return max(0.0, call.started_at_s - ended_at_s)
