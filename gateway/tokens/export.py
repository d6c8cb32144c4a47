"""A rollout's branches as a file, made while it is sent, one trajectory after the other: JSON lines or Parquet."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import orjson

from gateway.state.ledger import Entry
from gateway.tokens.book import TokenBook
from gateway.tokens.branches import records
from gateway.tokens.parquet import ParquetFile

GROUP_TOKENS = 2**20
"""For one row group in Parquet: some 10 MB in memory, whose columns are compressed together."""
_ENTRY_TOKENS = 100
"""A record takes as much memory as so many tokens even if it has none, and so does each turn that it names."""


_SEPARATORS = tuple((one.encode(), f"\\u{ord(one):04x}".encode()) for one in "\u0085\u2028\u2029")
"""What ends a line to many readers, though not in JSON lines, and how JSON writes it in a text."""


async def rows(entries: Iterable[Entry], book: TokenBook) -> AsyncIterator[dict[str, Any]]:
    """The records of all branches. Raises StoreError."""
    for entry in entries:
        for record in records(entry, await book.turns(entry.record.trajectory_id)):
            yield record
            await asyncio.sleep(0)  # turns are served meanwhile: a branch of 100,000 tokens takes 15 ms


async def jsonl(entries: Iterable[Entry], book: TokenBook) -> AsyncIterator[bytes]:
    """One line for each branch. Raises StoreError."""
    async for row in rows(entries, book):
        line = orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        for separator, written in _SEPARATORS:
            line = line.replace(separator, written)
        yield line


async def parquet(file: ParquetFile, entries: Iterable[Entry], book: TokenBook) -> AsyncIterator[bytes]:
    """One row for each branch. Raises StoreError."""
    group: list[dict[str, Any]] = []
    num_tokens = 0
    async for row in rows(entries, book):
        group.append(row)
        num_tokens += len(row["token_ids"]) + _ENTRY_TOKENS * (1 + len(row["turns"]) + len(row["missing"]))
        if num_tokens >= GROUP_TOKENS:
            yield await asyncio.to_thread(file.add, group)
            group, num_tokens = [], 0
    yield await asyncio.to_thread(file.add, group)
    yield file.end()
