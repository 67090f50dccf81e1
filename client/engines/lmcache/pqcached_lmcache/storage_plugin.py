"""StoragePlugin: LMCache in the engine's process keeps its chunks in the sidecar.

    local_cpu: true
    storage_plugins: ["pqcached"]
    extra_config:
      storage_plugin.pqcached.module_path: pqcached_lmcache.storage_plugin
      storage_plugin.pqcached.class_name: StoragePlugin
      pqcached.capacity_bytes: 4294967296

Keys of extra_config that begin with "pqcached." are the arguments of pqcached.page_store.PageStore,
and pqcached.lease_ms, the time for which a pinned page is kept (10000).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, List, Optional, Sequence, Set

from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from pqcached.page_store import PageStore

_log = logging.getLogger(__name__)
PREFIX = "pqcached."
# Chunks that may wait to be stored; those beyond it are not stored.
MOST_WAITING = 1024


def page_key(key: Any) -> bytes:
    text: str = key.to_string()
    return b"lmcache@" + text.encode()


def leading(found: Sequence[Any]) -> int:
    """Returns how many of the first elements are true."""
    return next((i for i, each in enumerate(found) if not each), len(found))


class StoragePlugin(StoragePluginInterface):  # type: ignore[misc]
    """Chunks are pages of the sidecar, which evicts them by itself; without a sidecar nothing is found
    or stored. Raises InvalidArgument for wrong settings, and ValueError for a layer-wise layout.
    """

    def __init__(self, dst_device: str = "cpu", config: Any = None, metadata: Any = None, local_cpu_backend: Any = None,
                 loop: Optional[asyncio.AbstractEventLoop] = None) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if getattr(config, "use_layerwise", False):
            raise ValueError("pqcached: use_layerwise: true, must be false: pages hold the chunks of all layers")
        extra = getattr(config, "extra_config", None) or {}
        settings = {name[len(PREFIX):]: value for name, value in extra.items() if name.startswith(PREFIX)}
        self._lease_ms = int(settings.pop("lease_ms", 10_000))
        self._store = PageStore.from_settings(settings, "lmcache")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pqcached-store")
        self._lock = threading.Lock()
        self._being_put: Set[Any] = set()  # guarded by _lock

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: List[Any], pin: bool = False) -> int:
        return leading(self._store.sizes([page_key(key) for key in keys], self._lease_ms if pin else 0))

    async def batched_async_contains(self, lookup_id: str, keys: List[Any], pin: bool = False) -> int:
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._being_put

    def batched_submit_put_task(self, keys: Sequence[Any], objs: List[Any], transfer_spec: Any = None,
                                on_complete_callback: Optional[Callable[[Any], None]] = None) -> Optional[List["Future[None]"]]:
        chunks = []
        with self._lock:
            for key, obj in zip(keys, objs, strict=True):
                if key not in self._being_put and len(self._being_put) < MOST_WAITING:
                    self._being_put.add(key)
                    chunks.append((key, obj))
        if not chunks:
            return None
        for _, obj in chunks:
            obj.ref_count_up()
        try:
            return [self._executor.submit(self._put, chunks, on_complete_callback)]
        except RuntimeError:  # closed
            self._release(chunks)
            return None

    def get_blocking(self, key: Any) -> Optional[Any]:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: List[Any]) -> List[Optional[Any]]:
        names = [page_key(key) for key in keys]
        objects = [self._allocate(size) if size else None for size in self._store.sizes(names, self._lease_ms)]
        found = iter(self._store.get([(name, obj.byte_array) for name, obj in zip(names, objects) if obj is not None]))
        for i, obj in enumerate(objects):
            if obj is not None and not next(found):
                obj.ref_count_down()
                objects[i] = None
        return objects

    async def batched_get_non_blocking(self, lookup_id: str, keys: List[Any], transfer_spec: Any = None) -> List[Any]:
        """Returns the chunks before the first one that is missing."""
        objects = await asyncio.to_thread(self.batched_get_blocking, keys)
        count = leading([obj is not None for obj in objects])
        for obj in objects[count:]:
            if obj is not None:
                obj.ref_count_down()
        return objects[:count]

    def pin(self, key: Any) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: Any) -> bool:
        return True  # a lease ends by itself

    def remove(self, key: Any, force: bool = True) -> bool:
        return False  # the sidecar evicts, and has no deletion of a single page

    def get_allocator_backend(self) -> Any:
        if self.local_cpu_backend is None:
            raise RuntimeError("pqcached: it needs LMCache's CPU memory: local_cpu: true")
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        pass  # pages are used when they are looked up

    def close(self) -> None:
        self._executor.shutdown(wait=True)
        self._store.close()

    def _put(self, chunks: List[Any], on_complete: Optional[Callable[[Any], None]]) -> None:
        stored = [False] * len(chunks)
        try:
            stored = self._store.put([(page_key(key), obj.byte_array) for key, obj in chunks])
        except Exception:  # an engine does not fail because its store does
            _log.exception("pqcached: chunks were not stored")
        finally:
            self._release(chunks)
        for (key, _), done in zip(chunks, stored):
            if done and on_complete:
                try:
                    on_complete(key)
                except Exception:
                    _log.exception("pqcached: the callback of a stored chunk has failed")

    def _release(self, chunks: List[Any]) -> None:
        with self._lock:
            self._being_put.difference_update(key for key, _ in chunks)
        for _, obj in chunks:
            obj.ref_count_down()

    def _allocate(self, size: int) -> Optional[Any]:
        """Allocates memory for a chunk of `size` bytes; None when they are no whole tokens, or more than
        a chunk has, or there is no memory.
        """
        if self.local_cpu_backend is None or self.metadata is None:
            return None
        dtypes = self.metadata.get_dtypes()
        token = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.metadata.get_shapes(1), dtypes))
        tokens, rest = divmod(size, token)
        if rest or tokens > self.metadata.chunk_size:
            _log.warning("pqcached: a chunk of %d bytes does not fit: %d tokens of %d bytes at most", size,
                         self.metadata.chunk_size, token)
            return None
        layout = MemoryFormat.KV_MLA_FMT if self.metadata.use_mla else MemoryFormat.KV_2LTD
        # No waiting for memory: the engine's own evictions may need the thread that would wait.
        return self.local_cpu_backend.allocate(self.metadata.get_shapes(tokens), dtypes, layout, busy_loop=False)
