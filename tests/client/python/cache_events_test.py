"""Events of a cache against a real daemon, and the keys that they name. Usage: cache_events_test.py BUILD"""

import asyncio
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

    def test_asyncio_awaits_events_while_others_run(self):
        layer = Layer(TOKENS)
        for number, client in enumerate(self.clients):
            cache = self.cache((0, 1), client=client)
            ids = np.arange(TOKENS) + 5000 * (number + 1)
            expected = set(cache.prefix_keys(ids).keys)

            async def follow(reader):
                found = set()
                async for event in reader:
                    if event.kind == CacheEventKind.STORED:
                        found.add(event.key)
                    if expected <= found:
                        return

            async def run():
                with cache.events() as reader, cache.create_sequence(ids) as sequence:
                    following = asyncio.ensure_future(follow(reader))
                    await asyncio.sleep(0.05)  # the loop goes on: nothing has been ingested yet
                    self.assertFalse(following.done())
                    await sequence.ingest_async(0, {0: (layer.keys, layer.values), 1: (layer.keys, layer.values)})
                    await asyncio.wait_for(following, 60)

            asyncio.run(run())

    def test_a_cancelled_wait_loses_no_event(self):
        layer = Layer(TOKENS)
        ids = np.arange(TOKENS) + 9000
        cache = self.cache((0, 1))
        expected = set(cache.prefix_keys(ids).keys)

        async def run(reader, sequence):
            found = set()
            while await reader.next_async(timeout_ms=200):  # events of earlier sequences
                pass
            wait = asyncio.ensure_future(reader.next_async(timeout_ms=60000))
            await asyncio.sleep(0.05)
            wait.cancel()
            await asyncio.gather(wait, return_exceptions=True)
            self.assertTrue(wait.cancelled())
            self.assertEqual(await reader.next_async(timeout_ms=0), [])  # beside the wait of that call
            for number in range(2):
                sequence.ingest(number, 0, layer.keys, layer.values)
            while not expected <= found:
                events = await reader.next_async(timeout_ms=10000, capacity=2)
                self.assertLessEqual(len(events), 2)
                assert events, f"{len(expected - found)} events are lost"
                found.update(event.key for event in events)

        with cache.events() as reader, cache.create_sequence(ids) as sequence:
            asyncio.run(run(reader, sequence))
        with self.fails(pqcached.FailedPrecondition, "events"):
            asyncio.run(reader.next_async())

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
