"""Layers whose rows are values, beside layers with keys, against a real daemon on both paths. Usage: values_layer_test.py BUILD"""

import asyncio
import unittest

import numpy as np

from daemon import KEY_DIM, KV_HEADS, QUERY_HEADS, VALUE_DIM, BothPathsTest, Layer, group  # finds pqcached: first

import pqcached
from pqcached import DType, Index, LayerKind, Paged, RowPart, Selection, StepItem

TOKENS = 700
VALUES, KEYS = 0, 1  # the layers
KV_GROUP = QUERY_HEADS // KV_HEADS


def values_group(**named):
    return pqcached.LayerGroup([VALUES], KV_HEADS, QUERY_HEADS, 0, VALUE_DIM, DType.F32, kind=LayerKind.VALUES, **named)


class ValuesLayerTest(BothPathsTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.layer = Layer(TOKENS + 2)

    def open(self, client, name="values"):
        cache = client.open_cache(name, model_fingerprint=name, groups=[values_group(), group([KEYS])], capacity_bytes=16 << 20)
        self.addCleanup(cache.close)
        return cache

    def filled(self):
        """A sequence for each path: one layer without keys, in pieces, and one with keys."""
        for client in self.clients:
            sequence = self.open(client).create_sequence()
            self.addCleanup(sequence.close)
            for begin, end in ((0, 300), (300, TOKENS)):
                sequence.ingest(VALUES, begin, None, self.layer.values[begin:end])
            sequence.ingest(KEYS, 0, self.layer.keys[:TOKENS], self.layer.values[:TOKENS])
            yield client, sequence

    def attend(self, client, sequence, position):
        """The best 40 tokens of each query head, by the engine's own keys."""
        logits = self.layer.logits()[:, :position].astype(np.float32)
        best = np.argsort(-logits, axis=1)[:, :40]
        lists = np.full((1, KV_HEADS, 40 * KV_GROUP), -1, np.int32)
        given = np.full((1, QUERY_HEADS, 40 * KV_GROUP), -np.inf, np.float32)
        expected = np.zeros((QUERY_HEADS, VALUE_DIM))
        for head in range(QUERY_HEADS):
            kv_head = head // KV_GROUP
            union = np.unique(best[kv_head * KV_GROUP:(kv_head + 1) * KV_GROUP])
            lists[0, kv_head, :len(union)] = union
            given[0, head, :len(union)] = np.where(np.isin(union, best[head]), logits[head, union], -np.inf)
            shares = np.exp(logits[head, best[head]] - np.logaddexp.reduce(logits[head, best[head]]))
            expected[head] = shares @ self.layer.values[best[head], kv_head]
        with client.begin_step([StepItem(sequence, position)]) as step:
            found = step.attend_positions(VALUES, None, lists, logits=given)
        np.testing.assert_allclose(found.output[0], expected, atol=1e-5)

    def test_values_are_weighted_by_the_logits_of_the_engine(self):
        for client, sequence in self.filled():
            self.attend(client, sequence, TOKENS)
            # One token in a step, and one by append.
            with client.begin_step([StepItem(sequence, TOKENS)]) as step:
                step.end({VALUES: (None, self.layer.values[TOKENS:TOKENS + 1]),
                          KEYS: (self.layer.keys[TOKENS:TOKENS + 1], self.layer.values[TOKENS:TOKENS + 1])})
            sequence.flush()
            rest = slice(TOKENS + 1, TOKENS + 2)
            self.assertEqual(sequence.append(TOKENS + 1, {VALUES: (None, self.layer.values[rest]),
                                                          KEYS: (self.layer.keys[rest], self.layer.values[rest])}), TOKENS + 2)
            self.attend(client, sequence, TOKENS + 2)

    def test_other_layers_are_decoded_while_rows_wait_to_be_stored(self):
        selection = Selection(ratio=0.5, sink_tokens=4, window_tokens=64, index=Index.flat())
        for client, sequence in self.filled():
            for token in range(TOKENS, TOKENS + 2):
                rows = self.layer.keys[token:token + 1], self.layer.values[token:token + 1]
                with client.begin_step([StepItem(sequence, token)], selection) as step:
                    step.decode(KEYS, self.layer.queries[None], *rows)
                    step.end({VALUES: (None, rows[1])})
            sequence.flush()
            self.assertEqual(sequence.describe().token_count, TOKENS + 2)
            with self.fails(pqcached.FailedPrecondition, "sequence: layer 0 is of kind PQC_LAYERS_VALUES"):
                sequence.decoder(selection)

    def test_rows_are_values(self):
        for _, sequence in self.filled():
            info = sequence.describe()
            self.assertEqual(info.row_bytes, TOKENS * KV_HEADS * (VALUE_DIM + KEY_DIM + VALUE_DIM) * 4)
            by_head = self.layer.values.transpose(1, 0, 2)
            for part in (RowPart.ROW, RowPart.VALUE):
                np.testing.assert_array_equal(sequence.fetch_blocks(VALUES, (200, 400), part), by_head[:, 200:400])
            positions = np.array([[3, 650, 9], [1, 2, 699]])
            np.testing.assert_array_equal(sequence.fetch_tokens(VALUES, positions, RowPart.VALUE),
                                          np.stack([by_head[h, positions[h]] for h in range(KV_HEADS)]))
            loaded = np.zeros((500, KV_HEADS, VALUE_DIM), np.float32)
            pages = np.zeros((60, 16, KV_HEADS, VALUE_DIM), np.float16)
            keys, values = np.zeros((500, KV_HEADS, KEY_DIM), np.float32), np.zeros((500, KV_HEADS, VALUE_DIM), np.float32)
            sequence.load((100, 600), {VALUES: (None, loaded), KEYS: (keys, values)})
            for array in (loaded, values):
                np.testing.assert_array_equal(array, self.layer.values[100:600])
            np.testing.assert_array_equal(keys, self.layer.keys[100:600])
            asyncio.run(sequence.load_async((100, 600), {VALUES: (None, Paged(pages, np.arange(5, 37), 500))}))
            np.testing.assert_array_equal(pages[5:37].reshape(-1, KV_HEADS, VALUE_DIM)[:500],
                                          self.layer.values[100:600].astype(np.float16))

    def test_the_other_layers_have_indexes(self):
        for client, sequence in self.filled():
            sequence.build_index(Index.pq(2, 4), iterations=1)
            selection = Selection(retrieved_tokens=50, index=Index.pq(2, 4))
            self.assertEqual(sequence.topk(KEYS, TOKENS - 1, self.layer.queries, selection).count, 50)
            alone = client.open_cache("alone", model_fingerprint="alone", groups=[values_group()], capacity_bytes=4 << 20)
            with alone, alone.create_sequence() as other:
                other.ingest(VALUES, 0, None, self.layer.values)
                with self.fails(pqcached.FailedPrecondition, "index"):
                    other.build_index(Index.pq(2, 4))

    def test_what_needs_keys_is_refused_by_name(self):
        queries, refused = self.layer.queries, pqcached.FailedPrecondition
        for client, sequence in self.filled():
            calls = ((lambda: sequence.topk(VALUES, TOKENS - 1, queries, Selection(retrieved_tokens=9, index=Index.flat())), "query.layer"),
                     (lambda: sequence.attend(VALUES, TOKENS - 1, queries, Selection(retrieved_tokens=9, index=Index.flat())), "query.layer"),
                     (lambda: sequence.score(VALUES, TOKENS - 1, queries, (0, 9), Index.flat()), "query.layer"),
                     (lambda: sequence.attend_range(VALUES, TOKENS - 1, queries[None], (0, 9)), "query.layer"),
                     (lambda: sequence.attend_positions(VALUES, TOKENS - 1, queries, np.array([[1], [2]])), "query.layer"),
                     (lambda: sequence.fetch_blocks(VALUES, (0, 9), RowPart.KEY), "part"),
                     (lambda: sequence.fetch_tokens(VALUES, np.array([[1], [2]]), RowPart.KEY), "part"))
            for call, field in calls:
                with self.fails(refused, field):
                    call()
            with client.begin_step([StepItem(sequence, TOKENS)]) as step:
                with self.fails(refused, "layer: is of kind PQC_LAYERS_VALUES"):
                    step.attend_positions(VALUES, queries[None], np.array([[[1], [2]]]))
                with self.fails(refused, "layer: is of kind PQC_LAYERS_VALUES"):
                    step.attend(VALUES, queries[None], Selection(retrieved_tokens=9, index=Index.flat()))

    def test_keys_and_dims_that_do_not_fit_are_refused_by_name(self):
        invalid = pqcached.InvalidArgument
        for client, sequence in self.filled():
            with self.fails(invalid, "keys: must be empty"):
                sequence.ingest(VALUES, TOKENS, self.layer.keys[:1], self.layer.values[:1])
            with self.fails(invalid, "keys: must not be NULL"):
                sequence.ingest(KEYS, TOKENS, None, self.layer.values[:1])
            with client.begin_step([StepItem(sequence, TOKENS)]) as step:
                with self.fails(invalid, "layers[0].values.shape[0]: 2 tokens"):
                    step.end({VALUES: (None, self.layer.values[:2]), KEYS: (self.layer.keys[:1], self.layer.values[:1])})
            with self.fails(invalid, "layers[1].keys"):
                sequence.append(TOKENS, {VALUES: (None, self.layer.values[:1]), KEYS: (None, self.layer.values[:1])})
            with self.fails(invalid, "values"):
                sequence.ingest(VALUES, TOKENS, None, np.full_like(self.layer.values[:1], np.nan))
            self.assertEqual(sequence.describe().token_count, TOKENS)
            with self.fails(invalid, "spec.groups[0].key_dim: 64, must be 0"):
                client.open_cache("bad", model_fingerprint="bad", capacity_bytes=1 << 20, groups=[
                    pqcached.LayerGroup([0], KV_HEADS, QUERY_HEADS, 64, VALUE_DIM, kind=LayerKind.VALUES)])


if __name__ == "__main__":
    unittest.main()
