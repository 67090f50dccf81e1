"""The storage plug-in for LMCache in an engine's process, in LMCache's own storage manager. Usage: storage_plugin_test.py BUILD"""

import asyncio
import inspect
import os
import signal
import threading
import unittest

import lmcache_case  # first
from lmcache_case import LMCacheTest, needs_lmcache, wait_for

if lmcache_case.IS_INSTALLED:
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
    from lmcache.v1.storage_backend.storage_manager import StorageManager
    from pqcached_lmcache.storage_plugin import StoragePlugin

LAYERS, KV_HEADS, HEAD_DIM, CHUNK_TOKENS = 4, 2, 32, 16


def key_of(number, **fields):
    return CacheEngineKey(**{"model_name": "org/model", "world_size": 1, "worker_id": 0, "chunk_hash": number,
                             "dtype": torch.float32, **fields})


def content_of(number, tokens=CHUNK_TOKENS):
    return torch.rand((2, LAYERS, tokens, KV_HEADS * HEAD_DIM), generator=torch.Generator().manual_seed(number))


@needs_lmcache
class StoragePluginTest(LMCacheTest):
    def manager(self, **settings):
        """LMCache's storage manager with its CPU memory and the plug-in. Returns both."""
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, local_cpu=True, max_local_cpu_size=0.05, storage_plugins=["pqcached"],
            use_layerwise=settings.pop("use_layerwise", False),
            extra_config={"storage_plugin.pqcached.module_path": "pqcached_lmcache.storage_plugin",
                          "storage_plugin.pqcached.class_name": "StoragePlugin", "pqcached.endpoint": self.endpoint,
                          "pqcached.capacity_bytes": 64 << 20, "pqcached.timeout_ms": 60000, "pqcached.retry_seconds": 0,
                          **{f"pqcached.{name}": value for name, value in settings.items()}})
        metadata = LMCacheMetadata("org/model", 1, 1, 0, 0, torch.float32, (LAYERS, 2, CHUNK_TOKENS, KV_HEADS, HEAD_DIM),
                                   role="worker", chunk_size=CHUNK_TOKENS)
        manager = StorageManager(config, metadata, EventManager())
        self.addCleanup(manager.close)
        return manager, manager.storage_backends.get("pqcached")

    def put(self, manager, plugin, numbers, tokens=CHUNK_TOKENS):
        before = plugin._store.status()
        objects = []
        for number in numbers:
            memory = manager.allocate(content_of(number, tokens).shape, torch.float32)
            memory.tensor.copy_(content_of(number, tokens))
            objects.append(memory)
        manager.batched_put([key_of(number) for number in numbers], objects)
        wait_for(lambda: self.finished(plugin) - before["stored"] - before["refused"] >= len(numbers))
        wait_for(lambda: not any(plugin.exists_in_put_tasks(key_of(number)) for number in numbers))

    @staticmethod
    def finished(plugin):
        status = plugin._store.status()
        return status["stored"] + status["refused"]

    def is_right(self, memory, number, tokens=CHUNK_TOKENS):
        return memory is not None and torch.equal(memory.tensor, content_of(number, tokens))

    def test_each_method_has_the_parameters_of_the_installed_base_class(self):
        for name, method in vars(StoragePlugin).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                base = getattr(StoragePluginInterface, name)
                self.assertEqual(list(inspect.signature(method).parameters), list(inspect.signature(base).parameters), name)
        self.assertEqual(StoragePlugin.__abstractmethods__, frozenset())

    def test_another_engine_finds_the_chunks(self):
        self.start()
        first, plugin = self.manager()
        self.put(first, plugin, range(3))
        self.put(first, plugin, [7], tokens=5)
        second, plugin = self.manager()
        self.assertTrue(plugin.contains(key_of(0)) and not plugin.contains(key_of(3)))
        self.assertEqual(plugin.batched_contains([key_of(number) for number in (0, 1, 3, 2)], pin=True), 2)
        self.assertTrue(self.is_right(second.get(key_of(1)), 1))
        self.assertTrue(self.is_right(second.get(key_of(7)), 7, tokens=5))
        self.assertIsNone(second.get(key_of(3)))
        found = plugin.batched_get_blocking([key_of(number) for number in (2, 3, 0)])
        self.assertTrue(self.is_right(found[0], 2) and found[1] is None and self.is_right(found[2], 0))
        leading = asyncio.run(plugin.batched_get_non_blocking("id", [key_of(number) for number in (2, 0, 3, 1)]))
        self.assertEqual([self.is_right(memory, number) for memory, number in zip(leading, (2, 0), strict=True)], [True, True])
        self.assertEqual(asyncio.run(plugin.batched_async_contains("id", [key_of(0), key_of(3)], pin=True)), 1)
        self.assertTrue(plugin.pin(key_of(0)) and plugin.unpin(key_of(0)))
        self.assertFalse(plugin.pin(key_of(3)) or plugin.remove(key_of(0)))

    def test_keys_of_other_ranks_models_and_types_are_others(self):
        self.start()
        manager, plugin = self.manager()
        self.put(manager, plugin, [1])
        for fields in ({"worker_id": 1}, {"world_size": 2}, {"model_name": "org/other"}, {"dtype": torch.bfloat16},
                       {"request_configs": {"lmcache.tag.user": "a"}}):
            self.assertFalse(plugin.contains(key_of(1, **fields)), fields)

    def test_memory_of_chunks_is_given_back(self):
        self.start()
        first, plugin = self.manager()
        for number in range(4):
            self.put(first, plugin, [number])
        second, plugin = self.manager()
        allocator = second.storage_backends["LocalCPUBackend"].get_memory_allocator()
        for _ in range(3):
            for memory in plugin.batched_get_blocking([key_of(number) for number in range(6)]):
                if memory is not None:
                    self.assertEqual(memory.get_ref_count(), 1)
                    memory.ref_count_down()
        self.assertTrue(allocator.memcheck())

    def test_a_page_that_is_no_chunk_is_a_miss(self):
        self.start()
        _, plugin = self.manager()
        token = content_of(0, 1).nbytes
        for number, size in enumerate((token - 1, token + 1, (CHUNK_TOKENS + 1) * token)):
            plugin._store.put([(b"lmcache@" + key_of(number).to_string().encode(), bytes(size))])
            self.assertTrue(plugin.contains(key_of(number)))
            self.assertIsNone(plugin.get_blocking(key_of(number)))

    def test_callbacks_name_the_chunks_that_were_stored(self):
        self.start()
        manager, plugin = self.manager()
        stored, ended = [], threading.Event()

        def callback(key):
            stored.append(key)
            ended.set()
            raise RuntimeError("of the callback")
        memory = manager.allocate(content_of(1).shape, torch.float32)
        for future in plugin.batched_submit_put_task([key_of(1)], [memory], on_complete_callback=callback):
            future.result(60)
        self.assertTrue(ended.wait(60))
        self.assertEqual((stored, memory.get_ref_count()), ([key_of(1)], 1))

    def test_a_killed_sidecar_is_a_miss_and_no_failure(self):
        daemon = self.start()
        manager, plugin = self.manager(timeout_ms=5000)
        self.put(manager, plugin, [1])
        daemon.stop(signal.SIGKILL)
        self.put(manager, plugin, [2])
        self.assertTrue(self.is_right(manager.get(key_of(2)), 2))  # LMCache's own memory
        self.assertFalse(plugin.contains(key_of(1)))
        self.assertIsNone(plugin.get_blocking(key_of(1)))
        os.unlink(f"{self.folder}/s")
        self.start()
        self.put(manager, plugin, [3])
        self.assertTrue(self.is_right(plugin.get_blocking(key_of(3)), 3))

    def test_without_a_sidecar_or_with_wrong_settings_lmcache_goes_on(self):
        manager, plugin = self.manager()
        self.put(manager, plugin, [1])
        self.assertFalse(plugin.contains(key_of(1)))
        for settings in ({"capacity": 1}, {"use_layerwise": True}):
            manager, plugin = self.manager(**settings)
            self.assertIsNone(plugin)
            self.assertIn("LocalCPUBackend", manager.storage_backends)


if __name__ == "__main__":
    unittest.main()
