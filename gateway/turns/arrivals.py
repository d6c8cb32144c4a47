"""What the scheduler is told about an arriving turn: its prompt's length, and how much work its trajectory has left.

Only the engine can count a prompt's tokens, so they are estimated here from the trajectory's context so far and from
the bytes per token of finished turns.
"""

from gateway.fleet.fleet import Fleet
from gateway.messages.answers import Usage
from gateway.messages.prompt_groups import PromptGroups
from gateway.messages.transcripts import prompt_of
from gateway.state.ledger import Entry, Ledger
from gateway.turns.ask import Ask
from gateway.turns.progress import progress_before_turn
from gateway.turns.text_predictions import TextPredictions
from gateway.turns.turn import Turn
from predictor.outcomes import outcomes
from predictor.progress import Predictor
from scheduling.types import ACTIVE, Prediction, TurnArrived

# For the first prompts, before the fleet's own tokenizer has been seen at work; typical of English and code.
_BYTES_PER_TOKEN = 4.0


class Arrivals:
    """Builds the arrival events of turns.

    Args:
        groups: know which prompts begin alike.
        predictor: predicts how much work a trajectory has left.
        texts: predict it better, from the conversation; None if no text predictor runs.
    """

    def __init__(
        self, fleet: Fleet, ledger: Ledger, groups: PromptGroups, predictor: Predictor, texts: TextPredictions | None
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._groups = groups
        self._predictor = predictor
        self._texts = texts
        self._bytes_per_token = _BYTES_PER_TOKEN

    def arrival(self, turn: Turn) -> TurnArrived:
        """The event for a turn; also stores the prediction in the turn."""
        ask = turn.ask
        entry = self._ledger.get(ask.trajectory_id)
        prompt_tokens = self._prompt_tokens(ask, entry)
        prediction = self._prediction(ask, entry, prompt_tokens)
        turn.predicted_tokens = prediction.total_tokens
        has_turns = entry is not None and entry.turns
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
            () if has_turns else self._groups.parts(ask.request, len(ask.body), prompt_tokens),
        )

    def unanswered(self, ask: Ask) -> None:
        """A turn ended without an answer: have the predictor forget its trajectory, unless that is known and active."""
        entry = self._ledger.get(ask.trajectory_id)
        if entry is None or entry.record.state is not ACTIVE:
            self._predictor.dropped(ask.trajectory_id)

    def prompt_tokens(self, ask: Ask) -> int:
        """The estimate, for a turn whose engine did not report a count."""
        return self._prompt_tokens(ask, self._ledger.get(ask.trajectory_id))

    def learn(self, ask: Ask, usage: Usage) -> None:
        """Improve the estimate with an engine's count, which must be at least one token."""
        if ask.api == "responses" and ask.request.get("previous_response_id"):
            return  # most of its prompt is at the engine
        self._bytes_per_token += 0.05 * (len(ask.body) / usage.prompt_tokens - self._bytes_per_token)

    def _prediction(self, ask: Ask, entry: Entry | None, prompt_tokens: int) -> Prediction:
        made = entry.record.output_tokens if entry is not None else 0
        prompt_id = "" if made else self._groups.of(ask.request)
        is_read = made and self._predictor.reads_outcomes
        told = outcomes(ask.request.get("messages") or ask.request.get("input")) if is_read else ()
        progress = progress_before_turn(ask.trajectory_id, ask.group_id, prompt_id, prompt_tokens, entry, told)
        prediction = self._predictor.predict(progress)  # always asked, because it learns from running trajectories
        declared = entry.declared.get("expected_output_tokens") if entry is not None else None
        if declared:
            total = float(max(declared, made + 1))
            return Prediction(total, total)
        from_text = self._texts.take(ask.trajectory_id) if self._texts is not None else None
        return from_text or prediction

    def _prompt_tokens(self, ask: Ask, entry: Entry | None) -> int:
        known = entry.record.context_tokens if entry is not None else 0
        prompt = prompt_of(ask.request)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        estimate = int(len(ask.body) / self._bytes_per_token)
        model = self._fleet.models().get(ask.model)
        limit = model.max_context_tokens if model is not None else None
        if limit and limit < estimate:
            estimate = limit
        return known if known > estimate else estimate
