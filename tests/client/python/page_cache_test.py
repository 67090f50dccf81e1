"""Page caches against a real daemon. Usage: page_cache_test.py BUILD"""

import hashlib
import unittest

import numpy as np

from daemon import BothPathsTest  # finds pqcached: first

import pqcached
from pqcached import PageOutcome


def key_of(number):
    return hashlib.sha256(str(number).encode()).digest()


class PageCacheTest(BothPathsTest):
    def test_pages_are_found_as_they_were_put(self):
        for number, client in enumerate(self.clients):
            cache = client.open_page_cache(f"pages-{number}", capacity_bytes=1 << 22)
            array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
            content = bytes(range(200))
            self.assertEqual(cache.put([(key_of(1), content), (key_of(2), array)]), [PageOutcome.STORED] * 2)
            self.assertEqual(cache.put([(key_of(1), b"other")]), [PageOutcome.PRESENT])
            self.assertEqual(cache.exists([key_of(1), key_of(2), key_of(3)], lease_ms=1), [200, 400_000, 0])
            self.assertEqual(cache.read(key_of(1)), content)
            self.assertIsNone(cache.read(key_of(3)))
            copy, small, none = np.zeros_like(array), bytearray(199), bytearray(5)
            self.assertEqual(cache.get([(key_of(2), copy), (key_of(1), small), (key_of(3), none)]),
                             [(PageOutcome.FOUND, 400_000), (PageOutcome.TOO_LARGE, 200), (PageOutcome.MISSING, 0)])
            np.testing.assert_array_equal(copy, array)
            self.assertEqual(small, bytearray(199))
            cache.close()
            with self.assertRaises(pqcached.FailedPrecondition):
                cache.exists([key_of(1)])

    def test_a_pool_that_is_full_of_leased_pages_has_no_room(self):
        cache = self.clients[0].open_page_cache("full", capacity_bytes=2 * 65536)
        self.assertEqual(cache.put([(key_of(1), b"one"), (key_of(2), b"two")]), [PageOutcome.STORED] * 2)
        cache.exists([key_of(1), key_of(2)], lease_ms=600_000)
        self.assertEqual(cache.put([(key_of(3), b"three")]), [PageOutcome.NO_ROOM])
        with self.assertRaises(pqcached.FailedPrecondition):
            cache.drop()

    def test_refusals_name_the_argument(self):
        cache = self.clients[0].open_page_cache("refusals", capacity_bytes=1 << 20)
        with self.assertRaises(pqcached.InvalidArgument) as refused:
            cache.put([(key_of(1), b"good"), (b"short", b"bad")])
        self.assertEqual(refused.exception.field, "pages[1].key_bytes")
        self.assertEqual(cache.exists([key_of(1)]), [0])
        for call in (lambda: cache.put([("text", b"content")]), lambda: cache.put([(key_of(1), 7)]),
                     lambda: cache.get([(key_of(1), b"read-only")]),
                     lambda: cache.get([(key_of(1), np.zeros((4, 4))[:, :2])])):
            with self.assertRaises(TypeError):
                call()
        cache.drop()
        with self.assertRaises(pqcached.NotFound):
            cache.exists([key_of(1)])


if __name__ == "__main__":
    unittest.main()
