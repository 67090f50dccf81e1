"""L2Adapter: LMCache's server keeps in the sidecar what it evicts from its own memory, or all it stores.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "pqcached_lmcache.l2_adapter",
        "class_name": "L2Adapter", "adapter_params": {"capacity_bytes": 4294967296}}'

adapter_params: the arguments of pqcached.page_store.PageStore, and lease_ms, the time for which a
page that a lookup has found is kept for the load that follows (10000).
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from pqcached.page_store import PageStore

from .tasks import TaskQueue

# Tasks that may wait: LMCache itself has far fewer in flight unless the sidecar hangs.
MOST_WAITING = 256


def page_key(key: Any) -> bytes:
    """Returns the key of an object's page. Neither the model's name nor the salt may contain "@"."""
    name = f"lmcache.l2@{key.model_name}@{key.kv_rank:x}@{key.object_group_id:x}@{key.cache_salt}@"
    return name.encode() + bytes(key.chunk_hash)


def bitmap_of(bits: List[bool]) -> Any:
    bitmap = Bitmap(len(bits))
    for i, bit in enumerate(bits):
        if bit:
            bitmap.set(i)
    return bitmap


class L2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Objects are pages of the sidecar, which evicts them by itself; without a sidecar nothing is
    found or stored. Raises InvalidArgument for wrong parameters.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()  # without a capacity LMCache evicts nothing by itself
        settings = dict(config)
        self._lease_ms = int(settings.pop("lease_ms", 10_000))
        self._store = PageStore.from_settings(settings, "lmcache")
        self._events = [create_event_notifier() for _ in range(3)]
        stored, looked_up, loaded = (event.notify for event in self._events)
        self._stores: TaskQueue[Any] = TaskQueue("store", stored, MOST_WAITING)
        self._lookups: TaskQueue[Any] = TaskQueue("lookup", looked_up, MOST_WAITING)
        self._loads: TaskQueue[Any] = TaskQueue("load", loaded, MOST_WAITING)

    def get_store_event_fd(self) -> int:
        return int(self._events[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[2].fileno())

    def submit_store_task(self, keys: List[Any], objects: List[Any]) -> int:
        def store() -> Any:
            pages = [(page_key(key), object.byte_array) for key, object in zip(keys, objects, strict=True)]
            stored = self._store.put(pages)
            count = sum(len(content) for (_, content), done in zip(pages, stored) if done)
            return L2StoreResult(all(stored), count)
        return self._stores.submit(store, lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> Dict[int, Any]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: List[Any], group_layout_descs: Dict[int, Any]) -> int:
        def look_up() -> Any:
            sizes = self._store.sizes([page_key(key) for key in keys], self._lease_ms)
            return bitmap_of([size > 0 for size in sizes])
        return self._lookups.submit(look_up, lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Optional[Any]:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: List[Any]) -> None:
        pass  # a lease ends by itself

    def submit_load_task(self, keys: List[Any], objects: List[Any]) -> int:
        def load() -> Any:
            return bitmap_of(self._store.get([(page_key(key), object.byte_array)
                                              for key, object in zip(keys, objects, strict=True)]))
        return self._loads.submit(load, lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Optional[Any]:
        return self._loads.take(task_id)

    def report_status(self) -> Dict[str, Any]:
        status = self._store.status()
        return {"is_healthy": not status["failure"], "type": "pqcached", **status}

    def close(self) -> None:
        for queue in (self._stores, self._lookups, self._loads):
            queue.close()
        for event in self._events:
            event.close()
        self._store.close()
