"""Handles of the C ABI that may be closed at any time, from any thread, in any order.

The library does not permit closing a handle during a call on it, and a call on a sequence uses its
client too. So calls are counted, on the handle and on its client's, and a handle that is closed
during a call is released when the call ends.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any, Callable, Optional, Type, TypeVar

from ._errors import FailedPrecondition
from ._library import clear_error_text, keep_error_text, library

_forks = 0  # a child must neither use nor close its parent's handles


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Handle:
    """Wraps a pointer; `with handle as pointer:` counts a call. Thread-safe."""

    __slots__ = ("_what", "_pointer", "_close", "_root", "_lock", "_forks", "_calls", "_closed", "_taken",
                 "_giving_back")

    def __init__(self, what: str, pointer: int, close: Callable[[int], Any], client: Optional["Handle"] = None) -> None:
        self._what, self._pointer, self._close = what, pointer, close
        self._root: "Handle" = client._root if client is not None else self
        # Reentrant, because the garbage collector may close a handle in the thread that holds the
        # lock. Such a close leaves the counts as they were.
        self._lock: Any = client._lock if client is not None else threading.RLock()
        self._forks = _forks
        self._calls = 0
        self._closed = False
        self._taken = False
        self._giving_back = threading.RLock()  # held from _take to the end of _release

    @property
    def closed(self) -> bool:
        return self._closed or self._root._closed

    def __enter__(self) -> int:
        clear_error_text()
        if self._forks != _forks:
            raise FailedPrecondition(f"{self._what}: opened before a fork; a child needs its own client")
        root = self._root
        with self._lock:
            if self._closed:
                raise FailedPrecondition(f"{self._what}: it is closed")
            if root._closed:
                raise FailedPrecondition("client: it is closed")
            self._calls += 1
            if root is not self:
                root._calls += 1
        return self._pointer

    def __exit__(self, *_: Any) -> None:
        self._end_call()

    def _end_call(self) -> None:
        root = self._root
        with self._lock:
            self._calls -= 1
            own = self._take()
            if not own and root is not self:  # otherwise _release ends the call on the client
                root._calls -= 1
            clients = not own and root is not self and root._take()
        if own:
            self._release()
        if clients:
            root._release()

    def _take(self) -> bool:
        """Returns True, once, when the caller must release the handle now. The caller holds the
        lock.
        """
        if not self._closed or self._calls or self._taken:
            return False
        self._taken = True
        self._giving_back.acquire()
        return True

    def shut(self) -> bool:
        """Prevents further calls, for a call of the library that frees the handle. To be called inside
        `with`. Returns False when another call is in flight, or the handle is closed.
        """
        with self._lock:
            if self._closed or self._calls > 1:
                return False
            self._closed = True
            return True

    def reopen(self) -> None:
        """Undoes shut(), because the library's call has failed."""
        with self._lock:
            self._closed = False

    def forget(self) -> None:
        """Records, after shut(), that the library has freed the handle."""
        with self._lock:
            self._close = lambda _pointer: None

    def close(self, close: Optional[Callable[[int], Any]] = None) -> Any:
        """Closes the handle now, or when its calls in flight end; may be repeated. Uses `close`
        instead of the handle's own function, if it is given and no earlier call has closed the
        handle.

        Returns what the library's function returns, or None if it was not called.
        """
        if self._forks != _forks:
            return None
        with self._lock:
            if close is not None and not self._closed:
                self._close = close
            self._closed = True
            if not self._take():
                return None
            if self._root is not self:
                self._root._calls += 1
        return self._release()

    def _release(self) -> Any:
        """Releases a taken handle. That is a call on its client, which the caller has counted
        already.
        """
        root = self._root
        if root is not self and root._taken:
            with root._giving_back:  # the client is being or has been closed: both must not overlap
                pass
        try:
            return self._close(self._pointer)
        finally:
            self._giving_back.release()
            if root is not self:
                root._end_call()

    def close_from_collector(self) -> None:
        """Closes the handle for the garbage collector, and keeps the error text of a call that has
        just failed.
        """
        keep_error_text()
        self.close()
        library().pqc_sequence_drop(None)  # clears the error text of the close


_Self = TypeVar("_Self", bound="Closable")


class Closable:
    """An object closed by close(), by the end of `with`, or when it is no longer referenced; in any
    order.
    """

    _handle: Handle

    def _own(self, handle: Handle, at_exit: bool) -> None:
        self._handle = handle
        # When the program ends, closing the client is enough: its session drops its sequences.
        weakref.finalize(self, handle.close_from_collector).atexit = at_exit

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def close(self) -> None:
        """Releases the handle, or leaves that to the last call in flight on another thread; may be
        repeated.
        """
        self._handle.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()
