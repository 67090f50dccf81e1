"""The L2 adapter for LMCache's server mode, made by LMCache's own factory. Usage: l2_adapter_test.py BUILD"""

import inspect
import os
import signal
import threading
import unittest

import lmcache_case  # first
from lmcache_case import CHUNK, CHUNK_BYTES, LMCacheTest, content_of, key_of, load, look_up, needs_lmcache, object_of, store

if lmcache_case.IS_INSTALLED:
    import torch
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from pqcached import InvalidArgument
    from pqcached_lmcache.l2_adapter import MOST_WAITING, L2Adapter
    from pqcached_lmcache.tasks import TaskQueue


def empty(shape=CHUNK):
    return object_of(torch.zeros(shape))


@needs_lmcache
class AdapterTest(LMCacheTest):
    def test_each_method_has_the_parameters_of_the_installed_base_class(self):
        for name, method in vars(L2Adapter).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                base = getattr(L2AdapterInterface, name)
                self.assertEqual(list(inspect.signature(method).parameters), list(inspect.signature(base).parameters), name)
        self.assertEqual(L2Adapter.__abstractmethods__, frozenset())

    def test_objects_are_loaded_as_they_were_stored(self):
        self.start()
        adapter = self.adapter()
        keys = [key_of(number) for number in range(5)]
        result = store(adapter, keys[:3], [object_of(content_of(number)) for number in range(3)])
        self.assertTrue(result.is_successful())
        self.assertEqual(result.bytes_transferred(), 3 * CHUNK_BYTES)
        self.assertEqual(look_up(adapter, [keys[4], *keys[:4]]), [False, True, True, True, False])
        targets = [empty() for _ in range(5)]
        self.assertEqual(load(adapter, [keys[2], keys[3], keys[0], keys[4], keys[1]], targets), [True, False, True, False, True])
        for number, target in ((2, targets[0]), (0, targets[2]), (1, targets[4])):
            self.assertTrue(torch.equal(target.tensor, content_of(number)))
        adapter.submit_unlock(keys)
        self.assertEqual(adapter.pop_completed_store_tasks(), {})

    def test_results_are_taken_once_and_events_are_distinct(self):
        self.start()
        adapter = self.adapter()
        task = adapter.submit_lookup_and_lock_task([key_of(1)], {})
        lmcache_case.wait_for_event(adapter.get_lookup_and_lock_event_fd())
        self.assertIsNotNone(adapter.query_lookup_and_lock_result(task))
        self.assertIsNone(adapter.query_lookup_and_lock_result(task))
        self.assertIsNone(adapter.query_load_result(task + 1))
        fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
        self.assertEqual(len(fds), 3)

    def test_a_key_is_all_of_its_fields(self):
        self.start()
        adapter = self.adapter()
        self.assertTrue(store(adapter, [key_of(1)], [object_of(content_of(1))]).is_successful())
        others = [key_of(1, **fields) for fields in ({"model_name": "org/model2"}, {"kv_rank": 1}, {"object_group_id": 1},
                                                     {"cache_salt": "tenant"}, {"chunk_hash": b"12345678"})]
        self.assertEqual(look_up(adapter, [key_of(1), *others]), [True] + [False] * 5)

    def test_an_object_of_another_size_is_not_loaded(self):
        self.start()
        adapter = self.adapter()
        self.assertTrue(store(adapter, [key_of(1)], [object_of(content_of(1))]).is_successful())
        for shape in ((2, 4, 15, 64), (2, 4, 17, 64)):
            self.assertEqual(load(adapter, [key_of(1)], [empty(shape)]), [False])

    def test_objects_larger_than_a_page_are_stored(self):
        self.start()
        adapter = self.adapter()
        large = content_of(1, (2, 4, 1024, 600))  # 19 MiB
        self.assertTrue(store(adapter, [key_of(1)], [object_of(large)]).is_successful())
        self.assertEqual(look_up(adapter, [key_of(1)]), [True])
        target = empty(large.shape)
        self.assertEqual(load(adapter, [key_of(1)], [target]), [True])
        self.assertTrue(torch.equal(target.tensor, large))

    def test_without_a_sidecar_nothing_is_stored_or_found(self):
        adapter = self.adapter(timeout_ms=5000)
        self.assertTrue(adapter.report_status()["is_healthy"])
        self.assertFalse(store(adapter, [key_of(1)], [object_of(content_of(1))]).is_successful())
        self.assertEqual(look_up(adapter, [key_of(1)]), [False])
        self.assertEqual(load(adapter, [key_of(1)], [empty()]), [False])
        self.assertFalse(adapter.report_status()["is_healthy"])
        daemon = self.start()
        self.assertTrue(store(adapter, [key_of(1)], [object_of(content_of(1))]).is_successful())
        self.assertTrue(adapter.report_status()["is_healthy"])
        daemon.stop(signal.SIGKILL)
        self.assertEqual(look_up(adapter, [key_of(1)]), [False])
        os.unlink(f"{self.folder}/s")
        self.start()
        self.assertEqual(look_up(adapter, [key_of(1)]), [False])
        self.assertTrue(store(adapter, [key_of(1)], [object_of(content_of(1))]).is_successful())

    def test_a_task_that_raises_has_failed(self):
        self.start()
        adapter = self.adapter()
        self.assertFalse(store(adapter, [key_of(1), key_of(2)], [object_of(content_of(1))]).is_successful())
        self.assertEqual(load(adapter, [key_of(1)], []), [False])
        self.assertTrue(store(adapter, [key_of(1)], [object_of(content_of(1))]).is_successful())

    def test_wrong_parameters_are_named(self):
        for field, parameters in (("capacity", {"capacity": 1}), ("capacity_bytes", {"capacity_bytes": -1})):
            with self.assertRaises(InvalidArgument) as refused:
                self.adapter(**parameters)
            self.assertEqual(refused.exception.field, field)


@needs_lmcache
class TaskQueueTest(unittest.TestCase):
    def test_tasks_beyond_the_limit_fail_at_once(self):
        go, done = threading.Event(), threading.Semaphore(0)
        queue = TaskQueue("test", done.release, 2)
        tasks = [queue.submit(lambda: go.wait(60), lambda: "failed") for _ in range(3)]
        done.acquire()
        self.assertEqual([queue.take(task) for task in tasks], [None, None, "failed"])
        go.set()
        done.acquire()
        done.acquire()
        self.assertEqual([queue.take(task) for task in tasks], [True, True, None])
        queue.close()
        self.assertEqual(queue.take(queue.submit(lambda: "done", lambda: "failed")), "failed")
        self.assertLess(MOST_WAITING, 1000)


if __name__ == "__main__":
    unittest.main()
