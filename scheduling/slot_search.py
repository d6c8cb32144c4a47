"""How many turns an engine runs at once, if it does not tell: vLLM, unless in development mode.

Its limit (`--max-num-seqs`) is 1,024 by default on an H100, 256 on an A100, 128 in older versions. Too few slots leave
it half empty; of too many turns, some wait in the engine. So the search goes up while the engine runs nearly all slots
and nothing waits in it. It comes back when the engine twice runs as many as ever while others wait, and then goes up by
half as much, until the steps are small.

Turns also wait for a prefill, so what it came back to need not be the limit. If the engine runs more than that, it was
none, and the search begins anew. As it runs no more than it gets, a search that has ended tries a few more slots twice
a minute; if they are above the limit, the turns there wait in the engine for two looks, where they would run next.
"""

from math import inf

from scheduling.types import EngineLoad

FIRST_SLOTS = 128
"""Before anything is known: the lowest default of a vLLM that is in use."""
# Looks from 128 to 1,024: six.
_FIRST_STEP = 0.5
# The search ends at steps below this: it is at most so far from the limit.
_LAST_STEP = 0.02
# Then it is this step that it tries, once it was full for so many looks.
_TRIED_STEP = 0.05
_TRIED_EVERY = 30
# An engine that runs this share of its slots is full: others are on their way.
_FULL_SHARE = 0.9
# One that runs this share of the most that it ever ran has reached its limit again: some have just ended. One that runs
# more than the most by as much goes on growing.
_SAME_SHARE = 0.99


class SlotSearch:
    """The slots of one engine, from its looks.

    Args:
        slots: turns that it is taken to run at once.
    """

    __slots__ = ("_limit", "_most_running", "_num_full", "_step", "_was_at_most", "slots")

    def __init__(self) -> None:
        self.slots = FIRST_SLOTS
        self._limit = inf  # what the search came back to
        self._most_running = 0
        self._num_full = 0  # looks since the search has ended that found the engine full
        self._was_at_most = False  # at the last look it ran as many as ever, and others waited in it
        self._step = _FIRST_STEP

    def look(self, load: EngineLoad) -> None:
        """Learn from what the engine says that it has."""
        running, waiting = load.num_running, load.num_waiting
        if running > self._limit / _SAME_SHARE:
            self._limit, self._step = inf, _FIRST_STEP
        is_same = _SAME_SHARE * self._most_running <= running <= self._most_running / _SAME_SHARE
        is_at_most = waiting > 0 and running > 0 and is_same
        if is_at_most and self._was_at_most:
            self._come_back()
        elif not waiting and running >= _FULL_SHARE * self.slots:
            self._go_up(running)
        self._was_at_most = is_at_most
        if running > self._most_running:
            self._most_running, self._was_at_most = running, waiting > 0

    def _go_up(self, running: int) -> None:
        step = self._step
        if step < _LAST_STEP:
            self._num_full += 1
            if self._num_full < _TRIED_EVERY:
                return
            step = _TRIED_STEP
        self._num_full = 0
        self.slots = int(max(self.slots, running) * (1.0 + step)) + 1

    def _come_back(self) -> None:
        slots = self._most_running if self._most_running > FIRST_SLOTS else FIRST_SLOTS
        if slots < self.slots:
            self.slots, self._step = slots, self._step / 2
            self._limit = float(slots)
