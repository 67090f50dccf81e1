"""Events of a cache, for routers, and the keys that they name."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref
from typing import Any, AsyncIterator, Iterator, List, Optional

from . import _abi as abi
from ._arguments import uint32
from ._enums import CacheEventKind
from ._handle import Closable, Handle
from ._library import check


@dataclasses.dataclass(frozen=True)
class PrefixKeys:
    """Keys of a prompt, 32 bytes each.

    The key of a step of 128 tokens is the SHA-256 of the key before it, the first time `root`, and
    of the names of the step's tokens: their ids of 4 bytes each, least significant byte first, or
    their content key.
    """

    root: bytes
    keys: List[bytes]  # one per whole 128 tokens, stored or not


@dataclasses.dataclass(frozen=True)
class CacheEvent:
    """A change of the prefixes that match_prefix finds in a cache.

    epoch, number: position of the event, for Cache.events. key: of 128 tokens and all tokens before
    them. parent: key of the 128 tokens before, or the root. token_end: tokens up to the end of the
    key's. These three are empty for CLEARED. tenant, cache: those of the cache whose events the
    reader reads.
    """

    kind: CacheEventKind
    epoch: int
    number: int
    key: bytes
    parent: bytes
    token_end: int
    tenant: str = ""
    cache: str = ""


def _event_of(event: Any, tenant: str, cache: str) -> CacheEvent:
    kind = CacheEventKind(event.kind)
    is_cleared = kind == CacheEventKind.CLEARED
    return CacheEvent(kind, event.epoch, event.number, b"" if is_cleared else bytes(event.key.bytes),
                      b"" if is_cleared else bytes(event.parent.bytes), event.token_end, tenant, cache)


class CacheEvents(Closable):
    """Reader of the events of a cache; made by Cache.events. For one thread at a time.

    Iterating waits for the next event, for as long as it takes; `async for` awaits it.
    """

    _LONGEST_WAIT_MS = 1000  # of the thread that waits for next_async: it delays the program's end

    def __init__(self, library: Any, client: Handle, events: int, tenant: str, cache: str) -> None:
        self._tenant, self._cache = tenant, cache
        self._library = library
        self._thread: Optional[ThreadPoolExecutor] = None  # calls next() for next_async
        self._wait: "Optional[Future[List[CacheEvent]]]" = None  # that thread's call
        self._taken: List[CacheEvent] = []  # of that call, not returned by next_async yet
        self._own(Handle("events", events, library.pqc_cache_events_close, client), at_exit=False)

    def next(self, timeout_ms: int = 1000, capacity: int = 256) -> List[CacheEvent]:
        """Waits for events, at most timeout_ms (0 = takes what has arrived). Returns at most
        `capacity` of them, none if there are none by then.

        Raises NotFound (the cache was dropped), ResourceExhausted (16 readers of the tenant are
        open, or 1024 of all), Unavailable with a retry time (no worker answered in time), and
        Unimplemented (the sidecar is older). After an error, the next call continues behind the
        last event.
        """
        timeout, room = uint32("timeout_ms", timeout_ms), uint32("capacity", capacity)
        out, count = (abi.CacheEvent * max(room, 1))(), ctypes.c_uint32()
        with self._handle as events:
            check(self._library.pqc_cache_events_next(events, timeout, out, room, byref(count)))
        return [_event_of(event, self._tenant, self._cache) for event in out[:count.value]]

    def __iter__(self) -> Iterator[CacheEvent]:
        while True:
            yield from self.next()

    async def next_async(self, timeout_ms: int = 1000, capacity: int = 256) -> List[CacheEvent]:
        """Awaits events as next() waits for them, with the same arguments and errors; for any
        asyncio loop. One call at a time, and no next() beside it.

        A cancelled call loses no event: the next call returns those that came meanwhile.
        """
        end = time.monotonic() + uint32("timeout_ms", timeout_ms) / 1000
        while not self._taken:
            left_ms = max(0, int(1000 * (end - time.monotonic())))
            if self._wait is None:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "pqcached-events")
                self._wait = self._thread.submit(self.next, min(left_ms, self._LONGEST_WAIT_MS), capacity)
                limit = None  # next() ends in time
            else:
                limit = left_ms / 1000  # the wait of a cancelled call
            wait = self._wait
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(wait)), limit)
            except asyncio.TimeoutError:
                pass
            finally:
                if wait.done():
                    self._wait = None
                    if wait.exception() is None:
                        self._taken = wait.result()
            if left_ms == 0:
                break
        events, self._taken = self._taken[:capacity], self._taken[capacity:]
        return events

    async def __aiter__(self) -> AsyncIterator[CacheEvent]:
        while True:
            for event in await self.next_async():
                yield event
