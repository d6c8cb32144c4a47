"""Writes Parquet in pieces, returned as they are written. Only this needs pyarrow, so a gateway can do without it."""

import io
from typing import Any

import orjson

_SPAN = ("version", "string"), ("start", "int64"), ("end", "int64")
_TURN = (
    ("turn_id", "string"),
    ("model", "string"),
    ("prompt_start", "int64"),
    ("output_start", "int64"),
    ("end", "int64"),
    ("finish_reason", "string"),
    ("ended_at", "float64"),
    ("is_repeated", "bool_"),
)
_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("trajectory_id", "string"),
    ("branch", "int32"),
    ("num_branches", "int32"),
    ("group_id", "string"),
    ("rollout_id", "string"),
    ("state", "string"),
    ("reward", "float64"),
    ("reward_components", "json"),
    ("reward_metadata", "json"),
    ("metadata", "json"),
    ("finish_reason", "string"),
    ("prompt_length", "int64"),
    ("token_ids", ["int32"]),
    ("loss_mask", ["int8"]),
    ("logprobs", ["float32"]),
    ("versions", [_SPAN]),
    ("turns", [_TURN]),
    ("missing", [(("turn_id", "string"), ("why", "string"))]),
)


class ParquetFile:
    """A Parquet file of exported branches; each part is handed out once it is written.

    Raises:
        ImportError: pyarrow is not installed.
    """

    def __init__(self) -> None:
        import pyarrow
        import pyarrow.parquet

        self._arrow = pyarrow
        self._schema = pyarrow.schema([(name, self._type(kind)) for name, kind in _COLUMNS])
        self._sink = _Sink()
        self._writer = pyarrow.parquet.ParquetWriter(
            pyarrow.PythonFile(self._sink, "w"), self._schema, compression="zstd"
        )

    def add(self, rows: list[dict[str, Any]]) -> bytes:
        """Write rows as one group; returns the bytes that this added to the file."""
        if rows:
            columns = [self._column(rows, name, kind) for name, kind in _COLUMNS]
            self._writer.write_table(self._arrow.table(columns, schema=self._schema))
        return self._sink.take()

    def end(self) -> bytes:
        """The file's last bytes."""
        self._writer.close()
        return self._sink.take()

    def _column(self, rows: list[dict[str, Any]], name: str, kind: Any) -> Any:
        values = [row[name] for row in rows]
        if kind == "json":
            values = [orjson.dumps(value).decode() for value in values]
        return self._arrow.array(values, self._type(kind))

    def _type(self, kind: Any) -> Any:
        match kind:
            case "json":
                return self._arrow.string()
            case str():
                return getattr(self._arrow, kind)()
            case [inner]:
                return self._arrow.list_(self._type(inner))
            case _:
                return self._arrow.struct([(name, self._type(inner)) for name, inner in kind])


class _Sink(io.RawIOBase):
    """What pyarrow writes to: it keeps what was written since the last `take`."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: Any, /) -> int:
        self._parts.append(bytes(data))
        self._num_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self._num_bytes

    def writable(self) -> bool:
        return True

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken
