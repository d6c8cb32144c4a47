"""An agent without its transport: what it sends at each turn, how it identifies itself, and whether the answer is what
was asked.

No clock and no sockets, so the asyncio replayer and the gevent Locust users share it.

A trajectory's lengths are in tokens, but a client of a chat API sends text. The `Writer` writes as many characters as
make that many tokens according to the model's own `usage.prompt_tokens`. A conversation that came out too long or too
short is corrected at its next turn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal
from urllib.parse import quote

from workloads.trajectories import Trajectory, Turn

Identity = Literal["header", "session", "path", "body", "none"]
Message = dict[str, Any]

# Common short words, each one token to most tokenizers.
_WORD_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about "
    "out many then them these so some her would make like him into time has look two more write go see number"
)
WORDS = _WORD_TEXT.split()
# What a byte-pair tokenizer makes of such words, including the space, until the server has reported better.
USUAL_CHARS_PER_TOKEN = 4.0
# The gateway accepts no longer ids.
MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model answered to one turn, with the usage that the server counted."""

    content: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def mismatch(turn: Turn, answer: Answer) -> str | None:
    """Why an answer is not what the turn asked for; None if it is.

    A turn asks for an exact number of tokens (`ignore_eos`), so an engine, or a gateway that preempts and resumes, has
    no choice.
    """
    if answer.output_tokens != turn.output_tokens:
        return (
            f"asked for {turn.output_tokens} tokens, got {answer.output_tokens} "
            f"(finish_reason {answer.finish_reason!r})"
        )
    if answer.finish_reason not in ("length", "tool_calls"):
        return f"finish_reason {answer.finish_reason!r} after all {turn.output_tokens} tokens, not 'length'"
    return None


@dataclass(frozen=True, slots=True)
class Address:
    """How a turn names its trajectory: what goes before `/v1` in the path, into the headers and into the body."""

    path_prefix: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


def sent_id(recorded: str) -> str:
    """An id in a form that headers can carry: itself, or a substitute if it is long or not printable ASCII."""
    if recorded.isascii() and recorded.isprintable() and recorded == recorded.strip() and len(recorded) <= MAX_ID_CHARS:
        return recorded
    digest = sha256(recorded.encode()).hexdigest()[:16]
    return f"{quote(recorded, safe='')[: MAX_ID_CHARS // 2]}-{digest}"


def address_of(identity: Identity, trajectory_id: str, group_id: str, rollout_id: str) -> Address:
    """The address of a trajectory's turns, with ids from `sent_id`. `session` sends the header that routers know;
    `none` sends nothing, like a client that knows no gateway.
    """
    trajectory_id, group_id, rollout_id = map(sent_id, (trajectory_id, group_id, rollout_id))
    labels = {"X-Group-Id": group_id, "X-Rollout-Id": rollout_id}
    match identity:
        case "header":
            return Address(headers={"X-Trajectory-Id": trajectory_id, **labels})
        case "session":
            return Address(headers={"X-Session-ID": trajectory_id, **labels})
        case "path":
            return Address(path_prefix=f"/t/{quote(trajectory_id, safe='')}", headers=labels)
        case "body":
            metadata = {"trajectory_id": trajectory_id, "group_id": group_id, "rollout_id": rollout_id}
            return Address(body={"metadata": metadata})
        case "none":
            return Address()


class Writer:
    """Writes text of a given number of tokens; shared by all agents of one model, so that all learn from each.

    A prompt's tokens are modelled as `template + characters / chars_per_token`, fitted by least squares to the first
    prompts whose size the server has reported.
    """

    def __init__(self) -> None:
        self.chars_per_token = USUAL_CHARS_PER_TOKEN
        self.template_tokens = 0.0
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._first_prompts: dict[tuple[str, int], str] = {}

    def first_prompt(self, trajectory: Trajectory) -> str:
        """The prompt of the first turn. Siblings get the same text, even if the writer learned between them."""
        key = (trajectory.group_id, trajectory.context_tokens)
        if key not in self._first_prompts:
            self._first_prompts[key] = self.text(trajectory.group_id, trajectory.context_tokens - self.template_tokens)
        return self._first_prompts[key]

    def text(self, seed: str, num_tokens: float) -> str:
        """About `num_tokens` tokens, never empty. A seed always gives the same text; shorter texts are prefixes of
        longer ones.
        """
        num_chars = max(1, round(num_tokens * self.chars_per_token))
        # The shortest word with its space has two characters.
        return " ".join(random.Random(seed).choices(WORDS, k=num_chars // 2 + 1))[:num_chars]

    def learn(self, num_chars: int, prompt_tokens: int) -> None:
        """Take note of a one-message prompt and its size as the server counted it."""
        x, y = float(num_chars), float(prompt_tokens)
        parts = (1.0, x, y, x * x, x * y)
        self._sums = tuple(total + part for total, part in zip(self._sums, parts, strict=True))
        n, sx, sy, sxx, sxy = self._sums
        spread = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / spread if spread > 0 else 0.0
        if slope <= 0:
            # All prompts have one length, or noise: the template cannot be separated from the text.
            slope = sy / sx if sx else 0.0
        if slope > 0:
            # A token holds between a fraction of a character (bytes of rare scripts) and a long word.
            self.chars_per_token = min(20.0, max(0.25, 1.0 / slope))
            self.template_tokens = max(0.0, (sy - sx / self.chars_per_token) / n)


class Conversation:
    """One trajectory as its messages grow. `ask`, then `hear` its answer, for each turn in order."""

    def __init__(self, trajectory: Trajectory, writer: Writer) -> None:
        self.trajectory = trajectory
        self.messages: list[Message] = []
        self._writer = writer
        self._next_turn = 0
        # What the prompt should be according to the trajectory, and what it is by the server's count, both up to the
        # last answer.
        self._planned_tokens = trajectory.context_tokens
        self._counted_tokens = 0
        self._tool_call_ids: list[str] = []

    def ask(self) -> list[Message]:
        """The messages of the next turn. The list is the conversation's own: send it before the next `ask`."""
        turn = self.trajectory.turns[self._next_turn]
        if self._next_turn == 0:
            self.messages.append({"role": "user", "content": self._writer.first_prompt(self.trajectory)})
            return self.messages
        self._planned_tokens += turn.new_tokens
        seed = f"{self.trajectory.trajectory_id}/{self._next_turn}"
        text = self._writer.text(seed, self._planned_tokens - self._counted_tokens)
        if not self._tool_call_ids:
            self.messages.append({"role": "user", "content": text})
        # Every tool call needs a result; all of the text is in the first.
        for index, tool_call_id in enumerate(self._tool_call_ids):
            content = text if index == 0 else "done"
            self.messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": content})
        return self.messages

    def hear(self, answer: Answer) -> str | None:
        """Add the answer to the last `ask` to the conversation; returns why it is wrong, or None."""
        turn = self.trajectory.turns[self._next_turn]
        if self._next_turn == 0:
            self._writer.learn(len(self.messages[0]["content"]), answer.prompt_tokens)
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            message["tool_calls"] = list(answer.tool_calls)
        self.messages.append(message)
        self._tool_call_ids = [str(call["id"]) for call in answer.tool_calls]
        self._planned_tokens += turn.output_tokens
        self._counted_tokens = answer.prompt_tokens + answer.output_tokens
        self._next_turn += 1
        return mismatch(turn, answer)


def chat_body(model: str, messages: list[Message], max_tokens: int, stream: bool) -> dict[str, Any]:
    """The body of one turn: greedy, exactly `max_tokens` long on vLLM and SGLang, always with usage.

    `ignore_eos` alone lets a model write its end-of-turn token in the middle of an answer. The text lacks it, so the
    next prompt would differ from the cached KV from there on. `min_tokens` keeps it out of the answer.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body | {"min_tokens": max_tokens, "ignore_eos": True}
