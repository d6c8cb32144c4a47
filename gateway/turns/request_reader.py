"""Reads what a client asks: which model, which trajectory, and how urgent it is. Nothing is awaited."""

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import orjson
from xxhash import xxh3_128

from engines.flags import flag_of
from engines.upstream import SGLANG_GENERATE
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.http.client import Headers
from gateway.http.errors import Api
from gateway.http.refusals import (
    Refused,
    bad_model,
    bad_request,
    invalid_json,
    no_engine,
    no_threads,
    not_found,
    not_seen,
    unknown_model,
    unreadable,
)
from gateway.http.trace_context import trace_of
from gateway.messages.beginnings import Beginnings
from gateway.messages.conversations import Conversations
from gateway.messages.histories import Histories
from gateway.messages.identity import NO_HINTS, Identity, IdentityError, identify, trajectory_in_head
from gateway.messages.lazy_object import BrokenValue, LazyObject
from gateway.messages.prompt_groups import PromptGroups
from gateway.state.ledger import Ledger
from gateway.tokens.book import TokenBook
from gateway.turns.ask import Ask
from gateway.turns.ids import new_trajectory_id
from gateway.turns.repeats import retry_of
from scheduling.types import ACTIVE

# Larger hints mean no more than this: engines get the number scaled, and it must stay a 64-bit integer there.
_MAX_HINT = 1_000
# A shorter body is parsed in less time than it takes to find its members and parse some of them.
_LAZY_FROM_BYTES = 8_192


class RequestReader:
    """Reads the requests of turns.

    Args:
        conversations: recognise clients that send no id.
        groups: know which prompts begin alike.
        reads_all: every turn's conversation will be read. Otherwise it is parsed until a turn of its trajectory made
            something, and later what is new in a request without an id.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        ledger: Ledger,
        conversations: Conversations,
        groups: PromptGroups,
        book: TokenBook,
        reads_all: bool,
    ) -> None:
        self._has_token_legs = settings.has_token_legs
        self._fleet = fleet
        self._ledger = ledger
        self._conversations = conversations
        self._named = Beginnings(xxh3_128, settings.max_conversations)
        self._unnamed = Beginnings(sha256, settings.max_conversations)
        self._histories = Histories(sha256, settings.max_conversations)
        self._groups = groups
        self._book = book
        self._reads_all = reads_all

    def ask(self, scope: Mapping[str, Any], api: Api, path: str, body: bytes) -> Ask:
        """What a request asks. Raises Refused.

        Args:
            scope: its raw path may hold an identity.
            path: the API route, without it.
        """
        headers = dict(scope["headers"])  # of a repeated one the last counts
        try:
            return self._ask(scope, headers, api, path, body, self._read(scope, headers, body))
        except BrokenValue as error:
            raise invalid_json(str(error)) from None

    def _read(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], body: bytes) -> Mapping[str, Any]:
        """The request, parsed when it is read if it is long and of a trajectory that has asked before."""
        if len(body) >= _LAZY_FROM_BYTES:
            # Later steps say what is wrong with an id or with the body. parse_object allows deeper nesting.
            with contextlib.suppress(ValueError):
                name = trajectory_in_head(scope["raw_path"].decode("latin-1"), headers)
                return (self._unnamed if name is None else self._named).read(name, body)
        return parse_object(body, scope["headers"])

    def _ask(
        self,
        scope: Mapping[str, Any],
        headers: Mapping[bytes, bytes],
        api: Api,
        path: str,
        body: bytes,
        request: Mapping[str, Any],
    ) -> Ask:
        wants_stream = _wants_stream(request)
        if api == "messages" and request.get("thread") is not None:
            raise no_threads()  # engines ignore it, and would answer without what came before
        if isinstance(request, LazyObject) and self._reads_all:
            request.parse()  # before its conversation is recognised, which is then at work
        model = self._model(request)
        if api == "generate":
            self._check_kind(path, model)
        try:
            identity = identify(scope["raw_path"].decode("latin-1"), headers, request)
        except IdentityError as error:
            raise bad_request(str(error), code="bad_identity") from None
        trajectory_id, history = identity.trajectory_id, None
        if trajectory_id is None:
            history = self._histories.read(request)
            fits = partial(self._fits, model, identity)
            trajectory_id = self._conversations.continued(request, history, fits) or new_trajectory_id()
        entry = self._ledger.get(trajectory_id)
        has_begun = entry is not None and entry.turns and entry.record.output_tokens
        if isinstance(request, LazyObject) and not has_begun:
            request.parse()  # its conversation will be read
        known_group = entry.record.group_id if entry is not None else None
        group_id = identity.group_id or known_group or self._groups.of(request)
        keeps_tokens = self._has_token_legs and self._book.wants(trajectory_id, scope["headers"])
        is_retry, retry_key = retry_of(headers)
        # By position: keyword arguments cost 0.1 us each.
        return Ask(
            api,
            path,
            model,
            body,
            request,
            trajectory_id,
            group_id,
            identity.rollout_id,
            _priority(identity),
            identity.strong,
            keeps_tokens,
            wants_stream,
            history,
            is_retry,
            retry_key,
            trace_of(headers),
        )

    def _fits(self, model: str, identity: Identity, trajectory_id: str) -> bool:
        """Whether a request without an id may well be of this trajectory: it has not ended, is of the group and the
        rollout that the request names, and asked the same model last.
        """
        entry = self._ledger.get(trajectory_id)
        if entry is None or entry.record.state is not ACTIVE or not entry.turns:
            return False
        record = entry.record
        return (
            entry.turns[-1].get("model") == model
            and identity.group_id in (None, record.group_id)
            and identity.rollout_id in (None, record.rollout_id)
        )

    def _model(self, request: Mapping[str, Any]) -> str:
        model = request.get("model")
        known = self._fleet.models()
        if model in (None, "") and len(known) == 1:
            return next(iter(known))
        if not isinstance(model, str) or not model or model not in known:
            raise self._no_model(model, known)
        return model

    def _no_model(self, model: Any, known: Iterable[str]) -> Refused:
        if not known and model in (None, ""):
            return no_engine(len(self._fleet.members()))
        return lacks_model(self._fleet, model) if isinstance(model, str) and model else bad_model(known)

    def _check_kind(self, path: str, model: str) -> None:
        """Raises Refused if the turn may go to an engine that has no such route."""
        kind = "sglang" if path == SGLANG_GENERATE else "vllm"
        for member in self._fleet.members():
            is_of_model = any(model == known.model_id for known in member.server.models)
            if is_of_model and member.server.dialect is not None and member.server.dialect.kind != kind:
                raise not_found(f"{path} exists on {kind} only; other engines serve {model[:200]!r}.", "unknown_route")


def parse_object(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    """A request body as a JSON object. Raises Refused (400, 415)."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise unreadable(headers, str(error)) from None
    if not isinstance(request, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return request


def lacks_model(fleet: Fleet, model: str) -> Refused:
    """What a request for a model gets that no engine is known to serve: one that was not seen yet may serve it."""
    num_engines = len(fleet.members())
    if not fleet.models():
        return no_engine(num_engines)
    num_unseen = fleet.num_unseen()
    return not_seen(model, num_unseen, num_engines) if num_unseen else unknown_model(model, fleet.models())


def named(scope: Mapping[str, Any], body: bytes) -> Headers:
    """The header that names the trajectory of a request refused early, if the request can be read."""
    request: dict[str, Any] = {}
    with contextlib.suppress(Refused):
        request = parse_object(body, ())
    try:
        identity = identify(scope["raw_path"].decode("latin-1"), dict(scope["headers"]), request)
    except IdentityError:
        return b""
    return b"x-trajectory-id: %b\r\n" % identity.trajectory_id.encode() if identity.trajectory_id else b""


def _wants_stream(request: Mapping[str, Any]) -> bool:
    stream = request.get("stream")
    if stream is None:
        return False
    wants_stream = flag_of(stream)
    if wants_stream is None:
        raise bad_request("'stream' must be true or false.", "stream")
    return wants_stream


def _priority(identity: Identity) -> int:
    """The scheduler's priority: lower is earlier. In hints higher is more urgent, and a strict tier precedes everything
    else.
    """
    if identity.hints is NO_HINTS:
        return 0
    hints = identity.hints.strict_priority, identity.hints.priority
    tier, priority = (max(-_MAX_HINT, min(_MAX_HINT, hint or 0)) for hint in hints)
    return -(tier * (2 * _MAX_HINT + 1) + priority)
