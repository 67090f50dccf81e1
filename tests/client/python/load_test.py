"""Rows that are copied back into arrays, against a real daemon on both paths."""

import asyncio
import gc
import pathlib
import re
import time
import unittest
import weakref

import numpy as np

from daemon import KEY_DIM, KV_HEADS, VALUE_DIM, BothPathsTest, Layer, group, pqcached

TOKENS = 700


def mapped_bytes():
    """The pages of shared memory that this process has mapped: of the pool, those that it has read."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"^RssShmem:\s+(\d+) kB$", status, re.MULTILINE).group(1)) << 10


class LoadTest(BothPathsTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.layers = [Layer(TOKENS, seed=1), Layer(TOKENS, seed=2)]

    def filled(self):
        for client in self.clients:
            sequence = self.sequence((0, 1), client=client)
            for number, layer in enumerate(self.layers):
                sequence.ingest(number, 0, layer.keys, layer.values)
            yield sequence

    @staticmethod
    def empty(count=TOKENS):
        return (np.full((count, KV_HEADS, KEY_DIM), np.nan, np.float32),
                np.full((count, KV_HEADS, VALUE_DIM), np.nan, np.float32))

    def expect(self, arrays, number, begin=0, end=TOKENS):
        np.testing.assert_array_equal(arrays[0], self.layers[number].keys[begin:end])
        np.testing.assert_array_equal(arrays[1], self.layers[number].values[begin:end])

    def test_rows_reach_arrays_of_any_layout(self):
        for sequence in self.filled():
            arrays = {number: self.empty(500) for number in (0, 1)}
            sequence.load((100, 600), arrays)
            for number in arrays:
                self.expect(arrays[number], number, 100, 600)

            keys = np.zeros((KV_HEADS, TOKENS, KEY_DIM), np.float16)  # [heads, tokens, dim]
            memory = np.zeros((60, KV_HEADS, VALUE_DIM, 16), np.float32)  # [blocks, heads, dim, tokens]
            view = memory.transpose(0, 3, 1, 2)
            blocks = np.random.default_rng(3).permutation(60)[:44]
            sequence.load((0, TOKENS), {1: (keys.transpose(1, 0, 2), pqcached.Paged(view, blocks, TOKENS))})
            np.testing.assert_array_equal(keys.transpose(1, 0, 2), self.layers[1].keys.astype(np.float16))
            values = view[blocks].reshape(-1, KV_HEADS, VALUE_DIM)[:TOKENS]
            np.testing.assert_array_equal(values, self.layers[1].values)
            self.assertFalse(memory[np.setdiff1d(np.arange(60), blocks)].any())

    def test_a_prefetch_maps_the_rows_before_they_are_read(self):
        tokens = 6000
        layer = Layer(tokens)
        row_bytes = layer.keys.nbytes + layer.values.nbytes
        spec = {"model_fingerprint": "1", "groups": [group()], "capacity_bytes": 16 << 20}
        stored = self.client.open_cache("prefetched", **spec).create_sequence()
        for begin in range(0, tokens, 1000):
            stored.ingest(0, begin, layer.keys[begin:begin + 1000], layer.values[begin:begin + 1000])
        with pqcached.Client(self.daemon.endpoint, timeout_ms=60000, path=pqcached.PathChoice.ONLY_LOCAL) as client:
            with client.open_cache("prefetched", **spec) as cache, cache.attach(stored.id) as sequence:
                arrays = (np.ones_like(layer.keys), np.ones_like(layer.values))
                before = mapped_bytes()
                sequence.prefetch((0, tokens))
                until = time.monotonic() + 60
                while mapped_bytes() < before + row_bytes and time.monotonic() < until:
                    time.sleep(0.005)
                self.assertGreaterEqual(mapped_bytes(), before + row_bytes)
                sequence.load((0, tokens), {0: arrays})
                np.testing.assert_array_equal(arrays[0], layer.keys)
                np.testing.assert_array_equal(arrays[1], layer.values)
        stored.drop()

    def test_a_load_goes_on_layer_by_layer(self):
        for sequence in self.filled():
            sequence.prefetch((0, TOKENS))
            arrays = {number: self.empty() for number in (1, 0)}
            with sequence.begin_load((0, TOKENS), arrays) as load:
                for count, number in enumerate((1, 0), 1):
                    load.wait_layers(count)
                    self.expect(arrays[number], number)
                load.wait()
                while not load.done():
                    pass
                with self.fails(pqcached.InvalidArgument, "layer_count"):
                    load.wait_layers(3)
            self.assertTrue(load.closed)

    def test_arrays_live_until_a_load_is_closed(self):
        for sequence in self.filled():
            keys, values = self.empty()
            watched = weakref.ref(keys)
            load = sequence.begin_load((0, TOKENS), {0: (keys, values)})
            del keys, values
            gc.collect()
            self.assertIsNotNone(watched())
            load.cancel()
            load.close()
            del load
            gc.collect()
            self.assertIsNone(watched())

    def test_a_coroutine_awaits_a_load(self):
        for sequence in self.filled():
            arrays = {0: self.empty()}

            async def load(end):
                await sequence.load_async((0, end), arrays)

            asyncio.run(load(TOKENS))
            self.expect(arrays[0], 0)
            arrays = {0: self.empty(TOKENS + 1)}
            with self.fails(pqcached.OutOfRange, "tokens"):
                asyncio.run(load(TOKENS + 1))
            self.assertTrue(np.isnan(arrays[0][0]).all())

    def test_wrong_arguments_are_refused(self):
        for sequence in self.filled():
            keys, values = self.empty(10)
            read_only = keys.copy()
            read_only.flags.writeable = False
            for error, part, tokens, arrays in (
                    (pqcached.InvalidArgument, "layers[0].keys.shape[0]", (0, 9), (keys, values)),
                    (pqcached.InvalidArgument, "tokens", (3, 3), (keys, values)),
                    (pqcached.InvalidArgument, "layers[0].keys", (0, 10), (read_only, values)),
                    (TypeError, "layers[0].values", (0, 10), (keys, b"text"))):
                with self.fails(error, part):
                    sequence.load(tokens, {0: arrays})
                with self.fails(error, part):
                    sequence.begin_load(tokens, {0: arrays})
            with self.fails(pqcached.InvalidArgument, "layers[0].layer"):
                sequence.load((0, 10), {7: (keys, values)})
            self.assertTrue(np.isnan(keys).all() and np.isnan(values).all())


if __name__ == "__main__":
    unittest.main()
