"""Pages of bytes under keys, for stores that hand over bytes only."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from . import _abi as abi
from ._arguments import key_bytes, uint64
from ._enums import PageOutcome
from ._handle import Closable, Handle
from ._library import check


def bytes_of(name: str, buffer: Any, writable: bool) -> np.ndarray[Any, Any]:
    """Returns the memory of a contiguous buffer (bytes, memoryview, numpy) as an array of bytes."""
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(f"{name}: {type(buffer).__name__}; must have the buffer protocol") from None
    if not view.c_contiguous:
        raise TypeError(f"{name}: it is not contiguous")
    if writable and view.readonly:
        raise TypeError(f"{name}: it is read-only")
    return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)


def _address_of(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class PageCache(Closable):
    """Pages of bytes under keys; made by Client.open_page_cache.

    A key is 16 to 64 bytes, usually a hash of the content; a page is at most 32 MiB. A page never
    changes. When the memory is full, the pages that were used longest ago are evicted, except
    leased ones. At most 4096 pages per call. Usable from several threads at once; calls release the
    GIL. Each method raises NotFound when the page cache was dropped, and InvalidArgument for keys
    and sizes beyond the limits.
    """

    def __init__(self, library: Any, client: Handle, cache: int) -> None:
        self._library = library
        self._own(Handle("page_cache", cache, library.pqc_page_cache_close, client), at_exit=False)

    def put(self, pages: Sequence[Tuple[bytes, Any]]) -> List[PageOutcome]:
        """Stores pages, each a key and a buffer. Returns for each STORED, PRESENT (the key has a
        page, which stays), or NO_ROOM (not stored: no memory even after eviction).

        Harmless to repeat. Raises OutOfRange for a page that exceeds the sidecar's
        max_message_bytes.
        """
        sources = (abi.PageSource * len(pages))()
        held = []
        for i, (key, data) in enumerate(pages):
            name, memory = key_bytes(f"pages[{i}].key", key), bytes_of(f"pages[{i}].data", data, False)
            held.append(memory)
            sources[i] = abi.PageSource(key=name, key_bytes=len(name), data=_address_of(memory),
                                        data_bytes=memory.nbytes)
        with self._handle as cache:
            check(self._library.pqc_page_put(cache, sources, len(pages)))
        return [PageOutcome(source.outcome) for source in sources]

    def get(self, pages: Sequence[Tuple[bytes, Any]]) -> List[Tuple[PageOutcome, int]]:
        """Copies pages into buffers: each is a key and a writable buffer. Returns for each the
        outcome and the bytes of the page: FOUND, MISSING (0 bytes), or TOO_LARGE (the buffer is
        unchanged). Bytes behind the page are unchanged.
        """
        targets = (abi.PageTarget * len(pages))()
        held = []
        for i, (key, data) in enumerate(pages):
            name, memory = key_bytes(f"pages[{i}].key", key), bytes_of(f"pages[{i}].data", data, True)
            held.append(memory)
            targets[i] = abi.PageTarget(key=name, key_bytes=len(name), data=_address_of(memory),
                                        capacity_bytes=memory.nbytes)
        with self._handle as cache:
            check(self._library.pqc_page_get(cache, targets, len(pages)))
        return [(PageOutcome(target.outcome), target.size_bytes) for target in targets]

    def exists(self, keys: Sequence[bytes], lease_ms: int = 0) -> List[int]:
        """Returns the bytes of each key's page, 0 where there is none.

        lease_ms: pages that are found are not evicted for this time (at most 3600000), so that
        another process still finds them. Leases end when the sidecar's worker does.
        """
        wanted = (abi.PageKey * len(keys))()
        for i, key in enumerate(keys):
            name = key_bytes(f"keys[{i}]", key)
            wanted[i] = abi.PageKey(key=name, key_bytes=len(name))
        lease = uint64("lease_ms", lease_ms)
        with self._handle as cache:
            check(self._library.pqc_page_exists(cache, wanted, len(keys), lease))
        return [each.size_bytes for each in wanted]

    def read(self, key: bytes) -> Optional[bytes]:
        """Returns the content of one page, or None when no page has the key."""
        while True:
            size = self.exists([key])[0]
            if size == 0:
                return None
            content = bytearray(size)
            outcome, got = self.get([(key, content)])[0]
            if outcome == PageOutcome.MISSING:
                return None
            if outcome == PageOutcome.FOUND:
                return bytes(content[:got])

    def drop(self) -> None:
        """Drops the page cache in the sidecar with all of its pages. Raises FailedPrecondition
        while a page is leased."""
        with self._handle as cache:
            check(self._library.pqc_page_cache_drop(cache))
