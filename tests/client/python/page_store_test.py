"""The store of opaque pages against real daemons. Usage: page_store_test.py BUILD"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import unittest

import numpy as np

import daemon as daemons  # finds pqcached: first

import pqcached
from pqcached.page_store import MAX_PAGE_BYTES, PART_BYTES, PageStore

TIMEOUT_MS = 60000  # the machine may be slow; tests of a dead sidecar have a store of their own


def content_of(number, size_bytes=100_000):
    return np.random.default_rng(number).integers(0, 256, size_bytes, dtype=np.uint8)


def store_of(endpoint, name="pages", capacity_bytes=64 << 20, **named):
    return PageStore(endpoint, name, capacity_bytes=capacity_bytes, **{"timeout_ms": TIMEOUT_MS, "retry_seconds": 0, **named})


def read(store, key, size_bytes=100_000):
    target = np.zeros(size_bytes, np.uint8)
    return target if store.get([(key, target)])[0] else None


def read_elsewhere(endpoint, answers):
    store = store_of(endpoint)
    answers.put([store.put([("theirs", content_of(2))]), bytes(read(store, "ours"))])
    store.close()


class PageStoreTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        context = daemons.running()
        cls.endpoint = context.__enter__().endpoint
        cls.addClassCleanup(context.__exit__, None, None, None)

    def store(self, name, **named):
        store = store_of(self.endpoint, name, **named)
        self.addCleanup(store.close)
        return store

    def test_pages_are_found_as_they_were_put(self):
        store = self.store("found")
        pages = [(f"key {number}", content_of(number, size)) for number, size in enumerate((1, 65536, 300_000))]
        self.assertEqual(store.put(pages), [True] * 3)
        self.assertEqual(store.put([("key 0", b"another content")]), [True])
        self.assertEqual(store.sizes(["key 0", "none", "key 1", "key 2"]), [1, 0, 65536, 300_000])
        for key, content in pages:
            np.testing.assert_array_equal(read(store, key, content.nbytes), content)
        self.assertEqual(store.get([("none", bytearray(5)), ("key 1", bytearray(65536))]), [False, True])
        counts = store.status()
        self.assertTrue(counts["available"])
        self.assertEqual([counts[name] for name in ("stored", "refused", "found", "missing", "failures")], [4, 0, 4, 1, 0])

    def test_a_buffer_of_another_size_is_a_miss(self):
        store = self.store("sizes")
        store.put([("key", content_of(1, 1000)), ("large", content_of(2, PART_BYTES + 1000))])
        self.assertEqual(store.get([("key", bytearray(999)), ("key", bytearray(1001)), ("large", bytearray(PART_BYTES)),
                                    ("large", bytearray(PART_BYTES + 999)), ("key", bytearray())]), [False] * 5)
        self.assertEqual(store.put([("empty", b""), ("key", b"x")]), [False, True])
        self.assertEqual(store.sizes(["empty"]), [0])

    def test_too_large_pages_are_refused_without_reading_them(self):
        store = self.store("too-large")
        page = np.broadcast_to(np.uint8(0), MAX_PAGE_BYTES + 1)  # no memory
        with self.assertRaises(TypeError):
            store.put([("key", page)])
        with tempfile.TemporaryFile() as file:
            file.truncate(MAX_PAGE_BYTES + 1)
            mapped = np.memmap(file, np.uint8, "r")
            self.assertEqual(store.put([("key", mapped), ("small", b"small")]), [False, True])
        self.assertEqual(store.status()["refused"], 1)

    def test_long_pages_are_stored_in_parts(self):
        store = self.store("parts", capacity_bytes=96 << 20)
        sizes = {"exactly": PART_BYTES, "two": PART_BYTES + 1, "double": 2 * PART_BYTES}
        pages = [(key, content_of(len(key), size)) for key, size in sizes.items()]
        self.assertEqual(store.put(pages), [True] * 3)
        self.assertEqual(store.sizes(list(sizes), lease_ms=1), list(sizes.values()))
        for key, content in pages:
            np.testing.assert_array_equal(read(store, key, content.nbytes), content)

    def test_a_page_whose_parts_were_evicted_is_missing(self):
        store = self.store("evicted-parts", capacity_bytes=40 << 20)
        first, second = content_of(1, PART_BYTES + 5_000_000), content_of(2, PART_BYTES + 5_000_000)
        self.assertEqual(store.put([("first", first)]), [True])
        self.assertEqual(store.put([("second", second)]), [True])
        self.assertEqual(store.sizes(["first", "second"]), [0, second.nbytes])
        self.assertIsNone(read(store, "first", first.nbytes))
        self.assertEqual(store.put([("first", first)]), [True])
        np.testing.assert_array_equal(read(store, "first", first.nbytes), first)

    def test_the_sidecar_evicts_what_was_used_longest_ago(self):
        store = self.store("evicted", capacity_bytes=16 * 65536)
        for number in range(100):
            self.assertEqual(store.put([(f"key {number}", content_of(number, 65536))]), [True])
            np.testing.assert_array_equal(read(store, "key 0", 65536), content_of(0, 65536))
        kept = store.sizes([f"key {number}" for number in range(100)])
        self.assertLess(sum(kept), 100 * 65536)
        first = next(number for number in range(1, 100) if kept[number])
        self.assertEqual(kept, [65536] + [0] * (first - 1) + [65536] * (100 - first))

    def test_a_store_that_is_full_of_leased_pages_refuses(self):
        store = self.store("leased", capacity_bytes=2 * 65536)
        store.put([("one", b"1"), ("two", b"2")])
        store.sizes(["one", "two"], lease_ms=600_000)
        self.assertEqual(store.put([("three", b"3")]), [False])
        self.assertFalse(store.clear())
        self.assertEqual(store.get([("one", bytearray(1))]), [True])

    def test_many_keys_of_one_call(self):
        store = self.store("many")
        keys = [f"key {number}" for number in range(5000)]
        self.assertEqual(store.put([(keys[4999], b"last")]), [True])
        self.assertEqual(store.sizes(keys), [0] * 4999 + [4])

    def test_clear_is_seen_by_other_stores(self):
        one, other = self.store("cleared"), self.store("cleared")
        one.put([("key", b"content")])
        self.assertEqual(other.sizes(["key"]), [7])
        self.assertTrue(one.clear())
        self.assertEqual(other.put([("new", b"another")]), [True])
        self.assertEqual(other.sizes(["key", "new"]), [0, 7])
        self.assertEqual(one.sizes(["new"]), [7])
        self.assertTrue(other.clear() and one.clear())

    def test_two_processes_share_pages(self):
        store = self.store("pages")
        store.put([("ours", content_of(1))])
        spawn = multiprocessing.get_context("spawn")
        answers = spawn.Queue()
        process = spawn.Process(target=read_elsewhere, args=(self.endpoint, answers))
        process.start()
        put, ours = answers.get(timeout=60)
        process.join(60)
        self.assertEqual((put, ours), ([True], content_of(1).tobytes()))
        np.testing.assert_array_equal(read(store, "theirs"), content_of(2))

    def test_a_fork_has_a_client_of_its_own(self):
        store = self.store("fork")
        store.put([("ours", b"ours")])
        child = os.fork()
        if not child:
            store.sizes(["ours"])  # the parent's client refuses
            os._exit(0 if store.sizes(["ours"]) == [4] else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(store.sizes(["ours"]), [4])

    def test_threads_share_a_store(self):
        store, wrong = self.store("threads"), []

        def work(thread):
            for number in range(20):
                key, content = f"{number % 7}", content_of(number % 7)
                if not store.put([(key, content)])[0] or not np.array_equal(read(store, key), content):
                    wrong.append((thread, number))
        threads = [threading.Thread(target=work, args=(each,)) for each in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertEqual(wrong, [])

    def test_wrong_arguments_are_named(self):
        for field, settings in (("capacity_bytes", {}), ("capacity_bytes", {"capacity_bytes": 0}),
                                ("capacity_bytes", {"capacity_bytes": "4gib"}), ("size", {"capacity_bytes": 1, "size": 2}),
                                ("timeout_ms", {"capacity_bytes": 1, "timeout_ms": -1}),
                                ("endpoint", {"capacity_bytes": 1, "endpoint": 7})):
            with self.assertRaises(pqcached.InvalidArgument) as refused:
                PageStore.from_settings(settings, "name")
            self.assertEqual(refused.exception.field, field)
        store = self.store("arguments")
        for call in (lambda: store.put([("key", "text")]), lambda: store.get([("key", b"read-only")])):
            with self.assertRaises(TypeError):
                call()


class FailureTest(unittest.TestCase):
    """Each test has a daemon of its own, and ends it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def start(self, *flags):
        daemon = daemons.Daemon(self.folder, flags)
        self.addCleanup(daemon.stop)
        return daemon

    def all_missing(self, store):
        self.assertEqual(store.put([("key", b"content"), ("long", bytes(PART_BYTES + 1))]), [False] * 2)
        self.assertEqual(store.get([("key", bytearray(7)), ("long", bytearray(PART_BYTES + 1))]), [False] * 2)
        self.assertEqual(store.sizes(["key", "long"]), [0, 0])
        self.assertFalse(store.clear())
        self.assertFalse(store.status()["available"])
        self.assertNotEqual(store.status()["failure"], "")

    def test_an_absent_sidecar_is_a_miss_until_it_is_there(self):
        store = store_of(f"unix://{self.folder}/s")
        self.addCleanup(store.close)
        with self.assertLogs("pqcached.page_store", "WARNING") as logged:
            self.all_missing(store)
        self.assertEqual(len(logged.records), 1)
        self.start()
        self.assertEqual(store.put([("key", b"content")]), [True])
        self.assertEqual(store.status()["failure"], "")

    def test_the_sidecar_is_not_called_again_before_the_retry_time(self):
        store = store_of(f"unix://{self.folder}/s", retry_seconds=3600)
        self.addCleanup(store.close)
        self.all_missing(store)
        self.start()
        self.all_missing(store)
        self.assertEqual(store.status()["failures"], 1)

    def test_a_sidecar_without_room_for_the_store_is_a_miss(self):
        daemon = self.start()
        store = store_of(daemon.endpoint, capacity_bytes=1 << 40)
        self.addCleanup(store.close)
        self.all_missing(store)
        self.assertIn("RESOURCE_EXHAUSTED", store.status()["failure"])

    def test_a_cache_of_rows_of_the_name_is_a_miss(self):
        daemon = self.start()
        with pqcached.Client(daemon.endpoint, timeout_ms=TIMEOUT_MS) as client:
            client.open_cache("pages", model_fingerprint="m", groups=[daemons.group()], capacity_bytes=16 << 20)
            store = store_of(daemon.endpoint)
            self.addCleanup(store.close)
            self.all_missing(store)
        self.assertIn("FAILED_PRECONDITION", store.status()["failure"])

    def test_pages_are_gone_with_a_killed_daemon_and_stored_again_in_the_next(self):
        daemon = self.start()
        store = store_of(daemon.endpoint, timeout_ms=2000)  # short for the daemon that does not answer
        self.addCleanup(store.close)
        patient = store_of(daemon.endpoint)
        self.addCleanup(patient.close)
        self.assertEqual(patient.put([("key", content_of(1))]), [True])
        daemon.stop(signal.SIGKILL)
        self.all_missing(store)
        os.unlink(f"{self.folder}/s")
        self.start()
        fresh = store_of(daemon.endpoint)
        self.addCleanup(fresh.close)
        self.assertIsNone(read(fresh, "key"))
        self.assertEqual(fresh.put([("key", content_of(1))]), [True])
        end = time.monotonic() + 60
        while (found := read(store, "key")) is None and time.monotonic() < end:
            time.sleep(0.1)
        np.testing.assert_array_equal(found, content_of(1))

    def test_a_page_cache_that_another_thread_has_closed_is_no_miss(self):
        daemon = self.start()
        store = store_of(daemon.endpoint)
        self.addCleanup(store.close)
        self.assertEqual(store.put([("key", content_of(1))]), [True])
        open_cache, closed = store._open, []

        def close_once():
            cache = open_cache()
            if not closed:
                closed.append(cache)
                cache.close()
            return cache

        store._open = close_once
        np.testing.assert_array_equal(read(store, "key"), content_of(1))
        self.assertEqual(store.status()["failures"], 0)

    def test_the_first_call_after_a_restart_is_served(self):
        daemon = self.start()
        store = store_of(daemon.endpoint)
        self.addCleanup(store.close)
        self.assertEqual(store.put([("key", content_of(1))]), [True])
        daemon.stop()
        self.start()
        self.assertEqual(store.put([("key", content_of(1))]), [True])
        self.assertEqual(store.status()["failures"], 0)

    def test_a_closed_store_is_a_miss(self):
        daemon = self.start()
        store = store_of(daemon.endpoint)
        store.put([("key", b"content")])
        store.close()
        self.assertEqual(store.sizes(["key"]), [0])
        self.assertEqual(store.put([("key", b"content")]), [False])


if __name__ == "__main__":
    unittest.main()
