"""Events of a cache against a real daemon, and the keys that they name. Usage: cache_events_test.py BUILD"""

import hashlib
import unittest

import numpy as np

from daemon import BothPathsTest, Layer  # finds pqcached: first

import pqcached
from pqcached import CacheEventKind

TOKENS = 700


def picture_of(reader, count):
    """Reads events until `count` keys are known. Returns key to parent, and the last event."""
    parents, event = {}, None
    while event is None or len(parents) != count:
        events = reader.next(timeout_ms=60000)
        assert events, "no events"
        for event in events:
            if event.kind == CacheEventKind.CLEARED:
                parents.clear()
            elif event.kind == CacheEventKind.STORED:
                parents[event.key] = event.parent
            else:
                parents.pop(event.key, None)
    return parents, event


class CacheEventsTest(BothPathsTest):
    def test_a_router_computes_the_keys_that_events_name(self):
        layer = Layer(TOKENS)
        for number, client in enumerate(self.clients):
            ids = np.arange(TOKENS) + 1000 * number
            cache = self.cache(client=client)
            prompt = cache.prefix_keys(ids)
            key, expected = prompt.root, []
            for step in range(TOKENS // 128):
                names = ids[128 * step:128 * (step + 1)].astype("<u4").tobytes()
                key = hashlib.sha256(key + names).digest()
                expected.append(key)
            self.assertEqual(prompt.keys, expected)
            self.assertNotEqual(cache.prefix_keys(ids, extra_key=b"other").root, prompt.root)

            with cache.events() as reader:
                after, last = picture_of(reader, 5 * number)
                self.assertEqual((last.tenant, last.cache), ("default", "F32-1-layers"))
                with cache.create_sequence(ids) as sequence:
                    sequence.ingest(0, 0, layer.keys, layer.values)
                    while not set(expected) <= set(after):
                        for event in reader.next(timeout_ms=60000):
                            self.assertEqual(event.kind, CacheEventKind.STORED)
                            after[event.key] = event.parent
                            last = event
                self.assertEqual([after[key] for key in expected], [prompt.root, *expected[:-1]])
                self.assertEqual(last.token_end, 640)
            with cache.events(last.epoch, last.number) as reader:  # what follows, without CLEARED
                for event in reader.next(timeout_ms=0):
                    self.assertGreater(event.number, last.number)

    def test_content_keys_have_keys(self):
        prompt = self.cache().prefix_keys(content_keys=bytes(range(32)))
        first = hashlib.sha256(prompt.root + bytes(range(16))).digest()
        self.assertEqual(prompt.keys, [first, hashlib.sha256(first + bytes(range(16, 32))).digest()])

    def test_iterating_waits_for_events(self):
        with self.cache().events() as reader:
            self.assertEqual(next(iter(reader)).kind, CacheEventKind.CLEARED)

    def test_refusals_name_the_argument(self):
        cache = self.cache()
        with cache.events() as reader:
            with self.fails(pqcached.InvalidArgument, "capacity"):
                reader.next(capacity=0)
        with self.fails(pqcached.FailedPrecondition, "events"):
            reader.next()
        with self.fails(pqcached.InvalidArgument, "epoch"):
            cache.events(epoch=-1)


if __name__ == "__main__":
    unittest.main()
