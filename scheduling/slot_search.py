"""How many turns an engine runs at once, if it does not tell: vLLM, unless in development mode.

Its limit (`--max-num-seqs`) is 1,024 by default on an H100, 256 on an A100, 128 in older versions. Too few slots leave
it half empty; of too many turns, some wait in the engine. So the search goes up while the engine runs nearly all slots
and nothing waits in it. It comes back when the engine twice runs as many as ever while others wait, and then goes up by
half as much.
"""

from scheduling.types import EngineLoad

FIRST_SLOTS = 128
"""Before anything is known: the lowest default of a vLLM that is in use."""
# Looks from 128 to 1,024: six.
_FIRST_STEP = 0.5
# The search ends at steps below this: it is at most so far from the limit.
_LAST_STEP = 0.02
# An engine that runs this share of its slots is full: others are on their way.
_FULL_SHARE = 0.9
# One that runs this share of the most that it ever ran has reached its limit again: some have just ended.
_SAME_SHARE = 0.99


class SlotSearch:
    """The slots of one engine, from its looks.

    Args:
        slots: turns that it is taken to run at once.
    """

    __slots__ = ("_most_running", "_step", "_was_at_most", "slots")

    def __init__(self) -> None:
        self.slots = FIRST_SLOTS
        self._most_running = 0
        self._was_at_most = False  # at the last look it ran as many as ever, and others waited in it
        self._step = _FIRST_STEP

    def look(self, load: EngineLoad) -> None:
        """Learn from what the engine says that it has."""
        is_at_most = load.num_waiting > 0 and load.num_running >= _SAME_SHARE * self._most_running > 0
        if is_at_most and self._was_at_most:
            self._come_back()
        elif not load.num_waiting and load.num_running >= _FULL_SHARE * self.slots and self._step >= _LAST_STEP:
            self.slots = int(max(self.slots, load.num_running) * (1.0 + self._step)) + 1
        self._was_at_most = is_at_most
        if load.num_running > self._most_running:
            self._most_running, self._was_at_most = load.num_running, load.num_waiting > 0

    def _come_back(self) -> None:
        slots = self._most_running if self._most_running > FIRST_SLOTS else FIRST_SLOTS
        if slots < self.slots:
            self.slots, self._step = slots, self._step / 2
