"""What the scheduler is told of a turn that arrives: how long its prompt is, and how much work its trajectory has left.

A prompt's tokens are estimated, for only the engine can count them: by the trajectory's context so far, and by the
bytes per token that finished turns had.
"""

from gateway.fleet.fleet import Fleet
from gateway.messages.answers import Usage
from gateway.messages.prompt_groups import PromptGroups
from gateway.messages.transcripts import preamble_of, prompt_of
from gateway.state.ledger import Entry, Ledger
from gateway.turns.ask import Ask
from gateway.turns.progress import begun
from gateway.turns.reading import Reading
from gateway.turns.turn import Turn
from predictor.outcomes import outcomes
from predictor.progress import Predictor
from scheduling.types import ACTIVE, Prediction, TurnArrived

# Of the first prompts, until the fleet's own tokenizer has been seen at work; typical of English and code.
_BYTES_PER_TOKEN = 4.0


class Arrivals:
    """Says what arrives.

    Args:
        groups: know who begins alike.
        predictor: says how much work a trajectory has left.
        reading: says it better, where it has read what is said in it; None where nobody does.
    """

    def __init__(
        self, fleet: Fleet, ledger: Ledger, groups: PromptGroups, predictor: Predictor, reading: Reading | None
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._groups = groups
        self._predictor = predictor
        self._reading = reading
        self._bytes_per_token = _BYTES_PER_TOKEN

    def arrival(self, turn: Turn) -> TurnArrived:
        """The event for a turn, which gets to know its prediction."""
        ask = turn.ask
        entry = self._ledger.get(ask.trajectory_id)
        prompt_tokens = self._prompt_tokens(ask, entry)
        prediction = self._prediction(ask, entry, prompt_tokens)
        turn.predicted_tokens = prediction.total_tokens
        preamble_id, preamble_tokens = ("", 0) if entry is not None and entry.turns else _preamble(ask, prompt_tokens)
        return TurnArrived(
            turn.arrived_at,
            turn.turn_id,
            ask.trajectory_id,
            ask.model,
            prompt_tokens,
            prediction,
            ask.group_id,
            ask.rollout_id,
            ask.priority,
            preamble_id,
            preamble_tokens,
        )

    def unanswered(self, ask: Ask) -> None:
        """A turn ended without an answer: nobody waits for a trajectory that it did not begin, or that is over."""
        entry = self._ledger.get(ask.trajectory_id)
        if entry is None or entry.record.state is not ACTIVE:
            self._predictor.dropped(ask.trajectory_id)

    def prompt_tokens(self, ask: Ask) -> int:
        """The estimate, for a turn whose engine did not tell."""
        return self._prompt_tokens(ask, self._ledger.get(ask.trajectory_id))

    def learn(self, ask: Ask, usage: Usage) -> None:
        """Estimate better by what an engine counted, which must be some tokens."""
        self._bytes_per_token += 0.05 * (len(ask.body) / usage.prompt_tokens - self._bytes_per_token)

    def _prediction(self, ask: Ask, entry: Entry | None, prompt_tokens: int) -> Prediction:
        made = entry.record.output_tokens if entry is not None else 0
        declared = entry.declared.get("expected_output_tokens") if entry is not None else None
        if declared:
            total = float(max(declared, made + 1))
            return Prediction(total, total)
        prompt_id = "" if made else self._groups.of(ask.request)
        is_read = made and self._predictor.reads_outcomes
        told = outcomes(ask.request.get("messages") or ask.request.get("input")) if is_read else ()
        progress = begun(ask.trajectory_id, ask.group_id, prompt_id, prompt_tokens, entry, told)
        prediction = self._predictor.predict(progress)  # asked always, for it learns from those that run
        read = self._reading.heard(ask.trajectory_id) if self._reading is not None else None
        return read or prediction

    def _prompt_tokens(self, ask: Ask, entry: Entry | None) -> int:
        known = entry.record.context_tokens if entry is not None else 0
        prompt = prompt_of(ask.request)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        estimate = int(len(ask.body) / self._bytes_per_token)
        if estimate < known:
            estimate = known
        model = self._fleet.models().get(ask.model)
        limit = model.max_context_tokens if model is not None else None
        return limit if limit and limit < estimate else estimate


def _preamble(ask: Ask, prompt_tokens: int) -> tuple[str, int]:
    """Its name, and how many of the prompt's tokens it is, as far as bytes tell."""
    preamble_id, num_bytes = preamble_of(ask.request)
    return preamble_id, prompt_tokens * num_bytes // len(ask.body) if num_bytes < len(ask.body) else prompt_tokens
