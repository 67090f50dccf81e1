"""What the client refuses, by the name of the field, before and after it asks the sidecar. Usage: refusals_test.py BUILD"""

import unittest

import numpy as np

from daemon import KEY_DIM, KV_HEADS, QUERY_HEADS, VALUE_DIM, DaemonTest, Layer, group  # finds pqcached: first

import pqcached
from pqcached import Index, IndexKind, Selection, SubspaceLayout


class RefusalsTest(DaemonTest):
    def setUp(self):
        self.layer = Layer(40)
        self.under_test = self.sequence()
        self.under_test.ingest(0, 0, self.layer.keys, self.layer.values)
        self.addCleanup(self.unchanged)

    def unchanged(self):
        self.assertEqual(self.under_test.describe().token_count, 40)

    def test_rows(self):
        sequence, keys, values = self.under_test, self.layer.keys, self.layer.values
        invalid = pqcached.InvalidArgument
        for arguments, error, part in (
                ((0, 41, keys, values), invalid, "first_position"),
                ((0, -1, keys, values), invalid, "first_position: -1"),
                ((0, 1 << 64, keys, values), invalid, "first_position"),
                ((0, 1.5, keys, values), TypeError, "first_position: float"),
                ((1, 40, keys, values), invalid, "no layer 1"),
                ((-1, 40, keys, values), invalid, "layer: -1"),
                ((1 << 32, 40, keys, values), invalid, "layer: 4294967296"),  # C would take it for 0
                (("0", 40, keys, values), TypeError, "layer: str"),
                ((0, 40, keys[:, :1], values), invalid, "keys.shape[1]: 1"),
                ((0, 40, keys[..., :32], values), invalid, "keys.shape[2]: 32"),
                ((0, 40, keys[:5], values), invalid, "values.shape[0]: 40"),
                ((0, 40, keys[:0], values[:0]), invalid, "keys.shape[0]: 0"),
                ((0, 40, keys[0], values), invalid, "keys.ndim: 2"),
                ((0, 40, keys, keys), invalid, "values.shape[2]: 64"),
                ((0, 40, keys.astype(np.float64), values), TypeError, "keys: dtype float64"),
                ((0, 40, keys.tolist(), values), TypeError, "keys: list"),
                ((0, 40, keys, None), TypeError, "values: NoneType"),
                ((0, 40, np.full_like(keys, np.nan), values), invalid, "keys"),
                ((0, 40, keys, np.full_like(values, np.inf)), invalid, "values")):
            with self.subTest(part=part), self.fails(error, part):
                sequence.ingest(*arguments)
        with self.fails(invalid, "layer_count"):
            sequence.append(40, {})
        with self.fails(TypeError, "layers[0].keys: int"):
            sequence.append(40, {0: (1, values)})

    def test_cuda_tensors_come_to_the_library_which_has_no_use_for_them_yet(self):
        from arrays_test import Dlpack
        with self.fails(pqcached.Unimplemented, "keys.device: PQC_CUDA"):
            self.under_test.ingest(0, 40, Dlpack(self.layer.keys, device=2), self.layer.values)

    def test_queries_and_selections(self):
        sequence, queries, invalid = self.under_test, self.layer.queries, pqcached.InvalidArgument
        select, flat = sequence.topk, Index.flat()
        everything = Selection(ratio=1.0, index=flat)
        for arguments, error, part in (
                ((0, 39, queries[:, :32], everything), invalid, "query.queries.shape[1]: 32"),
                ((0, 39, queries[:2], everything), invalid, "query.queries.shape[0]: 2"),
                ((0, 39, queries[0], everything), invalid, "query.queries.ndim: 1"),
                ((0, 39, queries.astype(np.int32), everything), TypeError, "queries: dtype int32"),
                ((7, 39, queries, everything), invalid, "no layer 7"),
                ((0, 1 << 40, queries, everything), invalid, "query_position"),
                ((0, 39, queries, Selection(ratio=1.5, index=flat)), invalid, "selection.ratio"),
                ((0, 39, queries, Selection(ratio=0, index=flat)), invalid, "selection.ratio"),
                ((0, 39, queries, Selection(ratio=float("nan"), index=flat)), invalid, "selection.ratio"),
                ((0, 39, queries, Selection(token_count=1 << 60, index=flat)), invalid, "token_count"),
                ((0, 39, queries, Selection(token_count=41, index=flat)), invalid, "token_count"),
                ((0, 39, queries, Selection(ratio=.5, index=Index.pq(3, 6))), invalid, "subspaces"),
                ((0, 39, queries, Selection(ratio=.5, index=Index(IndexKind.FLAT, layout=SubspaceLayout.CONTIGUOUS))), invalid,
                 "selection.index.layout"),
                ((0, 39, queries, Selection(ratio=.5)), pqcached.FailedPrecondition, "index"),
                ((0, 39, queries, Selection(ratio=.5, index=flat, excluded=[(3, 9), (5, 10)])), invalid,
                 "excluded")):
            with self.subTest(part=part), self.fails(error, part):
                select(*arguments)
        for arguments in ({}, {"ratio": 0.1, "token_count": 7}, {"ratio": 0.1, "group_rule": 9},
                          {"ratio": 0.1, "sink_tokens": -1}, {"ratio": 0.1, "index": Index(kind=77)},
                          {"ratio": 0.1, "index": Index.pq(4, 8, 3)},
                          {"ratio": 0.1, "excluded": [(-1, 2)]}):
            with self.subTest(arguments=arguments), self.assertRaises(invalid):
                Selection(**arguments)
        for arguments in ({"ratio": "much"}, {"ratio": 0.1, "sink_tokens": 1.0}):
            with self.subTest(arguments=arguments), self.assertRaises(TypeError):
                Selection(**arguments)

    def test_outputs(self):
        def attend(*out):
            self.under_test.attend(0, 39, self.layer.queries, Selection(ratio=1.0, index=Index.flat()), out=out)

        output, lse = np.zeros((QUERY_HEADS, VALUE_DIM), np.float32), np.zeros(QUERY_HEADS, np.float32)
        read_only = output.copy()
        read_only.flags.writeable = False
        for wrong, error, part in (((output.astype(np.float64), lse), TypeError, "output: dtype float64"),
                                   ((output[:, :5], lse), pqcached.InvalidArgument, "output.shape"),
                                   ((read_only, lse), pqcached.InvalidArgument, "output: must be writable"),
                                   ((output, lse[:-1]), pqcached.InvalidArgument, "lse.shape"),
                                   ((output, [0.0] * QUERY_HEADS), TypeError, "lse: list")):
            with self.subTest(part=part), self.fails(error, part):
                attend(*wrong)
        self.assertFalse(output.any())
        with self.fails(TypeError, "out: dtype float16"):
            self.under_test.fetch_blocks(0, (0, 4), out=np.zeros((KV_HEADS, 4, KEY_DIM + VALUE_DIM), np.float16))

    def test_ranges_and_positions(self):
        sequence = self.under_test
        for tokens, error in (((5, 5), pqcached.InvalidArgument), ((9, 5), pqcached.InvalidArgument),
                              ((0, 1 << 31), pqcached.InvalidArgument), ((-1, 5), pqcached.InvalidArgument),
                              ((0, 41), pqcached.OutOfRange)):
            with self.subTest(tokens=tokens), self.assertRaises(error):
                sequence.fetch_blocks(0, tokens)
            with self.subTest(tokens=tokens), self.assertRaises(error):
                sequence.score(0, 39, self.layer.queries, tokens, Index.flat())
        for positions, error in (([[0], [40]], pqcached.OutOfRange), ([[0, 1]], pqcached.InvalidArgument),
                                 ([[0], [-1]], pqcached.InvalidArgument), ([[0], [1 << 32]], pqcached.InvalidArgument),
                                 ([[0.0], [1.0]], TypeError), ([[], []], TypeError),
                                 (np.zeros((KV_HEADS, 0), np.uint32), pqcached.InvalidArgument)):
            with self.subTest(positions=positions), self.assertRaises(error):
                sequence.fetch_tokens(0, positions)
            with self.subTest(positions=positions), self.assertRaises(error):
                sequence.attend_positions(0, 39, self.layer.queries, positions)
        with self.fails(pqcached.InvalidArgument, "RowPart"):
            sequence.fetch_blocks(0, (0, 4), 7)

    def test_caches(self):
        def open_cache(name="refused", fingerprint="m", groups=None, capacity=1 << 20, **named):
            self.client.open_cache(name, model_fingerprint=fingerprint, groups=groups or [group()],
                                   capacity_bytes=capacity, **named)

        invalid = pqcached.InvalidArgument
        layers = pqcached.LayerGroup
        for arguments, error, part in (
                ({"name": ""}, invalid, "name"), ({"name": "a\0b"}, invalid, "name: must not contain a NUL character"),
                ({"name": 7}, TypeError, "name: int"), ({"fingerprint": "f" * 257}, invalid, "fingerprint"),
                ({"capacity": -1}, invalid, "capacity_bytes"), ({"capacity": 1 << 40}, pqcached.ResourceExhausted, "byte"),
                ({"prefill_seconds": (1, 2)}, invalid, "prefill_seconds: 2 numbers"),
                ({"prefill_seconds": (0, 2, 0)}, invalid, "spec.prefill_seconds[1]: 2, must lie in [0, 1]"),
                ({"prefill_seconds": (0, 0, .1), "prefill_measured": True}, invalid, "spec.prefill_seconds[2]"),
                ({"groups": [layers([0], 2, 6, 36, 64)]}, invalid, "key_dim"),
                ({"groups": [layers([0], 2, 5, 64, 64)]}, invalid, "query_heads"),
                ({"groups": [layers([], 2, 6, 64, 64)]}, invalid, "layer_count"),
                ({"groups": [layers([0], 2, 6, 64, 64, kind=pqcached.LayerKind.WINDOW)]}, invalid, "window_tokens"),
                ({"groups": [layers([0], 2, 6, 64, 64, kind=pqcached.LayerKind.FULL, window_tokens=3)]}, invalid,
                 "window_tokens")):
            with self.subTest(part=part), self.fails(error, part):
                open_cache(**arguments)
        with self.assertRaises(invalid):
            layers([0], 2, 6, 64, 64, dtype=8)
        open_cache("taken")
        with self.fails(pqcached.FailedPrecondition, "model_fingerprint"):
            open_cache("taken", "another model")

    def test_errors_have_the_field_and_the_wanted_shape(self):
        sequence, keys, values, queries = self.under_test, self.layer.keys, self.layer.values, self.layer.queries
        exact = Selection(ratio=1.0, index=Index.flat())
        output, lse = np.zeros((QUERY_HEADS, VALUE_DIM), np.float32), np.zeros(QUERY_HEADS, np.float32)
        for call, field, text in (
                (lambda: sequence.ingest(0, 40, keys[:, :1], values), "keys.shape[1]", f"1, must be the cache's kv_heads {KV_HEADS}"),
                (lambda: sequence.ingest(0, 40, keys[0], values), "keys.ndim", "2, must be 3: [tokens, kv_heads, key_dim]"),
                (lambda: sequence.append(40, {0: (keys[..., :8], values)}), "layers[0].keys.shape[2]", f"must be the cache's key_dim {KEY_DIM}"),
                (lambda: sequence.topk(0, 39, queries[:2], exact), "query.queries.shape[0]", f"2, must be the cache's query_heads {QUERY_HEADS}"),
                (lambda: sequence.attend(0, 39, queries, exact, out=(output[1:], lse)), "output.shape",
                 f"({QUERY_HEADS - 1}, {VALUE_DIM}), must be ({QUERY_HEADS}, {VALUE_DIM})"),
                (lambda: sequence.attend_positions(0, 39, queries, [[1, 2]]), "positions.shape",
                 f"(1, 2), must be [kv_heads, count] with {KV_HEADS} kv_heads"),
                (lambda: pqcached.Paged(keys, [0], 1), "memory.shape",
                 f"(40, {KV_HEADS}, {KEY_DIM}), must be [blocks, block_tokens, heads, dim]"),
                (lambda: sequence.name_tokens(pqcached.TokenNames(0, [[1, 2]])), "token_ids.shape", "(1, 2), must be [tokens]")):
            with self.subTest(field=field), self.fails(pqcached.InvalidArgument, text) as caught:
                call()
            self.assertEqual(caught.exception.field, field)
            self.assertIsNone(caught.exception.retry_after)

    def test_clients(self):
        for endpoint, error, part in (("", pqcached.InvalidArgument, "endpoint"),
                                      ("example.org:7", pqcached.InvalidArgument, "tls_ca"),
                                      (7, TypeError, "endpoint: int"),
                                      (self.daemon.endpoint + "-nobody", pqcached.Unavailable, "")):
            with self.subTest(endpoint=endpoint), self.fails(error, part):
                pqcached.Client(endpoint, timeout_ms=2000)
        with self.fails(pqcached.InvalidArgument, "tenant"):
            pqcached.Client(self.daemon.endpoint, tenant="Ä")
        with self.fails(pqcached.FailedPrecondition, "rpc_library_path"):
            pqcached.Client(self.daemon.endpoint, rpc_library_path="/no/such/library.so")


if __name__ == "__main__":
    unittest.main()
