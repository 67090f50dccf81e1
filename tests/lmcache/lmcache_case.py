"""Real LMCache with the adapters, and daemons for them.

Import it first: it starts the program again in the environment of tests/environments.py, if that is installed.
"""

import os
import pathlib
import select
import sys
import tempfile
import time
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("client/python", ".")] + [str(TESTS.parent / "client/engines/lmcache")]
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import environments  # noqa: E402
from skip import skip_unless  # noqa: E402

IS_INSTALLED = environments.run_in_environment("lmcache")
needs_lmcache = skip_unless("lmcache", IS_INSTALLED, "LMCache is not installed: tests/environments.py lmcache")

import daemon as daemons  # noqa: E402

if IS_INSTALLED:
    import torch
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform import consume_fd

    torch.set_num_threads(1)

WAIT_SECONDS = 60
CHUNK = (2, 4, 16, 64)  # keys and values, layers, tokens, values of a token
CHUNK_BYTES = 2 * 4 * 16 * 64 * 4


def key_of(number, **fields):
    return ObjectKey(**{"chunk_hash": number.to_bytes(8, "big"), "model_name": "org/model", "kv_rank": 0, **fields})


def content_of(number, shape=CHUNK):
    return torch.rand(shape, generator=torch.Generator().manual_seed(number))


def object_of(tensor):
    """A memory object of LMCache over a copy of the tensor."""
    raw = tensor.clone().flatten().view(torch.uint8)
    return TensorMemoryObj(raw, MemoryObjMetadata(tensor.shape, tensor.dtype, 0, raw.numel(), 1, fmt=MemoryFormat.KV_2LTD,
                                                  shapes=[tensor.shape], dtypes=[tensor.dtype]), None)


def adapter_config(endpoint, **parameters):
    return PluginL2AdapterConfig.from_dict({
        "module_path": "pqcached_lmcache.l2_adapter", "class_name": "L2Adapter",
        "adapter_params": {"endpoint": endpoint, "capacity_bytes": 64 << 20, "timeout_ms": 60000, "retry_seconds": 0, **parameters}})


def wait_for(condition):
    """Waits until the condition has a true value, and returns it."""
    end = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)
    return value


def wait_for_event(fd):
    """Waits until an adapter signals an event, as LMCache's controllers do."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(WAIT_SECONDS * 1000):
        raise TimeoutError("no event")
    consume_fd(fd)


def store(adapter, keys, objects):
    task = adapter.submit_store_task(keys, objects)
    wait_for_event(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task]


def look_up(adapter, keys):
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait_for_event(adapter.get_lookup_and_lock_event_fd())
    return bits(adapter.query_lookup_and_lock_result(task), len(keys))


def load(adapter, keys, objects):
    task = adapter.submit_load_task(keys, objects)
    wait_for_event(adapter.get_load_event_fd())
    return bits(adapter.query_load_result(task), len(keys))


def bits(bitmap, count):
    return [bitmap.test(i) for i in range(count)]


class Manager:
    """LMCache's own storage of its server, with 32 MiB of memory in front of the sidecar."""

    def __init__(self, endpoint, **parameters):
        memory = L1MemoryManagerConfig(32 << 20, False, shm_name="")
        self.storage = StorageManager(StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"),
                                                           L2AdaptersConfig([adapter_config(endpoint, **parameters)])))
        self.layout = MemoryLayoutDesc([torch.Size(CHUNK)], [torch.float32])

    def status(self):
        return self.storage.l2_adapters()[0][1].report_status()

    def write(self, numbers):
        """Stores chunks, and waits until the sidecar has stored or refused them."""
        before = self.status()
        keys = [key_of(number) for number in numbers]
        for key, memory in self.storage.reserve_write(keys, self.layout).items():
            memory.tensor.copy_(content_of(int.from_bytes(key.chunk_hash, "big")))
        self.storage.finish_write(keys)
        wait_for(lambda: self.finished(self.status()) - self.finished(before) >= len(numbers))

    @staticmethod
    def finished(status):
        return status["stored"] + status["refused"]

    def read(self, numbers):
        """How many leading chunks are found, and whether each of them is right."""
        keys = [key_of(number) for number in numbers]
        handle = self.storage.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, self.layout)]))
        if not self.storage.wait_prefetch_status(handle, WAIT_SECONDS):
            raise TimeoutError("the prefetch did not end")
        count = self.storage.query_prefetch_status(handle).hit_cells[0].popcount()
        if not count:
            return 0, True
        with self.storage.read_prefetched_results(keys[:count]) as objects:
            right = all(torch.equal(memory.tensor, content_of(number)) for number, memory in zip(numbers, objects))
        self.storage.finish_read_prefetched(keys[:count])
        return count, right

    def close(self):
        self.storage.close()


class LMCacheTest(unittest.TestCase):
    """A folder for a daemon's socket, and daemons that are stopped."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.endpoint = folder.name, f"unix://{folder.name}/s"

    def start(self):
        daemon = daemons.Daemon(self.folder)
        self.addCleanup(daemon.stop)
        return daemon

    def adapter(self, **parameters):
        adapter = create_l2_adapter(adapter_config(self.endpoint, **parameters))
        self.addCleanup(adapter.close)
        return adapter

    def manager(self, **parameters):
        manager = Manager(self.endpoint, **parameters)
        self.addCleanup(manager.close)
        return manager
