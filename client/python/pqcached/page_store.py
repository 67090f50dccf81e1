"""A store of opaque pages for the storage hooks of engines (LMCache, SGLang's HiCache).

    store = PageStore("unix:///run/pqcached/pqcached.sock", "pages", capacity_bytes=4 << 30)
    store.put([("model/0/hash of a prefix", array)])
    found = store.get([("model/0/hash of a prefix", memory)])

The pages are in a page cache of the sidecar. An engine must not fail because its store does: while
the sidecar is absent, full, busy or restarting, pages are missing and are not stored, and no method
raises. PageStore.status() has the last failure, which is logged once.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import struct
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np

from . import _abi as abi
from ._client import Client
from ._enums import PageOutcome
from ._errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from ._page_cache import PageCache, bytes_of

__all__ = ["DEFAULT_ENDPOINT", "PART_BYTES", "PageStore", "StoreCounts"]

DEFAULT_ENDPOINT = "unix:///run/pqcached/pqcached.sock"
# Longer pages are stored as parts of this size, which is that of a slot of the client's staging.
PART_BYTES = 16 << 20
MAX_PAGE_BYTES = 1 << 30
# Most bytes and keys of one call, so that its duration does not depend on the engine's batches.
_CALL_BYTES = 64 << 20
_CALL_KEYS = 4096
_HEAD = struct.Struct("<8sQ")  # a page of parts: this magic number, and its size
_MAGIC = b"pqcparts"

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
Key = Union[str, bytes]
_Bytes = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class StoreCounts:
    """Pages since the store was made."""

    stored: int = 0  # put, including those that were stored before
    refused: int = 0  # put, and not stored: no room, no sidecar, a size beyond the limits
    found: int = 0
    missing: int = 0  # get: not stored, of another size, or no sidecar
    failures: int = 0  # calls that the sidecar did not serve


def _name_of(key: Key, kind: bytes, number: int = 0) -> bytes:
    """Returns the 32 bytes by which the sidecar knows the page, the head, or a part of a key."""
    text = key.encode() if isinstance(key, str) else key
    return hashlib.blake2b(text, digest_size=32, person=kind, salt=number.to_bytes(8, "little")).digest()


def _parts_of(size_bytes: int) -> Iterator[Tuple[int, int, int]]:
    """Number, begin and end of each part of a page."""
    for number, begin in enumerate(range(0, size_bytes, PART_BYTES)):
        yield number, begin, min(begin + PART_BYTES, size_bytes)


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Divides pages of these sizes into calls."""
    begin, held = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and (held + size > _CALL_BYTES or i - begin == _CALL_KEYS):
            yield slice(begin, i)
            begin, held = i, 0
        held += size
    if begin < len(sizes):
        yield slice(begin, len(sizes))


class PageStore:
    """Pages of 1 byte to 1 GiB under keys of any length. Opens its client at the first call, and a
    new one after a fork. Usable from several threads at once.

    endpoint, tenant: those of Client. name: the page cache, which the store creates if it does not
    exist; stores of one name share their pages, in all processes. capacity_bytes: its memory, of
    which each page takes whole units of 64 KiB; when it is full, the sidecar evicts the pages that
    were used longest ago. timeout_ms: for one call of the sidecar, with 64 MiB of pages at most.
    retry_seconds: after a failure the store does not call the sidecar for this time, so that an
    engine waits for at most one timeout in it.

    A key must name everything that the bytes depend on (model, rank, dtype, layout, tokens): the
    page of a key never changes, and put() keeps the old one.

    Raises InvalidArgument for a wrong argument, never for the sidecar's state.
    """

    def __init__(self, endpoint: str, name: str, *, capacity_bytes: int, tenant: str = "default",
                 timeout_ms: int = 1000, retry_seconds: float = 1.0) -> None:
        for field, value, least in (("capacity_bytes", capacity_bytes, 1), ("timeout_ms", timeout_ms, 1),
                                    ("retry_seconds", retry_seconds, 0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
                raise InvalidArgument.about(field, f"{value!r}, must be a number of at least {least}")
        for field, text in (("endpoint", endpoint), ("name", name), ("tenant", tenant)):
            if not isinstance(text, str) or not text:
                raise InvalidArgument.about(field, f"{text!r}, must be a text")
        self._endpoint, self._name, self._tenant = endpoint, name, tenant
        self._capacity_bytes, self._timeout_ms = int(capacity_bytes), int(timeout_ms)
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()  # guards the fields below; held while a client is opened
        self._client: Optional[Client] = None
        self._cache: Optional[PageCache] = None
        self._away_until = 0.0  # time.monotonic()
        self._failure = ""
        self._counts: Dict[str, int] = collections.Counter()
        self._closed = False
        self._has_refused = False

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], name: str) -> "PageStore":
        """Makes a store from an engine's configuration: the constructor's arguments by their names,
        of which capacity_bytes is required. name: that of the page cache if `settings` has none.

        Raises InvalidArgument for a wrong value, and for a name that the constructor lacks.
        """
        known = ("endpoint", "name", "capacity_bytes", "tenant", "timeout_ms", "retry_seconds")
        for each in settings:
            if each not in known:
                raise InvalidArgument.about(str(each), f"unknown; known are {', '.join(known)}")
        if "capacity_bytes" not in settings:
            raise InvalidArgument.about("capacity_bytes", "missing")
        arguments: Dict[str, Any] = {"endpoint": DEFAULT_ENDPOINT, "name": name, **settings}
        return cls(**arguments)

    def put(self, pages: Sequence[Tuple[Key, Any]]) -> List[bool]:
        """Stores pages, each a key and a buffer (bytes, memoryview, numpy). Returns for each whether
        the sidecar has a page of this key now. Raises TypeError for an object that is no contiguous
        buffer.
        """
        contents = [bytes_of(f"pages[{i}]", data, False) for i, (_, data) in enumerate(pages)]
        stored = [False] * len(pages)
        single: List[Tuple[int, bytes, _Bytes]] = []
        for i, ((key, _), content) in enumerate(zip(pages, contents)):
            if not 1 <= content.nbytes <= MAX_PAGE_BYTES:
                self._refuse(f"a page of {content.nbytes} bytes, must be 1 to {MAX_PAGE_BYTES}")
            elif content.nbytes > PART_BYTES:
                stored[i] = self._put_parts(key, content)
            else:
                single.append((i, _name_of(key, b"page"), content))
        for (i, _, _), done in zip(single, self._put([(name, content) for _, name, content in single])):
            stored[i] = done
        self._count(stored=sum(stored), refused=len(stored) - sum(stored))
        return stored

    def get(self, pages: Sequence[Tuple[Key, Any]]) -> List[bool]:
        """Copies pages into writable buffers of exactly their sizes. Returns for each whether it
        was found; the content of the other buffers is unspecified. Raises TypeError for an object
        that is no contiguous writable buffer.
        """
        targets = [bytes_of(f"pages[{i}]", data, True) for i, (_, data) in enumerate(pages)]
        found = [False] * len(pages)
        single: List[Tuple[int, bytes, _Bytes]] = []
        for i, ((key, _), target) in enumerate(zip(pages, targets)):
            if target.nbytes > PART_BYTES:
                found[i] = self._get_parts(key, target)
            elif target.nbytes:
                single.append((i, _name_of(key, b"page"), target))
        for (i, _, _), done in zip(single, self._get([(name, target) for _, name, target in single])):
            found[i] = done
        self._count(found=sum(found), missing=len(found) - sum(found))
        return found

    def sizes(self, keys: Sequence[Key], lease_ms: int = 0) -> List[int]:
        """Returns the bytes of each key's page, 0 where it is not stored whole. lease_ms: as in
        PageCache.exists, so that a later get() finds the page.
        """
        count = len(keys)
        names = [_name_of(key, b"page") for key in keys] + [_name_of(key, b"head") for key in keys]
        answers = self._exists(names, lease_ms)
        sizes, heads = answers[:count], answers[count:]
        for i, key in enumerate(keys):
            if not sizes[i] and heads[i]:
                sizes[i] = self._size_of_parts(key, lease_ms)
        return sizes

    def clear(self) -> bool:
        """Drops all pages of all stores of this name. Returns False while a page is leased, and
        without a sidecar.
        """
        def drop(cache: PageCache) -> bool:
            try:
                cache.drop()
            except NotFound:  # another store has dropped it
                pass
            except FailedPrecondition as error:
                _log.warning("page store %s: not cleared: %s", self._name, error)
                return False
            self._close(closed=False)
            return True
        return self._call(drop, False)

    def status(self) -> Dict[str, Any]:
        """Returns `available` (whether the sidecar has served the last call), `failure` (why it has
        not), and the fields of StoreCounts.
        """
        with self._lock:
            available = self._cache is not None and not self._failure
            return {"available": available, "failure": self._failure, **dataclasses.asdict(StoreCounts(**self._counts))}

    def close(self) -> None:
        """Closes the client; the pages remain. Later calls are misses."""
        self._close(closed=True)

    def _put_parts(self, key: Key, content: _Bytes) -> bool:
        parts = [(_name_of(key, b"part", number), content[begin:end])
                 for number, begin, end in _parts_of(content.nbytes)]
        # The head makes the page visible, so it is last.
        return all(self._put(parts)) and self._put([(_name_of(key, b"head"), self._head_of(content.nbytes))])[0]

    def _get_parts(self, key: Key, target: _Bytes) -> bool:
        head = np.zeros(_HEAD.size, np.uint8)
        if not self._get([(_name_of(key, b"head"), head)])[0]:
            return False
        if head.tobytes() != self._head_of(target.nbytes).tobytes():
            return False
        return all(self._get([(_name_of(key, b"part", number), target[begin:end])
                              for number, begin, end in _parts_of(target.nbytes)]))

    def _size_of_parts(self, key: Key, lease_ms: int) -> int:
        head = np.zeros(_HEAD.size, np.uint8)
        if not self._get([(_name_of(key, b"head"), head)])[0]:
            return 0
        magic, size = _HEAD.unpack(head.tobytes())
        assert isinstance(size, int)
        if magic != _MAGIC or not PART_BYTES < size <= MAX_PAGE_BYTES:
            return 0
        parts = list(_parts_of(size))
        sizes = self._exists([_name_of(key, b"part", number) for number, _, _ in parts], lease_ms)
        return size if sizes == [end - begin for _, begin, end in parts] else 0

    @staticmethod
    def _head_of(size_bytes: int) -> _Bytes:
        return np.frombuffer(_HEAD.pack(_MAGIC, size_bytes), np.uint8)

    def _put(self, pages: Sequence[Tuple[bytes, _Bytes]]) -> List[bool]:
        stored: List[bool] = []
        for batch in _batches([content.nbytes for _, content in pages]):
            part = pages[batch]
            none: List[PageOutcome] = []
            outcomes = self._call(lambda cache: cache.put(part), none)
            stored += [outcome in (PageOutcome.STORED, PageOutcome.PRESENT) for outcome in outcomes] or [False] * len(part)
        return stored

    def _get(self, pages: Sequence[Tuple[bytes, _Bytes]]) -> List[bool]:
        found: List[bool] = []
        for batch in _batches([target.nbytes for _, target in pages]):
            part = pages[batch]
            none: List[Tuple[PageOutcome, int]] = []
            answers = self._call(lambda cache: cache.get(part), none)
            found += [outcome == PageOutcome.FOUND and size == target.nbytes
                      for (outcome, size), (_, target) in zip(answers, part)] or [False] * len(part)
        return found

    def _exists(self, names: Sequence[bytes], lease_ms: int) -> List[int]:
        sizes: List[int] = []
        for batch in _batches([0] * len(names)):
            part = names[batch]
            sizes += self._call(lambda cache: cache.exists(part, lease_ms), [0] * len(part))
        return sizes

    def _call(self, call: Callable[[PageCache], _Result], otherwise: _Result) -> _Result:
        """Makes a call on the page cache, after opening it if necessary. Returns `otherwise` after
        a failure.
        """
        for is_last in (False, True):
            cache = None
            try:
                cache = self._open()
                if cache is None:
                    return otherwise
                result = call(cache)
            except Error as error:
                # A session that has ended, with its daemon perhaps, a page cache that another store
                # has dropped, and one that another thread has closed for these reasons: a new
                # client may serve the call.
                is_over = (isinstance(error, (NotFound, Unavailable)) and not error.retry_ms
                           or cache is not None and cache.closed)
                if not error.retry_ms or isinstance(error, DeadlineExceeded):
                    self._forget(cache)
                if is_last or cache is None or not is_over:
                    self._fail(error)
                    return otherwise
            else:
                self._recover()
                return result
        return otherwise

    def _open(self) -> Optional[PageCache]:
        with self._lock:
            if self._closed or time.monotonic() < self._away_until:
                return None
            if self._cache is None:
                if self._client is None:
                    self._client = Client(self._endpoint, tenant=self._tenant, client_name=f"page store {self._name}",
                                          timeout_ms=self._timeout_ms, thread_count=abi.PQC_THREADS_CALLER)
                self._cache = self._client.open_page_cache(self._name, capacity_bytes=self._capacity_bytes)
            return self._cache

    def _forget(self, cache: Optional[PageCache]) -> None:
        """Closes the client, unless another thread has opened a new one since."""
        with self._lock:
            if self._cache is not cache:
                return
            client, self._client, self._cache = self._client, None, None
        if client:
            client.close()  # and its handles

    def _close(self, closed: bool) -> None:
        with self._lock:
            self._closed |= closed
            client, self._client, self._cache = self._client, None, None
        if client:
            client.close()

    def _fail(self, error: Error) -> None:
        with self._lock:
            self._counts["failures"] += 1
            is_new, self._failure = not self._failure, str(error)
            self._away_until = time.monotonic() + self._retry_seconds
        if is_new:
            _log.warning("page store %s: misses until the sidecar at %s serves it: %s", self._name, self._endpoint, error)

    def _recover(self) -> None:
        with self._lock:
            was, self._failure = self._failure, ""
        if was:
            _log.warning("page store %s: the sidecar at %s serves it again", self._name, self._endpoint)

    def _refuse(self, text: str) -> None:
        with self._lock:
            is_new, self._has_refused = not self._has_refused, True
        if is_new:
            _log.warning("page store %s: not stored: %s", self._name, text)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number
