"""Evidence from siblings: lengths of a group share a level, and each trajectory adds its own part; both are log-normal.

The level of a group is inferred from its finished members, from its running ones and from the same prompt in earlier
rollouts. A running member tells its group what its own progress suggests of its length, in a normal message, as in
expectation propagation. How much of the variance is shared, and how far a prompt's level drifts from rollout to
rollout, is learned. Levels are counted in bins of the lattice, which are logs of lengths.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from predictor.lattice import dumped_bin
from predictor.lengths import Lengths

# A larger group is known well enough by its newest members, and its level may drift this way.
_MAX_FINISHED = 32
_MAX_PAST = 24
_PRIOR_WEIGHT = 20.0
# Until there are data: the share of the variance between siblings (within-group correlations are 0.24 to 0.88), and the
# mean square by which a prompt's level moves from one rollout to the next.
_OWN = 0.4
_WANDER = 0.2


@dataclass(slots=True)
class Group:
    """One group.

    Args:
        past: number of members of the same prompt in earlier rollouts, and their mean less that of all trajectories, as
            known when this group began.
        finished: the bins in which its newest members ended, at most `_MAX_FINISHED`, and their sum.
        num_untold: finished members that the prompt's past does not include yet.
        squares: sum of `num_squares` squares about the group's mean that are not yet included in the average over all
            groups.
        precision, weighted: sums over the messages of running members, of which there are `num_messages`.
    """

    past: tuple[float, float] = (0.0, 0.0)
    finished: list[int] = field(default_factory=list)
    finished_sum: int = 0
    num_running: int = 0
    num_untold: int = 0
    squares: float = 0.0
    num_squares: int = 0
    num_messages: int = 0
    precision: float = 0.0
    weighted: float = 0.0


class Groups:
    """All groups, and what they have in common.

    Args:
        lengths: the distribution of all lengths.
        memory: comparisons of siblings over which the variance between siblings and the drift of prompts are averaged.
        max_groups: groups and prompts remembered; the longest unused goes first.

    Attributes:
        own_variance: between siblings; kept between 5 % and 95 % of the variance of all.
    """

    def __init__(self, lengths: Lengths, memory: float, max_groups: int) -> None:
        self._lengths = lengths
        self._memory = memory
        self._max_groups = max_groups
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._prompts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._within = _Average(memory)
        self._wander = _Average(memory)
        self.own_variance: float
        self.refresh()

    def refresh(self) -> None:
        """Update `own_variance`, after the distribution of lengths or what is known of siblings has changed."""
        total = self._lengths.variance
        self.own_variance = min(max(self._within.mean(_OWN * total), 0.05 * total), 0.95 * total)

    def get(self, group_id: str, prompt_id: str) -> Group:
        """The group, created if it is new."""
        group = self._groups.get(group_id)
        if group is None:
            past = self._prompts.get(prompt_id, (0.0, 0.0)) if prompt_id != group_id else (0.0, 0.0)
            group = self._groups[group_id] = Group(past)
            if len(self._groups) > self._max_groups:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(group_id)
        return group

    def expectation(self, group: Group, message: tuple[float, float]) -> tuple[float, float]:
        """Mean and variance of a member's bin, from all other members.

        Args:
            message: the member's own, which is left out.
        """
        own = self.own_variance
        mean, variance = self._before(group, self._lengths.variance - own, own)
        # Members that report first wrote less in their turns than those that have not reported yet.
        heard = group.num_messages / (group.num_running if group.num_running > 1 else 1)
        said = group.precision - message[0]
        precision = 1.0 / variance + len(group.finished) / own + (heard * said if said > 0.0 else 0.0)
        weighted = mean / variance + group.finished_sum / own + heard * (group.weighted - message[1])
        return weighted / precision, 1.0 / precision + own

    def message(self, group: Group, old: tuple[float, float], precision: float, weighted: float) -> tuple[float, float]:
        """Replace a running member's message `old` by one from its new estimate of its bin (precision, and mean times
        precision).

        Returns: the message about the group's level, to be passed as `old` next time.
        """
        scale = 1.0 / (1.0 + self.own_variance * precision)
        new = (precision * scale, weighted * scale)
        group.num_messages += (new[0] > 0.0) - (old[0] > 0.0)
        group.precision += new[0] - old[0]
        group.weighted += new[1] - old[1]
        if group.num_messages == 0:
            group.precision = group.weighted = 0.0
        return new

    def ended(self, group: Group, in_bin: int) -> None:
        """Count a member that ended in this bin."""
        num = len(group.finished)
        if num:
            # These terms add up to the sum of squares about the group's mean, in whatever order members end.
            group.squares += num / (num + 1) * (in_bin - group.finished_sum / num) ** 2
            group.num_squares += 1
        if num == _MAX_FINISHED:
            group.finished_sum -= group.finished.pop(0)
        group.finished.append(in_bin)
        group.finished_sum += in_bin
        group.num_untold = min(group.num_untold + 1, _MAX_FINISHED)

    def left(self, group: Group, prompt_id: str) -> None:
        """Remove a running member that has ended or was dropped. The last one completes the group, and its prompt's
        past grows."""
        group.num_running -= 1
        if group.num_running:
            return
        # Not earlier, because members that end first are alike.
        self._within.note(group.squares, group.num_squares)
        self.refresh()
        group.squares, group.num_squares = 0.0, 0
        if not prompt_id or not group.num_untold:
            return
        news = group.finished[-group.num_untold :]
        group.num_untold = 0
        above = sum(news) / len(news) - self._lengths.mean
        if group.past[0]:
            noise = self.own_variance * (1.0 / len(news) + 1.0 / group.past[0])
            self._wander.note((above - group.past[1]) ** 2 - noise)
        num, mean = self._prompts.pop(prompt_id, (0.0, 0.0))
        num = min(num + len(news), _MAX_PAST)
        self._prompts[prompt_id] = (num, mean + (above - mean) * min(len(news) / num, 1.0))
        if len(self._prompts) > self._max_groups:
            self._prompts.popitem(last=False)

    def dump(self) -> dict[str, Any]:
        """What was learned. Messages of running members are not kept: the members send them again.

        Cost: the gateway waits for it, so this refers to what is there and copies nothing.
        """
        groups = {name: (group.past, group.finished) for name, group in self._groups.items()}
        untold = {
            name: (group.num_untold, group.squares, group.num_squares)
            for name, group in self._groups.items()
            if group.num_untold
        }
        averages = [average.parts for average in (self._within, self._wander)]
        return {"averages": averages, "groups": groups, "untold": untold, "prompts": self._prompts}

    def restore(self, dumped: dict[str, Any]) -> None:
        """Restore a dump. Raises ArithmeticError, AttributeError, LookupError, TypeError or ValueError."""
        groups: OrderedDict[str, Group] = OrderedDict()
        for name, row in dumped["groups"].items():
            # An older dump has all numbers in one list.
            (num, mean), finished = row if isinstance(row[0], list) else (row[:2], row[2:])
            bins = [dumped_bin(in_bin) for in_bin in finished]
            groups[name] = Group((float(num), float(mean)), bins, sum(bins))
        for name, (num_untold, squares, num_squares) in dumped.get("untold", {}).items():  # an older dump has none
            group = groups[name]
            group.num_untold, group.squares, group.num_squares = int(num_untold), float(squares), int(num_squares)
        prompts = OrderedDict((name, (float(num), float(mean))) for name, (num, mean) in dumped["prompts"].items())
        parts = [(float(total), float(weight)) for total, weight in dumped["averages"]]
        self._within, self._wander = (_Average(self._memory, part) for part in parts)
        self._groups, self._prompts = groups, prompts
        self.refresh()

    def _before(self, group: Group, shared: float, own: float) -> tuple[float, float]:
        """Mean and variance of the group's level before any of its members has ended."""
        num, above = group.past
        if not num:
            return self._lengths.mean, shared
        wander = self._wander.mean(_WANDER * self._lengths.variance)
        kept = min(max(1.0 - wander / (2.0 * shared), 0.0), 1.0)
        trust = shared / (shared + own / num)
        return self._lengths.mean + kept * trust * above, shared * max(1.0 - kept * kept * trust, 0.02)


class _Average:
    """A mean of noted values, of which about the last `memory` count; older ones fade."""

    def __init__(self, memory: float, parts: tuple[float, float] = (0.0, 0.0)) -> None:
        self._memory = memory
        self.parts = parts

    def note(self, value: float, num: int = 1) -> None:
        """Add `num` values whose sum is `value`."""
        total, weight = self.parts[0] + value, self.parts[1] + num
        fade = min(1.0, self._memory / max(weight, 1.0))
        self.parts = (total * fade, weight * fade)

    def mean(self, prior: float) -> float:
        """The mean as if `prior` had been noted `_PRIOR_WEIGHT` times before."""
        total, weight = self.parts
        return (total + prior * _PRIOR_WEIGHT) / max(weight + _PRIOR_WEIGHT, 1e-9)
