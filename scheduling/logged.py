"""The fields of a log line about an event or an action, for the gateway, the simulator and a replay of either."""

from typing import Any

from scheduling.types import Action, Event


def logged(at: float, kind: str, said: Event | Action) -> dict[str, Any]:
    """The fields of a line, to be encoded as JSON.

    Args:
        at: of the event, also for the actions that followed.
        kind: "event" or "action".
    """
    fields: dict[str, Any] = {"at": at, "kind": kind, "type": type(said).__name__}
    fields |= {name: getattr(said, name) for name in said.__dataclass_fields__ if name != "at"}
    if fields.get("send_at") == 0.0:
        del fields["send_at"]  # at once, as in the logs of versions that gathered nothing
    return fields
