"""A scheduler and a worker of an engine in two processes, over a real daemon on both paths. Usage: attach_test.py BUILD"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

from daemon import BUILD, KEY_DIM, KV_HEADS, VALUE_DIM, Layer, children, group, pqcached, running

TOKENS, PREFIX = 500, 384
IDS = np.arange(1, PREFIX + 1, dtype=np.uint32)
LAYER = Layer(TOKENS)
PATHS = (pqcached.PathChoice.ONLY_LOCAL, pqcached.PathChoice.ONLY_REMOTE)


def open_cache(client):
    """Room for about 2700 tokens."""
    return client.open_cache("attach", model_fingerprint="m", groups=[group()], capacity_bytes=2 << 20)


def serve(endpoint, path, sequence_id, file):
    """The worker: saves the rows that it finds in the sequence, and stores those of the other tokens."""
    with pqcached.Client(endpoint, timeout_ms=60000, path=pqcached.PathChoice[path]) as client:
        with open_cache(client) as cache, cache.attach(int(sequence_id)) as sequence:
            tokens = sequence.shared_tokens
            keys = np.zeros((tokens, KV_HEADS, KEY_DIM), np.float32)
            values = np.zeros((tokens, KV_HEADS, VALUE_DIM), np.float32)
            sequence.load((0, tokens), {0: (keys, values)})
            sequence.ingest(0, tokens, LAYER.keys[tokens:], LAYER.values[tokens:])
    np.savez(file, keys=keys, values=values)
    print(json.dumps({"process": os.getpid(), "parent": os.getppid()}))


class AttachTest(unittest.TestCase):
    def store(self, cache, ids, layer=LAYER):
        """Stores a prompt, of which a cached prefix remains."""
        with cache.create_sequence(ids) as sequence:
            sequence.ingest(0, 0, layer.keys[:len(ids)], layer.values[:len(ids)])

    def evict_prefixes(self, cache):
        """Stores other prompts, of several times the cache's room."""
        for number in range(1, 21):
            self.store(cache, IDS + 1000 * number)

    def serve(self, endpoint, path, sequence):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "rows.npz"
            done = subprocess.run([sys.executable, __file__, BUILD, "serve", endpoint, path.name, str(sequence.id), file],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
                                  preexec_fn=children.end_with_parent)
            self.assertEqual(0, done.returncode, done.stderr)
            return json.loads(done.stdout), dict(np.load(file))

    def test_a_worker_finds_the_rows_that_a_scheduler_has_planned_with(self):
        for path in PATHS:
            with self.subTest(path=path), running() as daemon:
                with pqcached.Client(daemon.endpoint, timeout_ms=60000, path=path) as client, open_cache(client) as cache:
                    self.store(cache, IDS)
                    matched = cache.match_prefix(IDS)
                    self.assertEqual(PREFIX, matched)
                    with cache.create_sequence(IDS, at_least_tokens=matched) as planned:
                        self.evict_prefixes(cache)
                        worker, rows = self.serve(daemon.endpoint, path, planned)
                        self.assertNotEqual(os.getpid(), worker["process"])
                        self.assertEqual(os.getpid(), worker["parent"])
                        np.testing.assert_array_equal(rows["keys"], LAYER.keys[:matched])
                        np.testing.assert_array_equal(rows["values"], LAYER.values[:matched])
                        self.assertEqual(TOKENS, planned.describe().token_count)

    def test_without_a_sequence_the_rows_go_before_a_worker_comes(self):
        with running() as daemon, pqcached.Client(daemon.endpoint, timeout_ms=60000) as client, open_cache(client) as cache:
            self.store(cache, IDS)
            matched = cache.match_prefix(IDS)
            self.evict_prefixes(cache)
            self.assertLess(cache.match_prefix(IDS), matched)
            with self.assertRaisesRegex(pqcached.NotFound, "at_least_tokens"):
                cache.create_sequence(IDS, at_least_tokens=matched)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        unittest.main()
