"""Watches a stream of events as it passes: its end, its usage and its faults.

This runs for every chunk, so JSON is parsed only where a search hit (`plain.py`). Events pass as the bytes in which
they came, with two exceptions: a finish reason outside OpenAI's set is changed, and a usage event that the client did
not ask for is removed, while its system fingerprint goes back to where it would have been.
"""

from typing import Any

import orjson

from gateway.http.errors import Api, ApiError, api_error, engine_error
from gateway.http.sse import data_of, split_events
from gateway.messages.answers import (
    ABORTED,
    Usage,
    dicts,
    fault_of,
    fault_of_meta,
    metas_of,
    openai_reason,
    reason_of_meta,
    total_of,
    usage_of,
    usage_of_meta,
)
from gateway.messages.openings import is_opening
from gateway.messages.plain import MARKS, plain_event, plain_events
from gateway.messages.text_only import TextOnlyEvents

# An answer cut by its token limit is still an answer, and its client continues from it.
ENDS_OF_RESPONSES = ("response.completed", "response.incomplete")
_LAST_OF_RESPONSES = (*ENDS_OF_RESPONSES, "response.failed")

# More than the roles of as many choices as a request may want (gateway/turns/token_legs.py); an engine that sends empty
# events for longer is at work.
_MAX_OPENING_EVENTS = 256


class StreamReader:
    """One answer's stream. Feed it blocks of whole events; give the client what it returns.

    Args:
        wants_usage: whether the client asked for the usage event; otherwise it is removed.
        keep: whether to keep the events for `content_of_stream` (stream_contents.py).

    Attributes:
        error: the fault that ended the stream; what comes after it is not returned.
        done: whether the stream's own end was seen.
        finish_reason: of the first choice that finished (Anthropic: stop reason; responses: status).
        num_chunks: events with data so far, not counting comments and [DONE].
        has_begun: whether any of them has some of the answer; before that, another engine can start over.
    """

    def __init__(self, api: Api, wants_usage: bool = True, keep: bool = False) -> None:
        self.error: ApiError | None = None
        self.done = False
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.num_chunks = 0
        self.has_begun = False
        self.kept: list[bytes] = []
        self._api = api
        self._wants_usage = wants_usage
        self._keep = keep
        self._search = MARKS[api].search
        self._is_plain = plain_event(api)
        self._count_plain = plain_events(api)
        self._text_only = TextOnlyEvents()
        self._anthropic_usage: dict[str, Any] = {}
        # Of each choice, as far as its events were read: text-only ones are not, except for the first.
        self._has_finished: dict[int, bool] = {}
        self._usages: dict[int, Usage] = {}  # of each output of SGLang's own route, by its index
        # Events that finish a choice or a message, and the usage event, held until the end mark.
        self._held: list[tuple[bytes, dict[str, Any]]] = []

    def passes(self, piece: bytes) -> bool:
        """Whether this is a single event, and text only; if so, it counts as read.

        Cost: 0.4 us, where `read` takes three times as long; nearly every chunk of a stream is such an event.
        """
        if not self._text_only.matches(piece):
            if (
                not self.has_begun
                or self.done
                or self.error is not None
                or not piece.startswith(b"data:")
                or not piece.endswith(b"}\n\n")
                or piece.find(b"\n") != len(piece) - 2
                or not self._is_plain(piece)
            ):
                return False
            self._text_only.learn(piece)
        self.num_chunks += 1
        if self._keep:
            self.kept.append(piece)
        return True

    def read(self, block: bytes) -> bytes:
        """The part of these events that goes to the client: usually the block itself. Cost: 1 us a chunk."""
        if self.error or self.done:
            return b""
        # Events are parsed until the answer begins, because a stream that is not one at all can still go elsewhere. Of
        # later ones only the ends are checked, which distinguishes [DONE] and most garbage from JSON.
        if self.has_begun and (num_events := self._count_plain(block)):
            self.num_chunks += num_events
        else:
            block = self._read_events(block)
        if self._keep:
            self.kept.append(block)
        return block

    def passed(self, block: bytes, num_events: int) -> None:
        """Count events that a byte worker found plain and passed on."""
        self.num_chunks += num_events
        if self._keep:
            self.kept.append(block)

    @property
    def is_plain_so_far(self) -> bool:
        """Whether only text has come, and was all passed on: then a byte worker may pass on plain events."""
        return self.has_begun and not (self.done or self.error or self.finish_reason or self._held)

    def end(self) -> ApiError | None:
        """The fault of a stream whose connection has closed: its own, or that it ended without its end mark."""
        if self.error is None and not self.done:
            self.error = api_error(502, "The engine's stream broke off before its end.", "stream_broken")
        return self.error

    def _read_events(self, block: bytes) -> bytes:
        passed = []
        for event in split_events(block):
            passed.append(self._read_event(event))
            if self.error or self.done:
                self._text_only = TextOnlyEvents()  # nothing is like it, so whatever comes next is read
                break
        whole = b"".join(passed)
        return block if whole == block else whole

    def _read_event(self, event: bytes) -> bytes:
        data = data_of(event)
        if not data:
            return event
        if data.startswith(b"[DONE]"):
            return self._read_done(event)
        self.num_chunks += 1
        if self.has_begun and data.endswith(b"}") and self._search(data) is None:
            return event
        try:
            parsed = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.error = api_error(502, "The engine sent an event that is not JSON.", "engine_error")
            return b""
        if not isinstance(parsed, dict):
            self.has_begun = True
            return event
        if parsed.get("error") or parsed.get("object") == "error" or parsed.get("type") == "error":
            self.error = engine_error(200, parsed)
            return b""
        if self._api == "messages":
            event = self._read_anthropic(event, parsed)
        elif self._api == "responses":
            self._read_response(parsed)
        elif self._api == "generate" and (metas := metas_of(parsed)):
            event = self._read_meta(event, parsed, metas[0])
        else:
            event = self._read_choices(event, parsed)
        if self.error is not None:
            return b"" if self._api in ("messages", "responses") else self._held_events()  # of choices that did finish
        if not self.has_begun:
            self.has_begun = self.num_chunks > _MAX_OPENING_EVENTS or not is_opening(self._api, parsed)
        return event

    def _read_done(self, event: bytes) -> bytes:
        """[DONE] ends an answer only if its choices have finished.

        vLLM 0.32 ends a request that it aborted before its first token so, without a finish reason
        (openai/chat_completion/serving.py).
        """
        if self._api in ("messages", "responses"):
            return event  # they have ends of their own; engines may add this one
        held = self._held_events()
        if self._api != "other" and not (self._has_finished and all(self._has_finished.values())):
            self.error = ABORTED
            return held
        self.done = True
        return held + event

    def _hold(self, event: bytes, parsed: dict[str, Any]) -> bytes:
        self._held.append((event, parsed))
        return b""

    def _held_events(self) -> bytes:
        return b"".join([event for event, _ in self._held])

    def _read_meta(self, event: bytes, parsed: dict[str, Any], meta: dict[str, Any]) -> bytes:
        """Each output's events have its own usage."""
        index = _index_of(parsed)
        if usage := usage_of_meta(meta):
            self._usages[index] = usage
            self.usage = total_of(list(self._usages.values()))
        reason = reason_of_meta(meta)
        self.error = fault_of_meta(meta)
        self.finish_reason = self.finish_reason or reason
        self._note_choice(index, reason is not None)
        return event if reason is None or self.error is not None else self._hold(event, parsed)

    def _note_choice(self, index: int, has_finished: bool) -> None:
        self._has_finished[index] = has_finished or self._has_finished.get(index, False)

    def _read_choices(self, event: bytes, parsed: dict[str, Any]) -> bytes:
        choices = dicts(parsed.get("choices"))
        if usage := usage_of(parsed.get("usage")):
            self.usage = usage
            if not choices and not self._wants_usage:
                self._give_fingerprint(parsed.get("system_fingerprint"))
                return b""
        changed = False
        for choice in choices:
            reason = choice.get("finish_reason")
            if fault := fault_of(reason):
                self.error = fault
                return b""
            if isinstance(reason, str):
                choice["finish_reason"] = openai_reason(reason)
                changed = changed or choice["finish_reason"] != reason
                self.finish_reason = self.finish_reason or choice["finish_reason"]
            self._note_choice(_index_of(choice), isinstance(reason, str))
        if changed:
            event = b"data: " + orjson.dumps(parsed) + b"\n\n"
        if any(choice.get("finish_reason") for choice in choices) or (self._held and not choices):
            return self._hold(event, parsed)
        return event

    def _give_fingerprint(self, fingerprint: object) -> None:
        """Put the fingerprint of the removed usage event into the held ones.

        vLLM puts the system fingerprint into its last event; without usage that is the one that finishes (vLLM 0.32,
        openai/chat_completion/serving.py).
        """
        if fingerprint is not None:
            all_parsed = [{**parsed, "system_fingerprint": fingerprint} for _, parsed in self._held]
            self._held = [(b"data: " + orjson.dumps(parsed) + b"\n\n", parsed) for parsed in all_parsed]

    def _read_anthropic(self, event: bytes, parsed: dict[str, Any]) -> bytes:
        """Input tokens come with the first event, output tokens with the last but one; both are totals."""
        kind = parsed.get("type")
        if kind == "message_stop":
            self.done = self.finish_reason is not None
            self.error = None if self.done else ABORTED
            return self._held_events() + event
        if kind in ("message_start", "message_delta"):
            holder = parsed.get("message") if kind == "message_start" else parsed
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                self._anthropic_usage |= {name: count for name, count in usage.items() if count is not None}
                self.usage = usage_of(self._anthropic_usage)
            delta = parsed.get("delta")
            reason = delta.get("stop_reason") if isinstance(delta, dict) else None
            self.error = fault_of(reason)
            self.finish_reason = reason if isinstance(reason, str) else self.finish_reason
        return self._hold(event, parsed) if self.finish_reason is not None else event

    def _read_response(self, parsed: dict[str, Any]) -> None:
        response = parsed.get("response")
        if parsed.get("type") in _LAST_OF_RESPONSES:
            response = response if isinstance(response, dict) else {}
            status = response.get("status") or str(parsed["type"]).removeprefix("response.")
            self.usage = usage_of(response.get("usage"))
            self.error = engine_error(200, response) if response.get("error") else fault_of(status)
            self.finish_reason = status
            self.done = self.error is None


def _index_of(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else 0
