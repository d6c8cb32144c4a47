"""The Redis store: the record of a gateway on a server that outlives its machine. Redis 6.2 or later, not Cluster.

How it writes: puts coalesce in memory per trajectory. A flusher sends them as numbered batches as soon as there are
any; puts made while one batch is being sent form the next. A batch is one script, so it is applied as a whole. The
server keeps the number of the last batch, so each is applied once, however often it is sent.

What that number tells:
- the same number: the reply to an earlier attempt was lost, and nothing is left to do;
- another writer: a later process owns the record, and this one stops writing;
- a gap, an earlier writer or nothing: the server came back with less than it had confirmed, so the owner is asked to
  put everything again. Each trajectory is replaced by what is put of it; those that were not put, and pieces of no
  trajectory, go just after that: a kill before then leaves more than there should be, not less.
  The same happens when puts had to be dropped. The server remembers the loss until then, because the reply that reports
  it may be lost as well. While nothing is put, the last number is sent with an empty batch; then a lower number is a
  gap, too.

Of two writers, the later one is the one that claimed the record later, by the server's clock. A claim is always later
than the one that it finds, because the server may have been replaced by one whose clock is behind.

Keys, after the namespace: `records` (hash: trajectory id to JSON; also the index), `turns:ID` (list of JSON), `answers`
(hash), `pieces:ID` (hash), `sizes` (hash: trajectory id to bytes of its pieces), `states` (hash), `owner` (hash:
format, writer, claimed_at, batch, lost), `rewritten` (set, while everything is put again: trajectory ids). Nothing
expires: the owner forgets what has ended. The server should not evict (`maxmemory-policy noeviction`) and is as durable
as its own persistence makes it.
"""

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson

from store.pending import Operation, Pending, forgotten_first
from store.port import Json, StoreAway, StoreCorrupt, StoredTrajectory, StoreError, StoreFenced, StoreHealth, encoded
from store.redis_client import FAULTS, asked, is_full, let_go, mode_of, place_of, redis_client, refused
from store.settings import StoreSettings

FORMAT = b"1"

FIRST_BATCH = 1
"""The number that a claim leaves on the server. A server without data counts as -1, so the two never match."""

CLAIM = """
local owner, time = ARGV[1] .. 'owner', redis.call('TIME')
local last = tonumber(redis.call('HGET', owner, 'claimed_at') or 0)
local claimed_at = string.format('%.0f', math.max(time[1] * 1000000 + time[2], last + 1))
redis.call('DEL', ARGV[1] .. 'rewritten')
redis.call('HSET', owner, 'format', '1', 'writer', ARGV[2], 'claimed_at', claimed_at, 'batch', ARGV[3], 'lost', '0')
return claimed_at
"""

APPLY = """
local prefix, writer, claimed_at, number, max_turns = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local records, answers, states, owner = prefix .. 'records', prefix .. 'answers', prefix .. 'states', prefix .. 'owner'
local sizes, rewritten = prefix .. 'sizes', prefix .. 'rewritten'
local known = redis.call('HMGET', owner, 'writer', 'batch', 'lost', 'claimed_at')
local is_ours = known[1] == writer
if known[1] and not is_ours and tonumber(known[4] or 0) >= tonumber(claimed_at) then return 'fenced' end
local last, was_lost = is_ours and tonumber(known[2]) or -1, known[3] == '1'
if last == number then return was_lost and 'lost' or 'ok' end
local is_lost = last ~= number - 1 or #ARGV == 5
for i = 6, #ARGV, 4 do
  local operation, id, value, part = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local turns, pieces = prefix .. 'turns:' .. id, prefix .. 'pieces:' .. id
  if operation == 'record' then
    redis.call('HSET', records, id, value)
  elseif operation == 'turn' then
    redis.call('HSETNX', records, id, '{}')
    redis.call('RPUSH', turns, value)
    redis.call('LTRIM', turns, -max_turns, -1)
  elseif operation == 'answer' then
    redis.call('HSET', answers, id, value)
  elseif operation == 'state' then
    redis.call('HSET', states, id, value)
  elseif operation == 'piece' then
    if redis.call('HSETNX', pieces, part, value) == 1 then redis.call('HINCRBY', sizes, id, #value) end
  elseif operation == 'drop' then
    for _, name in ipairs(redis.call('HKEYS', pieces)) do
      if string.sub(name, 1, #part) == part then
        redis.call('HINCRBY', sizes, id, -redis.call('HSTRLEN', pieces, name))
        redis.call('HDEL', pieces, name)
      end
    end
    if redis.call('EXISTS', pieces) == 0 then redis.call('HDEL', sizes, id) end
  elseif operation == 'forget' then
    redis.call('HDEL', records, id)
    redis.call('HDEL', answers, id)
    redis.call('HDEL', sizes, id)
    redis.call('DEL', turns, pieces)
  elseif operation == 'rewrite' then
    redis.call('DEL', rewritten)
    was_lost = false
  elseif operation == 'replace' then
    redis.call('HDEL', records, id)
    redis.call('HDEL', answers, id)
    redis.call('DEL', turns)
    redis.call('SADD', rewritten, id)
  elseif operation == 'sweep' then
    for _, each in ipairs(redis.call('HKEYS', records)) do
      if redis.call('SISMEMBER', rewritten, each) == 0 then
        redis.call('HDEL', records, each)
        redis.call('HDEL', answers, each)
        redis.call('DEL', prefix .. 'turns:' .. each)
      end
    end
    redis.call('DEL', rewritten)
    for _, each in ipairs(redis.call('HKEYS', sizes)) do
      if redis.call('HEXISTS', records, each) == 0 then
        redis.call('DEL', prefix .. 'pieces:' .. each)
        redis.call('HDEL', sizes, each)
      end
    end
  end
end
is_lost = is_lost or was_lost
redis.call('HSET', owner, 'format', '1', 'writer', writer, 'claimed_at', claimed_at, 'batch', number,
  'lost', is_lost and '1' or '0')
return is_lost and 'lost' or 'ok'
"""

_Read = tuple[list[bytes | None], list[bytes | None], list[list[bytes]]]

FENCED = "another process has taken over this namespace: this one writes no more; give each fleet its own"


class RedisStore:
    """A Store on a Redis server, behind a queue in memory."""

    def __init__(self, url: str, settings: StoreSettings) -> None:
        self._settings = settings
        self._where = place_of(url)
        self._redis = redis_client(url, settings)
        self._pending = Pending(settings)
        self._outbox: deque[tuple[int, list[Operation]]] = deque()
        self._outbox_since = 0.0
        self._outbox_len = 0
        self._writer = uuid.uuid4().hex
        self._claimed_at = b""
        self._batch_number = FIRST_BATCH
        self._num_puts_sent = self._num_puts_confirmed = 0
        self._rewrite: Callable[[], None] | None = None
        self._lost = False
        self._num_losses = self._num_drops_seen = 0
        self._fault = "not connected yet"
        self.is_fenced = False
        self._progress: asyncio.Future[None]
        self._flusher: asyncio.Task[None]

    async def open(self) -> None:
        self._progress = asyncio.get_running_loop().create_future()
        try:
            await self._claim()
            self._fault = ""
        except StoreError:
            await self._redis.aclose()
            raise
        except FAULTS as fault:
            if refused(fault):
                await self._redis.aclose()
                raise self._unread(fault) from None
            self._fault = self._away(fault)
        self._flusher = asyncio.create_task(self._flush_forever(), name="store-flusher")

    async def load(self) -> list[StoredTrajectory]:
        await self._settle_or_raise()
        found: list[StoredTrajectory] = []
        at_once = self._settings.load_batch
        ahead: asyncio.Task[_Read] | None = None
        try:
            ids: list[Any] = await asked(self._redis.hkeys(self._key("records")))
            parts = [ids[start : start + at_once] for start in range(0, len(ids), at_once)]
            for number, some in enumerate(parts):
                records, answers, turns = await (ahead or self._read(some))
                # The server sends the next part while this one is parsed.
                ahead = asyncio.create_task(self._read(parts[number + 1])) if number + 1 < len(parts) else None
                await asyncio.sleep(0)  # so that its request is sent now
                for trajectory_id, record, answer, of_it in zip(some, records, answers, turns, strict=True):
                    if record is not None:
                        as_dict, history = orjson.loads(b"[%b,[%b]]" % (record, b",".join(of_it)))
                        found.append(StoredTrajectory(str(trajectory_id, "utf-8"), as_dict, history, answer))
        except FAULTS as fault:
            raise self._unread(fault) from fault
        except orjson.JSONDecodeError as fault:
            raise StoreCorrupt(f"Redis at {self._where} holds records that are no JSON: {fault}") from fault
        finally:
            if ahead is not None:
                ahead.cancel()
        return found

    async def _read(self, ids: list[Any]) -> _Read:
        """Records, answers and turns of these trajectories. A script that joins them takes the server longer."""
        num_turns, turns = self._settings.max_turns_kept, self._key("turns:").encode()
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(self._key("records"), ids)
            pipe.hmget(self._key("answers"), ids)
            for trajectory_id in ids:
                pipe.lrange(turns + trajectory_id, -num_turns, -1)
            records, answers, *of_each = await asked(pipe.execute())
        return records, answers, of_each

    def on_loss(self, rewrite: Callable[[], None]) -> None:
        self._rewrite = rewrite

    def put_trajectory(self, trajectory_id: str, record: Json, answer: bytes | None = None) -> None:
        self._pending.put_trajectory(trajectory_id, encoded(record), answer)

    def append_turn(self, trajectory_id: str, turn: Json) -> None:
        self._pending.append_turn(trajectory_id, encoded(turn))

    def forget_trajectory(self, trajectory_id: str) -> None:
        self._pending.forget_trajectory(trajectory_id)

    def put_piece(self, trajectory_id: str, name: str, data: bytes) -> None:
        self._pending.put_piece(trajectory_id, name, data)

    def drop_pieces(self, trajectory_id: str, prefix: str = "") -> None:
        self._pending.drop_pieces(trajectory_id, prefix)

    async def get_pieces(self, trajectory_id: str, prefix: str = "") -> dict[str, bytes]:
        found = await self._reply(self._redis.hgetall, self._key("pieces:") + trajectory_id)
        pieces = {str(name, "utf-8"): data for name, data in found.items()}
        return {name: data for name, data in pieces.items() if name.startswith(prefix)}

    async def piece_sizes(self) -> dict[str, int]:
        found = await self._reply(self._redis.hgetall, self._key("sizes"))
        return {str(trajectory_id, "utf-8"): int(num_bytes) for trajectory_id, num_bytes in found.items()}

    def put_state(self, name: str, value: bytes) -> None:
        self._pending.put_state(name, value)

    async def get_state(self, name: str) -> bytes | None:
        value = await self._reply(self._redis.hget, self._key("states"), name)
        return None if value is None else bytes(value)

    def when_settled(self, call: Callable[[], None]) -> bool:
        return False  # the network always takes longer

    async def settle(self, timeout_s: float) -> bool:
        return await self._confirmed(timeout_s, lambda: bool(self._fault))

    def health(self) -> StoreHealth:
        since = self._outbox_since if self._outbox else self._pending.since
        return StoreHealth(
            ok=not self._fault,
            detail=self._fault or f"Redis at {self._where}",
            num_pending=len(self._pending) + self._outbox_len,
            lag_s=time.monotonic() - since if since else 0.0,
            num_dropped=self._pending.num_dropped,
            num_losses=self._num_losses,
        )

    async def close(self) -> None:
        # A server that is away may come back in time: a restart takes it a second.
        await self._confirmed(self._settings.close_timeout_s, self._flusher.done)
        self._flusher.cancel()
        await asyncio.wait((self._flusher,))
        await self._redis.aclose()

    async def _confirmed(self, timeout_s: float, is_hopeless: Callable[[], bool]) -> bool:
        """Wait until everything put so far is in the record; False after `timeout_s`, or once this is hopeless."""
        wanted = self._pending.num_puts
        ends_at = time.monotonic() + timeout_s
        while self._num_puts_confirmed < wanted:
            left_s = ends_at - time.monotonic()
            if is_hopeless() or left_s <= 0:
                return False
            await asyncio.wait({self._progress}, timeout=left_s)
        return True

    async def _reply(self, command: Callable[..., Any], *names: str) -> Any:
        """The reply to a command that is sent once all puts are there."""
        await self._settle_or_raise()
        try:
            return await asked(command(*names))
        except FAULTS as fault:
            raise self._unread(fault) from fault

    async def _settle_or_raise(self) -> None:
        is_settled = await self.settle(self._settings.op_timeout_s)
        if self.is_fenced:
            raise StoreFenced(self._fault)
        if not is_settled or self._fault:
            raise StoreAway(self._fault or f"Redis at {self._where} does not keep up")

    async def _flush_forever(self) -> None:
        backoff_s = self._settings.backoff_min_s
        while True:
            try:
                if not self._fault:
                    await self._wait_for_work()
                await self._flush()
                self._fault = ""
                backoff_s = self._settings.backoff_min_s
            except FAULTS as fault:
                self._fault = self._away(fault)
                if is_full(fault):
                    self._forget_first()
                await let_go(self._redis)
            except StoreError as fault:
                self._fault, self.is_fenced = str(fault), isinstance(fault, StoreFenced)
                self._tell_waiters()
                return
            self._tell_waiters()
            if self._fault:
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, self._settings.backoff_max_s)

    async def _wait_for_work(self) -> None:
        if not self._pending.wanted.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.check_every_s):
                    await self._pending.wanted.wait()

    def _tell_waiters(self) -> None:
        self._progress.set_result(None)
        self._progress = asyncio.get_running_loop().create_future()

    async def _flush(self) -> None:
        """Write everything put so far to the record; with nothing to send, check that it is still there.

        Safe to repeat after a fault: unconfirmed batches stay in the outbox under their numbers.
        """
        if not self._claimed_at:
            await self._claim()
        if not self._outbox:
            self._fill_outbox()
        if not self._outbox:
            await self._send(self._batch_number, [])
        while self._outbox:
            await self._send(*self._outbox[0])
            self._outbox.popleft()
        self._outbox_len = 0
        if self._lost or self._pending.num_dropped > self._num_drops_seen:
            self._heal()
        else:
            self._num_puts_confirmed = self._num_puts_sent

    def _fill_outbox(self) -> None:
        self._outbox_since, self._outbox_len = self._pending.since, len(self._pending)
        self._num_puts_sent = self._pending.num_puts
        for batch in self._pending.take():
            self._batch_number += 1
            self._outbox.append((self._batch_number, batch))

    def _forget_first(self) -> None:
        """Send what is to be forgotten before all else: a full server still deletes, and needs the room."""
        if not self._outbox:
            return
        batches = [batch for _, batch in self._outbox]
        if first := forgotten_first(batches, self._pending.take_forgotten()):
            # The batch that it refused was not applied, so its number is free.
            self._outbox = deque(enumerate(first, self._outbox[0][0]))
            self._batch_number += 1

    async def _send(self, number: int, batch: list[Operation]) -> None:
        words = [word for operation in batch for word in operation]
        max_turns = self._settings.max_turns_kept
        verdict = await self._eval(APPLY, self._writer, self._claimed_at, number, max_turns, *words)
        if verdict == b"fenced":
            raise StoreFenced(f"Redis at {self._where}: {FENCED}")
        self._lost = self._lost or verdict == b"lost"

    def _heal(self) -> None:
        self._lost, self._num_drops_seen = False, self._pending.num_dropped
        self._num_losses += 1
        if self._rewrite:
            self._pending.replace_all(self._rewrite)

    async def _claim(self) -> None:
        """Become the writer of this namespace. Safe to repeat: no batch is sent before the claim."""
        mode = await mode_of(self._redis)
        if mode != "standalone":
            raise StoreError(f"Redis at {self._where} is a {mode}; the store must be a single server")
        owner = self._key("owner")
        known = await asked(self._redis.hget(owner, "format"))
        if known not in (None, FORMAT):
            raise StoreCorrupt(
                f"Redis at {self._where}: {owner} has format {known!r}, this program reads {FORMAT!r}; "
                "start the version that wrote it, or choose another namespace"
            )
        self._claimed_at = await self._eval(CLAIM, self._writer, FIRST_BATCH)

    async def _eval(self, script: str, *arguments: Any) -> Any:
        return await asked(self._redis.eval(script, 0, self._settings.namespace, *arguments))

    def _key(self, name: str) -> str:
        return self._settings.namespace + name

    def _unread(self, fault: Exception) -> StoreError:
        what = refused(fault)
        return StoreError(f"Redis at {self._where} refuses {what}: {fault}") if what else StoreAway(self._away(fault))

    def _away(self, fault: BaseException) -> str:
        return f"Redis at {self._where} is away: {type(fault).__name__}: {fault}"
