"""What tests of steps over one path share: rows, selections, and a client of that path."""

import numpy as np

from daemon import KEY_DIM, KV_HEADS, VALUE_DIM, Layer  # finds pqcached: first

import pqcached
from pqcached import Index, PathChoice, Selection, StepItem

TOKENS = 600
ALL = Selection(ratio=1.0, sink_tokens=4, window_tokens=32)
SOME = Selection(ratio=0.2, sink_tokens=4, window_tokens=32)
INDEX = Index.pq(4, 8)  # the default


def new_rows(count, seed):
    random = np.random.default_rng(seed)
    return (random.standard_normal((count, KV_HEADS, KEY_DIM), dtype=np.float32),
            random.standard_normal((count, KV_HEADS, VALUE_DIM), dtype=np.float32))


class OnePath:
    path = PathChoice.ANY

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client.close()
        cls.client = pqcached.Client(cls.daemon.endpoint, timeout_ms=60000, path=cls.path)
        cls.addClassCleanup(cls.client.close)

    def setUp(self):
        self.layer = Layer(TOKENS)

    def filled(self, tokens=TOKENS):
        sequence = self.sequence()
        sequence.ingest(0, 0, self.layer.keys[:tokens], self.layer.values[:tokens])
        sequence.build_index(INDEX, sink_tokens=4)
        return sequence

    def batch(self):
        """Two sequences of different lengths, and the queries of a step over them."""
        items = [StepItem(self.filled(tokens), tokens) for tokens in (TOKENS, TOKENS - 150)]
        return items, np.stack([self.layer.queries, -self.layer.queries])
