"""Finds the trajectory that a request continues, for clients that send no identity at all.

A conversation is known by the digest of its messages and their answer. A request that repeats them and adds to them
continues that trajectory. Rules:
- A request without an answer in it is a first turn, and a first turn is always new, because siblings share it. But some
  frameworks leave out an answer that is empty, so if just one sibling got such an answer, what adds a message is its.
- Siblings with equal answers share a digest too. They are assigned in the order in which their answers came, those that
  fit the request before others. A trajectory that is at work is not assigned again, except for the very same request: a
  retry. A request with more answers, all unknown, is no next turn of one that waits behind an answer that others share:
  it may be of another one, whose older messages were shortened.
- Siblings whose answers differ only in their thoughts share a digest, because most clients leave thoughts out. If a
  client sends them back, a second digest finds its own trajectory.
- A request that branches off at an earlier answer of a trajectory continues that trajectory, if it is idle and no other
  one had that answer. A branch beside a running turn is a new trajectory.
- An answer of which the client kept only the calls is known by a digest of these. If siblings called alike and said
  different things, there is no telling whose answer it is.
- A history whose answers were changed (compacted, shortened) is unknown, hence new. But if only the last answer differs
  from what was given, the question before it identifies the trajectory: some frameworks send calls back as text. This
  does not hold for a first turn, which siblings share.

Bounded: the least recently used trajectory is forgotten first. Only the link is lost then.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from gateway.messages.transcripts import DIGEST_LENGTH, Hasher, History, prompt_of, spelled, whole_answer, whole_text

# Begins the digest of an answer's calls without its text.
_OF_CALLS = "?"
# Begins the digest of a first question whose answer was empty.
_UNANSWERED = "!"
_NOTHING = {"role": "assistant", "content": ""}
# Prompts without messages are compared at multiples of this many bytes, plus the known remainders.
_BLOCK_BYTES = 1024


class _Known:
    """One trajectory: the digests of its turns, newest last, and the request that it works on."""

    __slots__ = ("asking", "turns")

    def __init__(self) -> None:
        self.turns: deque[tuple[str, ...]] = deque()
        self.asking: str | None = None


class Conversations:
    """The conversations seen recently.

    Args:
        limit: trajectories kept; about 2 KB each at 10 turns.
        turns_kept: turns of a trajectory at which a request can still branch off.
    """

    def __init__(self, limit: int = 20_000, turns_kept: int = 256) -> None:
        self._limit = limit
        self._turns_kept = turns_kept
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._holders: dict[str, list[str]] = {}
        # Digest of a prompt's whole blocks -> lengths beyond them at which known completions end.
        self._remainders: OrderedDict[str, set[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def continued(self, body: Mapping[str, Any], history: History, fits: Callable[[str], bool]) -> str | None:
        """The trajectory that this request continues, now at work; None for a new one.

        Follow it with `remember` once the turn is answered, or `release` if it is not.

        Args:
            history: the body's.
            fits: whether the rest of the request speaks for a trajectory; asked if siblings got equal answers.
        """
        digests, whole = self._digests(body, history)
        last_question, is_last = history.asked[-1][0] if history.asked else "", True
        for digest, is_answer in reversed(digests):
            if holders := self._holders.get(digest):
                waiting = self._waiting(holders, digest) if is_last or len(holders) == 1 else []
                trajectory_id = self._choose(holders, waiting, is_answer, whole, fits)
                if trajectory_id is not None:
                    self._known[trajectory_id].asking = whole
                    self._known.move_to_end(trajectory_id)
                return trajectory_id
            is_last = is_last and digest != last_question
        return None

    def remember(self, trajectory_id: str, body: Mapping[str, Any], history: History, answer: object) -> None:
        """Note a turn's end. `answer` is what `answers.content_of` returns; None or "" only releases."""
        self.release(trajectory_id)
        if not answer:
            return
        if isinstance(answer, str) or (isinstance(answer, dict) and "token_ids" in answer):
            whole = _whole_prompt(body, answer)
            if whole is None:
                return
            keys: tuple[str, ...] = (_key_of_text(whole),)
        elif isinstance(answer, dict) and "output" in answer:
            keys = (_key_of_response(answer.get("id")),)
            if not body.get("previous_response_id"):
                keys += _keys_of(history, answer["output"])
        else:
            keys = _keys_of(*whole_answer(body, history, answer, sha256))
            if (tokens := spelled(answer.get("tokens") if isinstance(answer, dict) else None)) is not None:
                keys += (_key_of_text(tokens),)
        self._add(trajectory_id, keys)

    def release(self, trajectory_id: str) -> None:
        """Note that a turn ended without an answer: the trajectory can be continued from where it was."""
        if known := self._known.get(trajectory_id):
            known.asking = None

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory; an unknown one is no error."""
        if known := self._known.pop(trajectory_id, None):
            self._drop(trajectory_id, {key for keys in known.turns for key in keys})

    def dump(self, trajectory_id: str) -> str:
        """What to store with a trajectory's last turn for `restore`; "" if nothing is known."""
        known = self._known.get(trajectory_id)
        return " ".join(known.turns[-1]) if known else ""

    def restore(self, trajectory_id: str, digests: Iterable[str]) -> None:
        """Restore a trajectory from what `dump` returned after each of its turns, oldest first."""
        for dumped in digests:
            if keys := tuple(dumped.split()):
                self._add(trajectory_id, keys)

    def _waiting(self, holders: Sequence[str], digest: str) -> list[str]:
        """Those that are idle and had their last turn here."""
        return [one for one in holders if (known := self._known[one]).asking is None and digest in known.turns[-1]]

    def _choose(
        self, holders: Sequence[str], waiting: Sequence[str], is_answer: bool, whole: str, fits: Callable[[str], bool]
    ) -> str | None:
        """The trajectory that waits for this very turn; else the one that this retries, or asked it before; else the
        one that waits and does not fit; else the one that it branches off from.

        Of several that wait behind equal answers, any will do. Behind equal questions they were answered differently,
        and there is no telling whose answer this is.
        """

        def one_of(candidates: Sequence[str]) -> str | None:
            return candidates[0] if candidates and (is_answer or len(candidates) == 1) else None

        fitting = waiting if len(holders) == 1 else [one for one in waiting if fits(one)]
        return (
            one_of(fitting)
            or next((one for one in holders if self._known[one].asking == whole), None)
            or self._branching(self._holders.get(whole, ()))
            or one_of(waiting)
            or self._branching(holders)
        )

    def _branching(self, holders: Sequence[str]) -> str | None:
        """The trajectory that goes back to this point, if it is idle and no other one was there."""
        return holders[0] if len(holders) == 1 and self._known[holders[0]].asking is None else None

    def _add(self, trajectory_id: str, keys: tuple[str, ...]) -> None:
        known = self._known.get(trajectory_id)
        if known is None:
            known = self._known[trajectory_id] = _Known()
        known.turns.append(keys)
        if len(known.turns) > self._turns_kept:
            oldest = known.turns.popleft()
            self._drop(trajectory_id, {key for key in oldest if not any(key in turn for turn in known.turns)})
        self._known.move_to_end(trajectory_id)
        for key in keys:
            if "/" in key:
                self._note_remainder(key)
            holders = self._holders.setdefault(key, [])
            if trajectory_id not in holders:
                holders.append(trajectory_id)
        while len(self._known) > self._limit:
            self.forget(next(iter(self._known)))

    def _drop(self, trajectory_id: str, keys: Iterable[str]) -> None:
        for key in keys:
            holders = self._holders[key]
            holders.remove(trajectory_id)
            if not holders:
                del self._holders[key]

    def _digests(self, body: Mapping[str, Any], history: History) -> tuple[list[tuple[str, bool]], str]:
        """The points from which a request may continue, in order, each with whether it is behind an answer; and the
        whole digest.
        """
        if previous := body.get("previous_response_id"):
            return [(_key_of_response(previous), True)], history.digest()
        if (prompt := spelled(prompt_of(body))) is not None:
            return self._digests_of_text(prompt)
        digests = [(digest, True) for digest in history.digests]
        for digest, num_before in reversed(history.asked):
            digests.insert(num_before, (digest, False))
        if digests:
            digests.insert(-1, (_OF_CALLS + digests[-1][0], False))
        elif history.before_last:
            digests = [(_UNANSWERED + history.before_last, False)]
        if history.with_thoughts:  # the more exact one comes later, to be tried first
            found = history.with_thoughts
            digests = [
                (known, is_answer)
                for digest, is_answer in digests
                for known in ((digest, found[digest]) if is_answer and digest in found else (digest,))
            ]
        return digests, history.digest()

    def _digests_of_text(self, prompt: bytes) -> tuple[list[tuple[str, bool]], str]:
        """The keys of every known text that this prompt may begin with: one pass, with a stop at each known length."""
        hasher = sha256()
        keys = []
        for start in range(0, len(prompt) + 1, _BLOCK_BYTES):
            blocks = hasher.hexdigest()[:DIGEST_LENGTH]
            block = prompt[start : start + _BLOCK_BYTES]
            lengths = sorted(length for length in self._remainders.get(blocks, ()) if length <= len(block))
            keys += [(_text_key(blocks, hasher, block[:length]), True) for length in lengths]
            hasher.update(block)
        return keys, hasher.hexdigest()

    def _note_remainder(self, key: str) -> None:
        blocks, length, _ = key.split("/")
        self._remainders.setdefault(blocks, set()).add(int(length))
        self._remainders.move_to_end(blocks)
        # A stale length costs at most one hash of a block, so they are dropped by age alone.
        while len(self._remainders) > self._limit:
            self._remainders.popitem(last=False)


def _whole_prompt(body: Mapping[str, Any], answer: dict[str, Any] | str) -> bytes | None:
    """A completion's prompt with what was made of it; None if the prompt is tokens and those made are unknown."""
    prompt = prompt_of(body)
    if isinstance(prompt, list):
        ids = answer.get("token_ids") if isinstance(answer, dict) else None
        return spelled([*prompt, *ids]) if isinstance(ids, list) else None
    made = answer.get("text") if isinstance(answer, dict) else answer
    return spelled(whole_text(body, prompt, made)) if isinstance(prompt, str) and isinstance(made, str) else None


def _keys_of(history: History, answer: object) -> tuple[str, ...]:
    """The keys of a request with its answer, and of its question unless that is a first turn."""
    answered, asked = history.digests_of(answer), history.digest()
    if isinstance(answer, dict) and answer.get("tool_calls") and answer.get("content"):
        answered += (_OF_CALLS + history.digest({"role": "assistant", "tool_calls": answer["tool_calls"]}),)
    if not history.digests and answered[0] in (asked, history.digest(_NOTHING)):
        answered += (_UNANSWERED + asked,)
    is_question = history.digests and asked != history.digests[-1]  # and not the beginning of an answer
    return (*answered, asked) if is_question else answered


def _key_of_response(response_id: object) -> str:
    return sha256(f"response {response_id}".encode()).hexdigest()[:DIGEST_LENGTH]


def _key_of_text(text: bytes) -> str:
    whole_blocks = len(text) // _BLOCK_BYTES * _BLOCK_BYTES
    hasher = sha256(text[:whole_blocks])
    return _text_key(hasher.hexdigest()[:DIGEST_LENGTH], hasher, text[whole_blocks:])


def _text_key(blocks: str, hasher: Hasher, rest: bytes) -> str:
    """Digest of the whole blocks, length of the rest, digest of all: enough to find it again in one pass."""
    whole = hasher.copy()
    whole.update(rest)
    return f"{blocks}/{len(rest)}/{whole.hexdigest()[:DIGEST_LENGTH]}"
