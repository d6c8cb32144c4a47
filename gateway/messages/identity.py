"""Which trajectory a request belongs to, from what its client sent.

Pure, and on the path of every request: one pass over the headers, a few look-ups in the body. Rules: the first form
that matches wins, in the order of `_HEADER_FORMS` and `_body_forms`. Empty and blank values do not match. A malformed
id is the client's mistake (`IdentityError`, a 400) and never silently another trajectory. A malformed hint is ignored,
because a hint is never a reason to refuse.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.parse import unquote

import orjson

from scheduling.values import value_class

# Longer than every id seen (two UUIDs are 73 characters), short enough for a store's key and a header.
MAX_ID_LENGTH = 256

# Engines take priorities as 32-bit integers; a larger value is not a priority.
_MAX_INT = 2**31 - 1
_INTEGER = re.compile(rb"\s*-?[0-9]{1,10}\s*")

_PATH_PREFIXES = ("/t/", "/sessions/")
# Clients that strip `/v1` from their base URL for these routes find them behind an identity, too.
_BESIDE_V1 = frozenset({"inference/v1/generate", "generate", "tokenize", "detokenize"})
_HEADER_FORMS = (
    b"x-trajectory-id",
    b"x-session-id",
    b"x-smg-routing-key",
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"x-correlation-id",
)
# The part of a session that runs by itself: a session's agents and threads are distinct trajectories.
_PARTS = {b"x-claude-code-session-id": b"x-claude-code-agent-id", b"session-id": b"thread-id"}
_HINT_HEADERS = frozenset({b"x-dynamo-request-priority", b"x-dynamo-request-strict-priority"})


class IdentityError(ValueError):
    """An id that cannot be used: the client's mistake (400). Repeating the request changes nothing."""


@dataclass(frozen=True, slots=True)
class Hints:
    """How urgent a client's turn is; None for what it did not say, or said in an unusable form.

    Higher is more urgent (Dynamo agent hints); `strict_priority` is a tier that precedes any `priority`.
    """

    priority: int | None = None
    strict_priority: int | None = None


@value_class(frozen=True, slots=True)
class Identity:
    """Who sent a request. `strong` is False if there is no id, or one that may stand for several trajectories at once
    (`user`).
    """

    trajectory_id: str | None
    strong: bool
    group_id: str | None
    rollout_id: str | None
    hints: Hints


NO_HINTS = Hints()


def identify(path: str, headers: Mapping[bytes, bytes], body: Mapping[str, Any]) -> Identity:
    """The identity that a request carries, with its group, rollout and hints.

    Args:
        path: as sent, still percent-encoded.
        headers: names in lower case.
        body: the JSON object, {} if there is none. Its values may be of any type.
    Raises:
        IdentityError: an id too long, not printable ASCII, or neither a string nor an integer.
    Cost: 3 us with one form, 5 us with group, rollout and hints as well.
    """
    metadata = _object(body.get("metadata"))
    context = _agentic_context(body) if "vllm_xargs" in body else _NOTHING
    trajectory_id, strong = trajectory_in_head(path, headers), True
    if trajectory_id is None:
        trajectory_id, strong = _from_body(body, metadata, context)
    return Identity(
        trajectory_id,
        strong,
        _named(headers, metadata, b"x-group-id", "group_id"),
        _named(headers, metadata, b"x-rollout-id", "rollout_id"),
        NO_HINTS
        if not context and "nvext" not in body and _HINT_HEADERS.isdisjoint(headers)
        else _hints(headers, body, context),
    )


def trajectory_in_head(path: str, headers: Mapping[bytes, bytes]) -> str | None:
    """The trajectory that `identify` finds whatever the body says; None if there is no such. Raises: IdentityError."""
    trajectory_id = strip_identity_path(path)[0] if path.startswith(_PATH_PREFIXES) else None
    return trajectory_id if trajectory_id is not None else _from_headers(headers)


def strip_identity_path(path: str) -> tuple[str | None, str]:
    """The id in `/t/{id}/v1/...` or `/sessions/{id}/v1/...` and the path without it, `/v1/...`.

    Any other path is returned unchanged, with None. An empty id is stripped and gives None. Raises: IdentityError.
    """
    if not path.startswith(_PATH_PREFIXES):
        return None, path
    _, _, escaped, rest = path.split("/", 3) if path.count("/") > 2 else ("", "", "", "")
    if rest != "v1" and not rest.startswith("v1/") and rest not in _BESIDE_V1:
        return None, path
    try:
        return _id(unquote(escaped, errors="strict"), "path"), "/" + rest
    except UnicodeDecodeError:
        raise IdentityError("The trajectory id in the path is not UTF-8.") from None


def _from_headers(sent: Mapping[bytes, bytes]) -> str | None:
    for name in _HEADER_FORMS:
        if name in sent:
            label = name.decode()
            trajectory_id = _id(sent[name], label)
            if trajectory_id is not None:
                part = _PARTS.get(name)
                return _joined(trajectory_id, sent.get(part), label) if part else trajectory_id
    return None


def _from_body(
    body: Mapping[str, Any], metadata: Mapping[str, Any], context: Mapping[str, Any]
) -> tuple[str | None, bool]:
    """The id, and whether it is a strong one."""
    for value, where in _body_forms(body, metadata, context):
        if value is not None and (trajectory_id := _id(value, where)) is not None:
            return trajectory_id, True
    for value in (body.get("user"), _session_of(metadata.get("user_id"))):
        if value is not None and (trajectory_id := _id_or_none(value)) is not None:
            return trajectory_id, False
    return None, False


def _body_forms(
    body: Mapping[str, Any], metadata: Mapping[str, Any], context: Mapping[str, Any]
) -> tuple[tuple[object, str], ...]:
    session = _object(body.get("session_params"))
    return (
        (metadata.get("trajectory_id"), "metadata.trajectory_id"),
        (context.get("program_id"), "vllm_xargs.agentic_context.program_id"),
        (body.get("program_id"), "program_id"),
        (session.get("session_id"), "session_params.session_id"),
        # SGLang's own name for it (SGLang 0.5, managers/io_struct.py).
        (session.get("id"), "session_params.id"),
        (body.get("session_id"), "session_id"),
        (metadata.get("session_id"), "metadata.session_id"),
    )


def _named(sent: Mapping[bytes, bytes], metadata: Mapping[str, Any], header: bytes, field: str) -> str | None:
    """The id in a header, else in a field of the metadata."""
    if header in sent and (name := _id(sent[header], header.decode().title())) is not None:
        return name
    return _id(metadata[field], f"metadata.{field}") if field in metadata else None


def _hints(sent: Mapping[bytes, bytes], body: Mapping[str, Any], context: Mapping[str, Any]) -> Hints:
    agent = _object(_object(body.get("nvext")).get("agent_hints"))
    return Hints(
        _first(sent.get(b"x-dynamo-request-priority"), agent.get("priority"), context.get("priority")),
        _first(sent.get(b"x-dynamo-request-strict-priority"), agent.get("strict_priority")),
    )


def _agentic_context(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """`vllm_xargs.agentic_context`, which vLLM's schema allows only as a JSON string."""
    xargs = body.get("vllm_xargs")
    if not isinstance(xargs, dict):
        return _NOTHING
    return _object(_parsed(xargs.get("agentic_context")))


def _session_of(user_id: object) -> object:
    """The session in Claude Code's `metadata.user_id`: `user_..._session_<uuid>`, since 2.1.78 a JSON string.

    Not a strong id: a session's subagents share it and run concurrently.
    """
    if not isinstance(user_id, str):
        return user_id
    if user_id.startswith("{"):
        return _object(_parsed(user_id)).get("session_id", user_id)
    _, mark, session = user_id.rpartition("_session_")
    return session if mark else user_id


_NOTHING: Mapping[str, Any] = {}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else _NOTHING


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return None


def _joined(whole: str, part: bytes | None, where: str) -> str:
    name = _id(part, where)
    return (_id(f"{whole}:{name}", where) or whole) if name else whole


def _id(value: object, where: str) -> str | None:
    """A clean id, or None if it is absent or blank. It must be ASCII because it is sent back in a header."""
    if value is None:
        return None
    if isinstance(value, bytes):
        text = value.decode("latin-1").strip()
    elif isinstance(value, str):
        text = value.strip()
    elif isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
    else:
        raise IdentityError(f"The id in {where} must be a string or an integer.")
    if len(text) > MAX_ID_LENGTH:
        raise IdentityError(f"The id in {where} is longer than {MAX_ID_LENGTH} characters.")
    if not (text.isascii() and text.isprintable()):
        raise IdentityError(f"The id in {where} has characters other than printable ASCII.")
    return text or None


def _id_or_none(value: object) -> str | None:
    """A clean weak id, else None: it is often a person's name, not meant for the gateway, so a bad one is no error."""
    try:
        return _id(value, "")
    except IdentityError:
        return None


def _first(*values: object) -> int | None:
    for value in values:
        if isinstance(value, bytes):
            value = int(value) if _INTEGER.fullmatch(value) else None
        if isinstance(value, float) and isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT:
            return value
    return None
