"""What a gateway knows of trajectories, engines and weights: restored from its store at the start, and written again
if the store lost it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gateway.clock import Clock
from gateway.config import ConfigError, Settings
from gateway.fleet.known_processes import KnownProcesses
from gateway.messages.conversations import Conversations
from gateway.state.ledger import Ledger
from gateway.tokens.book import TokenBook
from gateway.turnlog import LOGGER
from gateway.turns.progress import progress_at_end
from gateway.turns.repeats import Repeats
from gateway.weights.record import WeightRecord
from predictor.named import predictor_named
from predictor.progress import Predictor
from scheduling.types import ACTIVE, FINISHED, TrajectoryRecord
from store import Store, StoreAway, StoreError

_PREDICTOR_STATE = "predictor"
# What the predictor learned in the last seconds before a crash is soon learned again; its state can be megabytes.
_PREDICTOR_SAVE_S = 10.0
_STORE_RETRY_S = 0.5
_STORE_LOOK_S = 1.0
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Memory:
    """All state kept in one store.

    Attributes:
        processes: which were seen at the engines' addresses.
        weights: those that an engine must have to get turns.
        records: of the trajectories of an earlier process.
    """

    store: Store
    ledger: Ledger
    predictor: Predictor
    conversations: Conversations
    repeats: Repeats
    book: TokenBook
    processes: KnownProcesses
    weights: WeightRecord
    records: list[TrajectoryRecord]

    def closed(self, record: TrajectoryRecord) -> None:
        """A trajectory's length is known; or it was aborted, and the predictor forgets it."""
        if record.state is FINISHED:
            self.predictor.ended(progress_at_end(record))
        else:
            self.predictor.dropped(record.trajectory_id)

    def forget(self, trajectory_id: str) -> None:
        """Forget what the ledger does not hold; the ledger's owner drops the rest."""
        self.conversations.forget(trajectory_id)
        self.repeats.forget(trajectory_id)
        self.book.forget(trajectory_id)
        self.predictor.dropped(trajectory_id)

    def rewrite(self) -> None:
        """Write everything to the store again, because it lost what it had."""
        self.ledger.rewrite(self.repeats.stored)
        self.book.rewrite()
        self.save_predictor()
        self.processes.remember()
        self.weights.remember()

    def save_predictor(self, before: bytes = b"") -> bytes:
        """Store and return what was learned; skip the write if it equals `before`."""
        learned = self.predictor.dump()
        if learned != before:
            self.store.put_state(_PREDICTOR_STATE, learned)
        return learned

    async def keep_predictor(self) -> None:
        """Save the predictor at intervals, until cancelled."""
        learned = b""
        while True:
            await asyncio.sleep(_PREDICTOR_SAVE_S)
            learned = self.save_predictor(learned)

    async def watch_store(self, on_fenced: Callable[[], None]) -> None:
        """Log when puts stop reaching the store, when they reach it again, and that it lost something; count then what
        it still has. Until cancelled.

        Args:
            on_fenced: called again and again once another gateway has taken over the store.
        """
        was_ok, was_fenced, num_losses, num_counted = True, False, 0, 0
        while True:
            health = self.store.health()
            if self.store.is_fenced:
                if not was_fenced:
                    LOGGER.error("fenced", extra={"fields": {"detail": health.detail}})
                was_ok, was_fenced = False, True
                on_fenced()
            if health.ok is not was_ok:
                was_ok = health.ok
                message = "store is back" if was_ok else "store is away"
                LOGGER.warning(message, extra={"fields": {"detail": health.detail}})
            if health.num_losses > num_losses:
                num_losses = health.num_losses
                LOGGER.warning(
                    "store lacked data", extra={"fields": {"detail": health.detail, "num_losses": num_losses}}
                )
            if num_counted < num_losses:
                with contextlib.suppress(StoreError):  # it is away again, or everything is still put
                    await self.book.recount()
                    num_counted = num_losses
            await asyncio.sleep(_STORE_LOOK_S)


def load_predictor(settings: Settings) -> Predictor:
    """The predictor, before it knows what the store remembers. Raises ConfigError."""
    path = settings.predictor_model
    try:
        return predictor_named(settings.predictor_name, Path(path).read_bytes() if path else None)
    except OSError as error:
        raise ConfigError(f"cannot read the predictor's model {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a model of the predictor {settings.predictor_name!r}: {error}") from None


async def restored(settings: Settings, store: Store, clock: Clock, predictor: Predictor) -> Memory:
    """What an open store remembers; waits for a store that is away.

    Raises:
        StoreAway: the store is away for too long.
    """
    timeout_s = settings.store_start_timeout_s
    ledger = Ledger(store, settings.max_turns_kept)
    stored = await _waited_for(store.load, timeout_s)
    records = ledger.restore(stored, clock())
    book = TokenBook(store, ledger, clock, settings.token_limits())
    await _waited_for(book.restore, timeout_s)
    repeats = Repeats(
        settings.max_kept_answer_bytes, settings.max_stored_answer_bytes, settings.max_running_answer_bytes
    )
    conversations = Conversations(settings.max_conversations)
    answers = {item.trajectory_id: item.answer for item in stored}
    for entry in sorted(ledger, key=lambda entry: entry.record.last_at):  # both forget what was restored first
        trajectory_id = entry.record.trajectory_id
        conversations.restore(trajectory_id, entry.conversation)
        if answer := answers[trajectory_id]:
            repeats.restore(trajectory_id, answer)
    processes, weights = KnownProcesses(store), WeightRecord(store)
    await _waited_for(processes.restore, timeout_s)
    await _waited_for(weights.restore, timeout_s)
    if learned := await _waited_for(lambda: store.get_state(_PREDICTOR_STATE), timeout_s):
        with contextlib.suppress(ValueError):  # another kind of predictor wrote it: this one starts empty
            predictor.restore(learned, {record.trajectory_id for record in records if record.state is ACTIVE})
    return Memory(store, ledger, predictor, conversations, repeats, book, processes, weights, records)


async def _waited_for(read: Callable[[], Awaitable[_Found]], timeout_s: float) -> _Found:
    """What is read from the store; read again while the store is away. Raises StoreAway after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await read()
        except StoreAway:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(_STORE_RETRY_S)
