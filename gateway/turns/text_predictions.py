"""Reads conversations to predict the work that is left: asked while tools run, used when the next turn arrives."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gateway.config import ConfigError
from gateway.messages.stream_contents import content_of_stream
from gateway.messages.transcripts import prompt_of
from gateway.state.ledger import Entry
from gateway.turns.outcome import Outcome
from gateway.turns.progress import progress_before_turn
from gateway.turns.turn import Turn
from predictor.background import BackgroundCounts, BackgroundPredictions
from predictor.progress import Predictor
from predictor.text import TextExample, TextPredictor, conversation_text
from scheduling.types import Prediction

Question = Callable[[], TextExample]
"""Made in the thread that answers it, because reading a conversation is work as well."""


class TextPredictions:
    """Runs a text predictor in a thread of its own. No turn waits for it.

    Args:
        predict: total output, given a conversation; takes some milliseconds.
        predictor: what the text predictor starts from, and what is used when it is late.
    """

    def __init__(self, predict: Callable[[TextExample], Prediction], predictor: Predictor) -> None:
        self._predictor = predictor
        self._executor = ThreadPoolExecutor(1, "text-predictor")
        self._background: BackgroundPredictions[Question] = BackgroundPredictions(
            lambda question: predict(question()), self._executor
        )

    @property
    def counts(self) -> BackgroundCounts:
        """What became of the questions so far."""
        return self._background.counts

    def turn_ended(self, turn: Turn, outcome: Outcome, entry: Entry, context_tokens: int) -> None:
        """If the trajectory goes on, a tool runs now: ask how much work is left.

        Args:
            entry: of its trajectory, with this turn in it.
        """
        ask, record = turn.ask, entry.record
        progress = progress_before_turn(ask.trajectory_id, ask.group_id, "", context_tokens, entry)
        base_tokens = self._predictor.predict(progress).total_tokens
        pieces = [*(turn.outlet.kept or ()), outcome.end]
        made, num_turns = record.output_tokens, record.num_turns

        def question() -> TextExample:
            answer = outcome.content() or content_of_stream(ask.api, pieces)
            text = conversation_text([*_messages(ask.request), answer])
            return TextExample(text, ask.group_id, made, num_turns, base_tokens=base_tokens)

        self._background.begin(ask.trajectory_id, question)

    def take(self, trajectory_id: str) -> Prediction | None:
        """The prediction for the turn that arrives now; None if it is not ready."""
        return self._background.take(trajectory_id)

    def dropped(self, trajectory_id: str) -> None:
        """The trajectory ended."""
        self._background.dropped(trajectory_id)

    def close(self) -> None:
        """Ask no more questions."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def load_text_predictions(path: str, predictor: Predictor) -> TextPredictions:
    """Text predictions by the model in this file. Raises ConfigError."""
    try:
        return TextPredictions(TextPredictor.load(Path(path)).predict, predictor)
    except ImportError:
        raise ConfigError("text_predictor needs torch: pip install torch") from None
    except OSError as error:
        raise ConfigError(f"cannot read the text predictor {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _messages(request: Mapping[str, Any]) -> list[Any]:
    """The conversation of a request, in any API."""
    messages = request.get("messages") or request.get("input") or prompt_of(request)
    return messages if isinstance(messages, list) else [messages]
