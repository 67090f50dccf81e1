"""Calls that a coroutine awaits, and a client's events, over its event descriptor.

The library makes such a call on a thread of its own. Its end is an event; the loop of the coroutine
watches the client's descriptor for as long as an operation that began in it is in progress.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import threading
from ctypes import byref
from typing import Any, AsyncIterator, Callable, Dict, List, Optional, Tuple

from . import _abi as abi
from ._arguments import uint32, uint64
from ._arrays import ArrayLike
from ._enums import EventKind
from ._errors import FailedPrecondition
from ._handle import Closable, Handle
from ._library import check, error_of
from ._load import layer_targets, token_range
from ._names import TokenNames, pointer_to, row_options
from ._options import BuildProgress, Index, from_c
from ._steps import LayerArrays, layer_rows


_calling = threading.local()  # `progress` is set while this thread runs a callback of a build


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that has happened to a client, apart from the ends of operations."""

    kind: EventKind
    sequence_id: int = 0  # Sequence.id; 0 for events of the session


class _Pending:
    """An operation that is in progress, and what must live until its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kept: Any, raised: List[BaseException]) -> None:
        self.loop, self.kept, self.raised = loop, kept, raised
        self.future: "asyncio.Future[None]" = loop.create_future()

    def settle(self, error: Optional[BaseException]) -> None:
        """Runs in the loop."""
        if self.future.done():  # the coroutine was cancelled
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class _Listener:
    """Events that one iteration has not taken yet; those of one subject coalesce."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.events: Dict[Event, None] = {}
        self.closed = False
        self.changed = asyncio.Event()

    def put(self, event: Optional[Event]) -> None:
        """Runs in the loop. None: the client is closed."""
        if event is None:
            self.closed = True
        else:
            self.events[event] = None
        self.changed.set()


class Operations:
    """The operations of one client that coroutines await. Thread-safe."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._client: Optional[Handle] = None
        # Reentrant, because the garbage collector may close a client.
        self._lock = threading.RLock()
        self._pending: Dict[int, _Pending] = {}  # by the operation's address
        self._listeners: List[_Listener] = []
        self._watchers: Dict[asyncio.AbstractEventLoop, int] = {}  # what each loop watches for
        self._fd = -1

    def attach(self, client: Handle) -> None:
        self._client = client

    def event_fd(self) -> int:
        assert self._client is not None
        fd = ctypes.c_int(-1)
        with self._client as client:
            check(self._library.pqc_client_event_fd(client, byref(fd)))
        self._fd = fd.value
        return self._fd

    # ---- Loops

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in the loop."""
        fd = self.event_fd()
        with self._lock:
            for other in [other for other in self._watchers if other.is_closed()]:
                del self._watchers[other]
            self._watchers[loop] = self._watchers.get(loop, 0) + 1
            first = self._watchers[loop] == 1
        if first:
            loop.add_reader(fd, self._dispatch)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in the loop."""
        with self._lock:
            left = self._watchers.get(loop, 0) - 1
            if left > 0:
                self._watchers[loop] = left
            else:
                self._watchers.pop(loop, None)
        if left == 0:
            loop.remove_reader(self._fd)

    @staticmethod
    def _run_in(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            running: Optional[asyncio.AbstractEventLoop] = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is loop:
            function(*arguments)
            return
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed, and nothing waits in it any more
            pass

    def _dispatch(self) -> None:
        """Takes all pending events."""
        try:
            event = self.next_event()
            while event is not None:
                for listener in list(self._listeners):
                    self._run_in(listener.loop, listener.put, event)
                event = self.next_event()
        except FailedPrecondition:  # the client is being closed, which ends everything
            pass

    # ---- Operations

    async def run(self, begin: Callable[[Any], int], kept: Any, raised: Optional[List[BaseException]] = None) -> None:
        """Awaits the operation that `begin` makes, given where its handle goes. Keeps `kept` alive
        until the operation has ended. An exception in `raised` takes the place of its status.
        """
        loop = asyncio.get_running_loop()
        pending, handle = _Pending(loop, kept, [] if raised is None else raised), ctypes.c_void_p()
        self._watch(loop)
        with self._lock:  # so that the event of its end finds it
            status = begin(byref(handle))
            error = error_of(status) if status else None
            if error is None:
                assert handle.value
                self._pending[handle.value] = pending
        if error is not None:
            self._unwatch(loop)
            raise error
        try:
            await pending.future
        except asyncio.CancelledError:
            with self._lock:
                if handle.value in self._pending:  # otherwise the handle is closed
                    self._library.pqc_operation_cancel(handle)
            raise

    def _finish(self, handle: int, pending: _Pending) -> None:
        done = ctypes.c_uint32()
        status = self._library.pqc_operation_poll(handle, byref(done))
        error: Optional[BaseException] = error_of(status) if status else None
        self._library.pqc_operation_close(handle, 0)
        if pending.raised:
            error = pending.raised[0]
        self._run_in(pending.loop, pending.settle, error)
        self._run_in(pending.loop, self._unwatch, pending.loop)

    def next_event(self) -> Optional[Event]:
        """Takes the next event that is not the end of an awaited operation."""
        assert self._client is not None
        with self._client as client:
            while True:
                event = abi.Event()
                with self._lock:
                    check(self._library.pqc_client_next_event(client, byref(event)))
                    pending = self._pending.pop(event.operation, None) if event.operation else None
                if event.kind == EventKind.NONE:
                    return None
                if pending is not None:
                    self._finish(event.operation, pending)
                elif event.kind != EventKind.OPERATION:
                    return Event(EventKind(event.kind), event.sequence_id)

    async def events(self) -> AsyncIterator[Event]:
        listener = _Listener(asyncio.get_running_loop())
        self._watch(listener.loop)
        self._listeners.append(listener)
        try:
            while True:
                while listener.events:
                    event = next(iter(listener.events))
                    del listener.events[event]
                    yield event
                if listener.closed:
                    return
                listener.changed.clear()
                await listener.changed.wait()
        finally:
            self._listeners.remove(listener)
            self._unwatch(listener.loop)

    def close_client(self, client: int) -> None:
        """Closes the client's handle, which ends all operations."""
        if getattr(_calling, "progress", False):  # the library would wait for this very thread
            threading.Thread(target=self._close_client, args=(client,), name="pqcached-close").start()
        else:
            self._close_client(client)

    def _close_client(self, client: int) -> None:
        with self._lock:
            loops = list(self._watchers)
            self._watchers.clear()
        for loop in loops:  # before the descriptor is closed, where that is this thread's loop
            self._run_in(loop, loop.remove_reader, self._fd)
        self._library.pqc_client_close(client)
        with self._lock:
            ended, self._pending = self._pending, {}
        for handle, pending in ended.items():
            self._finish(handle, pending)
        for listener in list(self._listeners):
            self._run_in(listener.loop, listener.put, None)


class EventSource(Closable):
    """The events of a Client."""

    _operations: Operations

    def event_fd(self) -> int:
        """Returns a descriptor that is readable while events are pending, for loops other than
        asyncio's: they call next_event() until it returns None. It belongs to the client.
        """
        return self._operations.event_fd()

    def next_event(self) -> Optional[Event]:
        """Takes the oldest pending event and never waits; None when there is none."""
        return self._operations.next_event()

    def events(self) -> AsyncIterator[Event]:
        """Iterates over the events from now on, in a coroutine, until the client is closed:
        `async for event in client.events()`. On the local path: revoked and suspended sequences,
        new workers, and the end of the session.
        """
        return self._operations.events()


class AsyncCalls(Closable):
    """The calls on a Sequence that a coroutine awaits. They raise what the plain calls raise.

    They work with every asyncio loop that has add_reader. While one that changes the sequence is in
    progress, other changes and steps raise Aborted; a build permits both once it is running. When
    the awaiting task is cancelled, so is the operation: a build at its next codebook, an ingest
    or a load between two layers. Arrays are then still being read for a while.
    """

    _library: Any
    _operations: Operations

    async def flush_async(self) -> None:
        """Like flush()."""
        def begin(operation: Any) -> int:
            with self._handle as sequence:
                return int(self._library.pqc_sequence_flush_begin(sequence, None, operation))

        await self._operations.run(begin, None)

    async def ingest_async(self, first_position: int, layers: LayerArrays, *,
                           names: Optional[TokenNames] = None) -> None:
        """Stores the rows of several layers from `first_position` on, one layer after the other, each
        as a whole or not at all.

        layers: layer -> (keys, values), shaped as in ingest(). The arrays are read in place and kept
        alive until the operation has ended; they must not change until then. names: of any tokens of
        the sequence.
        """
        rows, held = layer_rows(layers)
        options, first = row_options(names), uint64("first_position", first_position)

        def begin(operation: Any) -> int:
            with self._handle as sequence:
                return int(self._library.pqc_ingest_begin(sequence, first, rows, len(rows), pointer_to(options), None,
                                                          operation))

        await self._operations.run(begin, held)

    async def load_async(self, tokens: Tuple[int, int], layers: LayerArrays) -> None:
        """Like load(). The arrays are written until the operation has ended."""
        rows, held = layer_targets(layers)
        chosen = token_range(tokens)

        def begin(operation: Any) -> int:
            with self._handle as sequence:
                return int(self._library.pqc_load_begin(sequence, chosen, rows, len(rows), None, operation))

        await self._operations.run(begin, held)

    async def build_index_async(self, index: Index = Index(), *, iterations: int = 0, seed: int = 0,
                                train_tokens: int = 0, sink_tokens: int = 0, timeout_ms: int = 0, rebuild: bool = False, rebuild_drift: float = 0.0, rebuild_tokens: int = 0,
                                progress: Optional[Callable[[BuildProgress], Optional[bool]]] = None) -> None:
        """Like build_index(); progress is called on a thread of the library."""
        options, raised = build_options(index, iterations, seed, train_tokens, sink_tokens, timeout_ms, rebuild, rebuild_drift, rebuild_tokens, progress)

        def begin(operation: Any) -> int:
            with self._handle as sequence:
                return int(self._library.pqc_build_index_begin(sequence, byref(options), None, operation))

        await self._operations.run(begin, options, raised)


def build_options(index: Index, iterations: int, seed: int, train_tokens: int, sink_tokens: int, timeout_ms: int,
                  rebuild: bool, rebuild_drift: float, rebuild_tokens: int, progress: Optional[Callable[[BuildProgress], Optional[bool]]]) -> Tuple[Any, List[BaseException]]:
    """Returns the options of a build, and the list that receives an exception of `progress`, which
    ends the build.
    """
    raised: List[BaseException] = []

    def call(_: Any, pointer: Any) -> int:
        assert progress is not None
        _calling.progress = True
        try:
            return 0 if progress(from_c(BuildProgress, pointer.contents)) is False else 1
        except BaseException as error:  # KeyboardInterrupt too: no exception may pass through C
            raised.append(error)
            return 0
        finally:
            _calling.progress = False

    options = abi.BuildOptions(
        index=index.c(), iterations=uint32("iterations", iterations), seed=uint64("seed", seed),
        train_tokens=uint64("train_tokens", train_tokens), sink_tokens=uint64("sink_tokens", sink_tokens),
        timeout_ms=uint32("timeout_ms", timeout_ms), rebuild=bool(rebuild), rebuild_drift=float(rebuild_drift),
        rebuild_tokens=uint64("rebuild_tokens", rebuild_tokens))
    if progress is not None:
        options.callback = abi.BuildCallback(call)
    return options, raised
