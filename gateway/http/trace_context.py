"""The trace that a request belongs to, as its engine is told: W3C Trace Context, https://www.w3.org/TR/trace-context/."""

import re
from collections.abc import Mapping

from gateway.http.client import Headers

_PARENT, _STATE = b"traceparent", b"tracestate"
_VALID_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# The length that every party must pass on; a longer state may be left out.
_VALID_STATE = re.compile(rb"[\x20-\x7e]{1,512}")


def trace_of(headers: Mapping[bytes, bytes]) -> Headers:
    """The header lines that name a request's trace, as its client sent them; none if it names none, or a malformed one.

    Args:
        headers: names in lower case.
    """
    parent = headers.get(_PARENT)
    if parent is None or not _VALID_PARENT.fullmatch(parent):
        return b""
    state = headers.get(_STATE, b"")
    lines = b"%b: %b\r\n" % (_PARENT, parent)
    return lines + b"%b: %b\r\n" % (_STATE, state) if _VALID_STATE.fullmatch(state) else lines
