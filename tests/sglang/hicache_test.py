"""HiCache's storage in the sidecar, made by SGLang's factory. Usage: hicache_test.py BUILD"""

import inspect
import os
import signal
import subprocess
import sys
import unittest

import sglang_case  # first
from sglang_case import HEAD_DIM, HEADS, LAYERS, PAGE_TOKENS, Controller, SGLangTest, config, host_pool, indices_of, needs_sglang, storage_of

if sglang_case.IS_INSTALLED:
    import torch
    from pqcached import InvalidArgument
    from pqcached_sglang.hicache import HiCacheStore
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer

PAGE_BYTES = 2 * LAYERS * PAGE_TOKENS * HEADS * HEAD_DIM * 2
KEYS = [f"hash{number}" for number in range(8)]


@needs_sglang
class HiCacheTest(SGLangTest):
    def test_each_method_has_the_parameters_of_the_installed_base_class(self):
        for name, method in vars(HiCacheStore).items():
            if inspect.isfunction(method) and not name.startswith("_") and name != "close":
                base = getattr(HiCacheStorage, name)
                self.assertEqual(list(inspect.signature(method).parameters), list(inspect.signature(base).parameters), name)
        self.assertEqual(HiCacheStore.__abstractmethods__, frozenset())

    def test_pages_come_back_as_they_left_the_host_pool(self):
        self.start()
        for layout in ("layer_first", "page_first", "page_first_direct"):
            for zero_copy in (False, True):
                with self.subTest(layout=layout, zero_copy=zero_copy):
                    pool, other = host_pool(layout), host_pool(layout)
                    name = {"pqcached.name": f"{layout}-{zero_copy}", "pqcached.capacity_bytes": 8 << 20}
                    writer, reader = Controller(self.storage(pool, name), pool), Controller(self.storage(other, name), other)
                    self.assertTrue(writer.set(zero_copy, KEYS[:3], indices_of(2, 7, 4)))
                    self.assertEqual(reader.storage_backend.batch_exists(KEYS), 3)
                    other.kv_buffer.zero_()
                    self.assertEqual(reader.get(zero_copy, KEYS[:4], indices_of(1, 2, 3, 5)), 3)
                    for source, target in ((2, 1), (7, 2), (4, 3)):
                        self.assertTrue(torch.equal(other.get_data_page(target * PAGE_TOKENS), pool.get_data_page(source * PAGE_TOKENS)))
                    self.assertEqual(int(other.get_data_page(5 * PAGE_TOKENS).count_nonzero()), 0)

    def test_single_pages(self):
        self.start()
        storage = self.storage(host_pool(), {"pqcached.lease_ms": 500})
        page = torch.rand(PAGE_BYTES // 2).to(torch.bfloat16)
        self.assertTrue(storage.set("key", page))
        self.assertTrue(storage.exists("key") and not storage.exists("other"))
        target = torch.zeros_like(page)
        self.assertIs(storage.get("key", target), target)
        self.assertTrue(torch.equal(target, page))
        self.assertIsNone(storage.get("other", target))
        self.assertIsNone(storage.get("key", torch.zeros(PAGE_BYTES // 2 + 1, dtype=torch.bfloat16)))
        self.assertIsNone(storage.get("key"))
        self.assertFalse(storage.set("none"))
        storage.clear()  # waits: its page is leased by exists()
        self.assertFalse(storage.exists("key"))

    def test_clear_drops_all_pages(self):
        self.start()
        storage = self.storage(host_pool(), {"pqcached.lease_ms": 0})
        self.assertTrue(storage.batch_set(KEYS[:2], [torch.ones(8), torch.ones(8)]))
        storage.clear()
        self.assertEqual(storage.batch_exists(KEYS), 0)

    def test_other_ranks_models_and_formats_have_other_pages(self):
        self.start()
        self.assertTrue(self.storage(host_pool()).set("key", torch.ones(8)))
        self.assertTrue(self.storage(host_pool()).exists("key"))
        for fields in ({"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"pp_size": 2}, {"attn_cp_size": 2}, {"model_name": "org/other"}):
            self.assertFalse(self.storage(host_pool(), **fields).exists("key"), fields)
        self.assertFalse(self.storage(host_pool("page_first")).exists("key"))
        self.assertFalse(self.storage(host_pool(dtype=torch.float16)).exists("key"))
        first, second = (self.storage(host_pool(), is_mla_model=True, tp_size=2, tp_rank=rank) for rank in range(2))
        self.assertTrue(first.set("mla", torch.ones(8)))
        self.assertTrue(second.exists("mla"))

    def test_pools_of_hybrid_models_are_found_as_in_the_file_storage(self):
        self.start()
        file = HiCacheFile(config(), f"{self.folder}/files")
        ours = self.storage(host_pool())
        pools = {PoolName.KV: host_pool(), PoolName.INDEXER: host_pool(), PoolName.SWA: host_pool(), PoolName.MAMBA: host_pool()}
        stored = {PoolName.KV: KEYS[:6], PoolName.INDEXER: KEYS[:5], PoolName.SWA: KEYS[2:4], PoolName.MAMBA: [KEYS[1], KEYS[3]]}
        answers = []
        for storage in (file, ours):
            for name, pool in pools.items():
                storage.register_mem_host_pool_v2(pool, name)
            pages = [PoolTransfer(name, indices_of(*range(len(keys))), keys=keys) for name, keys in stored.items()]
            answers.append([storage.batch_set_v2(pages)])
            for transfers in ([], [PoolTransfer(PoolName.INDEXER)],
                              [PoolTransfer(PoolName.SWA, keys=KEYS[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)],
                              [PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES),
                               PoolTransfer(PoolName.INDEXER)],
                              [PoolTransfer(PoolName.AUXILIARY_SWA)]):
                found = storage.batch_exists_v2(KEYS, transfers)
                answers[-1].append((found.kv_hit_pages, dict(found.extra_pool_hit_pages), list(found.restorable_prefix_pages)))
            asked = [PoolTransfer(PoolName.INDEXER, indices_of(8, 9, 10), keys=[KEYS[4], KEYS[7], KEYS[0]]),
                     PoolTransfer(PoolName.SWA, indices_of(8), keys=KEYS[:2])]
            answers[-1].append(storage.batch_get_v2(asked))
            pool = pools[PoolName.INDEXER]
            self.assertTrue(torch.equal(pool.get_data_page(8 * PAGE_TOKENS), pool.get_data_page(4 * PAGE_TOKENS)))
            self.assertTrue(torch.equal(pool.get_data_page(10 * PAGE_TOKENS), pool.get_data_page(0)))
        self.assertEqual(answers[0], answers[1])
        found = ours.batch_exists_v2(KEYS, [PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])
        self.assertEqual(found.kv_hit_pages, 0)

    def test_the_sidecar_evicts(self):
        self.start()
        storage = self.storage(host_pool(), {"pqcached.capacity_bytes": 1 << 20, "pqcached.lease_ms": 0})
        for number in range(100):
            self.assertTrue(storage.set(f"key {number}", torch.full((16384,), float(number))))
        self.assertFalse(storage.exists("key 0"))
        target = torch.zeros(16384)
        self.assertIsNotNone(storage.get("key 99", target))
        self.assertTrue(torch.equal(target, torch.full((16384,), 99.0)))

    def test_two_processes_share_pages(self):
        self.start()
        pool = host_pool()
        writer = Controller(self.storage(pool), pool)
        self.assertTrue(writer.set(False, KEYS[:2], indices_of(0, 1)))
        other = subprocess.run([sys.executable, __file__, str(sglang_case.daemons.BUILD), "--other", self.endpoint],
                               capture_output=True, text=True, check=True, timeout=300)
        self.assertEqual(other.stdout.splitlines()[-1], "2 True")

    def test_a_killed_sidecar_is_a_miss_and_no_failure(self):
        pool = host_pool()
        storage = self.storage(pool, {"pqcached.timeout_ms": 5000})
        controller = Controller(storage, pool)
        self.nothing_is_stored(storage, controller)
        daemon = self.start()
        self.assertTrue(controller.set(False, KEYS[:2], indices_of(0, 1)))
        daemon.stop(signal.SIGKILL)
        self.nothing_is_stored(storage, controller)
        os.unlink(f"{self.folder}/s")
        self.start()
        self.assertEqual(storage.batch_exists(KEYS), 0)
        self.assertTrue(controller.set(True, KEYS[:2], indices_of(0, 1)))
        self.assertEqual(controller.get(True, KEYS[:2], indices_of(2, 3)), 2)

    def nothing_is_stored(self, storage, controller):
        for zero_copy in (False, True):
            self.assertFalse(controller.set(zero_copy, KEYS[:2], indices_of(0, 1)))
            self.assertEqual(controller.get(zero_copy, KEYS[:2], indices_of(0, 1)), 0)
        self.assertEqual(storage.batch_exists(KEYS), 0)
        self.assertEqual(storage.batch_exists_v2(KEYS).kv_hit_pages, 0)
        storage.clear()

    def test_wrong_settings_are_named(self):
        for field, settings in (("capacity", {"pqcached.capacity": 1}), ("capacity_bytes", {"pqcached.capacity_bytes": "4gib"})):
            with self.assertRaises(InvalidArgument) as refused:
                self.storage(settings=settings)
            self.assertEqual(refused.exception.field, field)


def other_process(endpoint):
    pool, source = host_pool(), host_pool()
    pool.kv_buffer.zero_()
    count = Controller(storage_of(endpoint, pool), pool).get(False, KEYS[:3], indices_of(5, 6, 7))
    print(count, torch.equal(pool.get_data_page(6 * PAGE_TOKENS), source.get_data_page(PAGE_TOKENS)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--other"]:
        other_process(sys.argv[2])
    else:
        unittest.main()
