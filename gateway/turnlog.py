"""Logs as JSON lines: one per turn at its end, and what an operator must know. No keys, no bodies."""

import asyncio
import logging
import sys
import time
from typing import Any

import orjson

LOGGER = logging.getLogger("heddle")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of `extra={"fields": ...}`.

    A record with an attribute `lines` becomes those lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        lines: str | None = getattr(record, "lines", None)
        if lines is not None:
            return lines
        line: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to_stderr(level: str) -> None:
    """Send this process's logs to standard error as JSON lines."""
    # No line names its thread or process, and finding them costs a microsecond per line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


_TURN = b',"level":"info","logger":"%b","message":"turn",' % LOGGER.name.encode()


class TurnLog:
    """Writes the line of each turn. Lines of one pass of the event loop are written together, which halves their
    cost.
    """

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def turn(self, trajectory_id: str, rollout_id: str | None, row: bytes) -> None:
        """A turn ended; `row` is the JSON object that its history shows."""
        if LOGGER.isEnabledFor(logging.INFO):
            if not self._lines:
                asyncio.get_running_loop().call_soon(self._write)
            whose = orjson.dumps({"at": time.time(), "trajectory_id": trajectory_id, "rollout_id": rollout_id})
            self._lines.append(whose[:-1] + _TURN + row[1:])

    def _write(self) -> None:
        # As LOGGER.info, but without searching the stack for the code location, which no line shows.
        record = logging.LogRecord(LOGGER.name, logging.INFO, "", 0, "turn", (), None)
        record.lines = b"\n".join(self._lines).decode()
        self._lines.clear()
        LOGGER.handle(record)

    def broken_off(self, request_id: str, why: str) -> None:
        """An answer other than a turn's ended in the middle, through no defect."""
        LOGGER.warning("answer broken off", extra={"fields": {"request_id": request_id, "why": why}})

    def defect(self, turn_id: str) -> None:
        """The exception being handled is a defect of the gateway."""
        LOGGER.exception("defect", extra={"fields": {"turn_id": turn_id}})
