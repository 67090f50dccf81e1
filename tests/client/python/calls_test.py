"""The calls against a real daemon: right answers, and what is refused. Usage: calls_test.py BUILD"""

import dataclasses
import threading
import unittest

import numpy as np

from daemon import KEY_DIM, KV_HEADS, QUERY_HEADS, VALUE_DIM, DaemonTest, Layer, group, running  # finds pqcached: first

import pqcached
from pqcached import DType, FailedPrecondition, Index, InvalidArgument, RopeLayout, RowPart, Selection, SubspaceLayout, Tensor
from skip import skip_unless

try:
    import torch
except ImportError:
    torch = None

needs_torch = skip_unless("torch", torch is not None, "torch is not installed (Debian: python3-torch)")

TOKENS = 700
FLAT = Selection(ratio=0.2, sink_tokens=4, window_tokens=32, index=Index.flat())


def to_bf16(array):
    """The nearest bfloat16 of each number, as uint16."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class CallsTest(DaemonTest):
    def setUp(self):
        self.layer = Layer(TOKENS)

    def filled(self, **named):
        sequence = self.sequence(**named)
        sequence.ingest(0, 0, self.layer.keys, self.layer.values)
        return sequence

    def test_flat_selects_the_best_and_attends_to_them(self):
        sequence = self.filled()
        chosen = sequence.topk(0, TOKENS - 1, self.layer.queries, FLAT)
        self.assertEqual((chosen.kv_heads, chosen.sink_tokens, chosen.window_tokens), (KV_HEADS, 4, 32))
        self.assertEqual(chosen.positions.shape, (KV_HEADS, chosen.count))
        np.testing.assert_array_equal(chosen.positions,
                                      self.layer.best(np.arange(4, TOKENS - 32), chosen.count))
        attention = sequence.attend(0, TOKENS - 1, self.layer.queries, FLAT)
        self.assertEqual(attention.selected.count, chosen.count)
        self.check_attention(attention, chosen.positions)

    def check_attention(self, attention, positions, keys=None, values=None, tolerance=1e-4):
        output, lse = self.layer.attend(positions, keys, values)
        np.testing.assert_allclose(np.asarray(attention.output), output, atol=tolerance)
        np.testing.assert_allclose(np.asarray(attention.lse), lse, atol=tolerance)

    def test_all_tokens_merged_with_the_ends_are_full_attention(self):
        sequence = self.filled()
        sequence.build_index(Index.pq(4, 8), sink_tokens=4)  # the default, which the selection has
        attention = sequence.attend(0, TOKENS - 1, self.layer.queries,
                                    Selection(ratio=1.0, sink_tokens=4, window_tokens=32))
        ends = [np.r_[0:4, TOKENS - 32:TOKENS]] * KV_HEADS
        own = [np.ascontiguousarray(part, np.float32) for part in self.layer.attend(ends)]
        self.assertIs(attention.merge(*own), attention)
        self.check_attention(attention, [np.arange(TOKENS)] * KV_HEADS)

    def test_views_of_any_strides_are_stored_as_they_read(self):
        by_head = np.ascontiguousarray(self.layer.keys.transpose(1, 0, 2))  # [kv_heads, tokens, dim], as engines have it
        rows = np.concatenate([self.layer.values[::-1], self.layer.values[::-1]], axis=2)
        sequence = self.sequence()
        sequence.ingest(0, 0, by_head.transpose(1, 0, 2), rows[::-1, :, VALUE_DIM:])
        fetched = sequence.fetch_blocks(0, (0, TOKENS))
        self.assertEqual(fetched.shape, (KV_HEADS, TOKENS, KEY_DIM + VALUE_DIM))
        np.testing.assert_array_equal(fetched[:, :, :KEY_DIM], by_head)
        np.testing.assert_array_equal(fetched[:, :, KEY_DIM:], self.layer.values.transpose(1, 0, 2))

    def test_queries_may_be_views_too(self):
        sequence = self.filled()
        spread = np.repeat(self.layer.queries, 2, axis=1)[::-1][::-1, ::2]
        self.assertFalse(spread.flags.c_contiguous)
        chosen = sequence.topk(0, TOKENS - 1, spread, FLAT)
        np.testing.assert_array_equal(
            chosen.positions, sequence.topk(0, TOKENS - 1, self.layer.queries[None], FLAT).positions)

    def test_half_precision_rows(self):
        keys, values = self.layer.keys.astype(np.float16), self.layer.values.astype(np.float16)
        sequence = self.sequence(dtype=DType.F16)
        sequence.ingest(0, 0, keys, values)
        fetched = sequence.fetch_blocks(0, (5, 9), RowPart.KEY)
        self.assertEqual(fetched.dtype, np.float16)
        np.testing.assert_array_equal(fetched, keys[5:9].transpose(1, 0, 2))
        attention = sequence.attend(0, TOKENS - 1, self.layer.queries, FLAT)
        positions = sequence.topk(0, TOKENS - 1, self.layer.queries, FLAT).positions
        self.check_attention(attention, positions, keys, values, tolerance=1e-2)

    def test_bfloat16_in_arrays_of_uint16(self):
        keys, values = to_bf16(self.layer.keys), to_bf16(self.layer.values)
        sequence = self.sequence(dtype=DType.BF16)
        sequence.ingest(0, 0, Tensor(keys, dtype=DType.BF16), Tensor(values, dtype=DType.BF16))
        fetched = sequence.fetch_tokens(0, [[3, 600], [0, 1]], RowPart.VALUE)
        self.assertEqual(fetched.dtype, np.uint16)
        np.testing.assert_array_equal(fetched[0], values[[3, 600], 0])
        np.testing.assert_array_equal(fetched[1], values[[0, 1], 1])
        queries = Tensor(to_bf16(self.layer.queries), dtype=DType.BF16)
        self.layer.queries = from_bf16(to_bf16(self.layer.queries))
        positions = sequence.topk(0, TOKENS - 1, queries, FLAT).positions
        self.check_attention(sequence.attend(0, TOKENS - 1, queries, FLAT), positions, from_bf16(keys),
                             from_bf16(values), tolerance=2e-2)

    @needs_torch
    def test_torch_tensors_in_and_out(self):
        for torch_dtype, dtype in ((torch.float32, DType.F32), (torch.float16, DType.F16),
                                   (torch.bfloat16, DType.BF16)):
            with self.subTest(dtype=dtype):
                # [batch, kv_heads, tokens, dim], as transformers has it
                keys = torch.from_numpy(self.layer.keys).to(torch_dtype).transpose(0, 1).contiguous()[None]
                values = torch.from_numpy(self.layer.values).to(torch_dtype).transpose(0, 1).contiguous()[None]
                queries = torch.from_numpy(self.layer.queries).requires_grad_()
                sequence = self.sequence(dtype=dtype)
                sequence.ingest(0, 0, keys[0].transpose(0, 1), values[0].transpose(0, 1))
                rows = torch.empty(KV_HEADS, TOKENS, KEY_DIM, dtype=torch_dtype)
                self.assertIs(sequence.fetch_blocks(0, (0, TOKENS), RowPart.KEY, out=rows), rows)
                self.assertTrue(torch.equal(rows, keys[0]))
                out = torch.empty(QUERY_HEADS, VALUE_DIM), torch.empty(QUERY_HEADS)
                attention = sequence.attend(0, TOKENS - 1, queries, FLAT, out=out)
                self.assertIs(attention.output, out[0])
                expected = sequence.attend(0, TOKENS - 1, self.layer.queries, FLAT)
                np.testing.assert_array_equal(out[0].numpy(), expected.output)
                np.testing.assert_array_equal(out[1].numpy(), expected.lse)

    def test_outputs_are_written_where_the_caller_says(self):
        sequence = self.filled()
        memory = np.zeros(QUERY_HEADS * (VALUE_DIM + 1), np.float32)
        output, lse = memory[QUERY_HEADS:].reshape(QUERY_HEADS, VALUE_DIM), memory[:QUERY_HEADS]
        attention = sequence.attend(0, TOKENS - 1, self.layer.queries, FLAT, out=(output, lse))
        self.assertIs(attention.output, output)
        self.assertTrue(memory.all())

    def test_given_positions(self):
        sequence = self.filled()
        positions = [[1, 5, 300], [0, 699, 699]]
        with self.fails(pqcached.InvalidArgument, "positions"):
            sequence.attend_positions(0, TOKENS - 1, self.layer.queries, positions)
        positions[1] = [0, 7, 699]
        for kind in (list, lambda p: np.array(p, np.int64), lambda p: np.asfortranarray(np.array(p, np.uint32))):
            self.check_attention(sequence.attend_positions(0, TOKENS - 1, self.layer.queries, kind(positions)),
                                 positions)

    def test_scores_are_the_scaled_logits(self):
        sequence = self.filled()
        scores = sequence.score(0, TOKENS - 1, self.layer.queries, (10, 500), Index.flat())
        logits = self.layer.logits()[:, 10:500]
        np.testing.assert_allclose(scores.logits, logits, atol=1e-4)
        np.testing.assert_allclose(scores.max, logits.max(axis=1), atol=1e-4)
        np.testing.assert_allclose(scores.sum_exp, np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1),
                                   rtol=1e-3)

    def test_the_layout_of_subspaces_matters_where_halves_are_pairs(self):
        def selected(rope, layout):
            rotated = dataclasses.replace(group(), rope_layout=rope, rotary_dim=KEY_DIM)
            cache = self.client.open_cache(f"rope {rope.name}", model_fingerprint="f", groups=[rotated], capacity_bytes=16 << 20)
            self.addCleanup(cache.close)
            sequence = cache.create_sequence()
            self.addCleanup(sequence.close)
            sequence.ingest(0, 0, self.layer.keys, self.layer.values)
            index = Index.pq(4, 5, layout)
            sequence.build_index(index, iterations=3, seed=1)
            return sequence.topk(0, TOKENS - 1, self.layer.queries, Selection(ratio=0.2, index=index)).positions.tolist()

        contiguous = selected(RopeLayout.HALF, SubspaceLayout.CONTIGUOUS)
        self.assertNotEqual(selected(RopeLayout.HALF, SubspaceLayout.PAIRS), contiguous)
        self.assertEqual(selected(RopeLayout.NONE, SubspaceLayout.PAIRS), contiguous)
        self.assertEqual(selected(RopeLayout.UNKNOWN, SubspaceLayout.PAIRS), contiguous)

    def test_a_weighted_index_is_trained_on_query_samples(self):
        sequence = self.filled()
        index = Index.pq(4, 4, SubspaceLayout.WEIGHTED)
        with self.assertRaises(FailedPrecondition) as refused:
            sequence.build_index(index)
        self.assertEqual(refused.exception.field, "options.index")
        positions = [0, 5, TOKENS - 1]
        queries = np.random.default_rng(1).standard_normal((3, *self.layer.queries.shape[-2:])).astype(np.float16)
        with self.assertRaises(InvalidArgument) as refused:
            sequence.add_query_samples(0, positions[:2], queries)
        self.assertEqual(refused.exception.field, "samples[0].queries.shape")
        sequence.add_query_samples(0, positions, queries)
        sequence.build_index(index, iterations=3)
        self.assertTrue(sequence.topk(0, TOKENS - 1, self.layer.queries, Selection(ratio=0.2, index=index)).positions.size)
        graph = Index.make("graph", samples=32)
        sequence.build_index(graph)
        found, exact = (sequence.topk(0, TOKENS - 1, self.layer.queries, Selection(ratio=0.2, index=index)).positions
                        for index in (graph, Index.flat()))
        np.testing.assert_array_equal(found, exact, "a fifth of the tokens is chosen by exact scores")

    def test_an_index_can_be_made_from_the_description_of_its_type(self):
        types = {one.name: one for one in self.client.index_types()}
        self.assertEqual(sorted(types), ["clusters", "flat", "graph", "pq"])
        self.assertEqual((types["flat"].parameters, types["flat"].needs_build), ((), False))
        self.assertTrue(types["pq"].needs_build)
        described = {one.name: one for one in types["pq"].parameters}
        self.assertEqual({name: one.default for name, one in described.items()},
                         {"subspaces": 4, "bits": 8, "layout": "pairs"})
        self.assertEqual((described["bits"].least, described["bits"].most), (1, 8))
        self.assertEqual(described["layout"].names, ("pairs", "contiguous", "weighted"))
        self.assertEqual(Index.make("pq"), Index.pq(4, 8))
        self.assertEqual(Index.make("pq", bits=6, subspaces=2, layout="contiguous"), Index.pq(2, 6, SubspaceLayout.CONTIGUOUS))
        self.assertEqual(Index.make("flat"), Index.flat())

    def test_typed_parameters_are_refused_by_name(self):
        for field, wanted, kind, parameters in (
                ("type", '"hnsw", no such index type', "hnsw", {}),
                ("parameters[lists]", "no parameter of pq, which has: subspaces, bits, layout", "pq", {"lists": 1}),
                ("parameters[bits]", "no parameter of flat, which has: none", "flat", {"bits": 4}),
                ("parameters[bits]", "9, must lie in [1, 8]", "pq", {"bits": 9}),
                ("parameters[bits]", str((1 << 32) + 4), "pq", {"bits": (1 << 32) + 4}),
                ("parameters[bits]", '"six", must lie in [1, 8]', "pq", {"bits": "six"}),
                ("parameters[subspaces]", "0, must lie in [1, 128]", "pq", {"subspaces": 0}),
                ("parameters[layout]", '"diagonal", must be 0 (pairs) or 1 (contiguous) or 2 (weighted)', "pq", {"layout": "diagonal"}),
                ("parameters[layout]", "a number, must be", "pq", {"layout": 1})):
            with self.subTest(field=field, wanted=wanted), self.assertRaises(pqcached.InvalidArgument) as caught:
                Index.make(kind, **parameters)
            self.assertEqual(caught.exception.field, field)
            self.assertIn(wanted, str(caught.exception))
        with self.assertRaises(TypeError):
            Index.make("pq", bits=4.5)

    def test_rows_appended_after_the_build_are_found(self):
        sequence = self.sequence(layers=(0, 3))
        for layer in (0, 3):
            sequence.ingest(layer, 0, self.layer.keys[:600], self.layer.values[:600])
        sequence.build_index(sink_tokens=4)
        rows = self.layer.keys[600:], self.layer.values[600:]
        self.assertEqual(sequence.append(600, {0: rows, 3: rows}), TOKENS)
        self.assertEqual(sequence.append(600, {0: rows, 3: rows}), TOKENS)  # a repeat
        chosen = sequence.topk(3, TOKENS - 1, self.layer.queries, FLAT)
        np.testing.assert_array_equal(chosen.positions, self.layer.best(np.arange(4, TOKENS - 32), chosen.count))
        with self.fails(pqcached.InvalidArgument, "layer"):
            sequence.append(TOKENS, {0: rows})

    def test_excluded_ranges_rules_and_counts(self):
        sequence = self.filled()
        chosen = sequence.topk(0, TOKENS - 1, self.layer.queries, Selection(
            token_count=136, sink_tokens=4, window_tokens=32, index=Index.flat(), excluded=[(10, 300), (400, 410)],
            group_rule=pqcached.GroupRule.MAX_LOGIT))
        self.assertEqual(chosen.count, 100)
        allowed = np.r_[4:10, 300:400, 410:TOKENS - 32]
        self.assertTrue(np.isin(chosen.positions, allowed).all())
        best = self.layer.logits().reshape(KV_HEADS, -1, TOKENS).max(axis=1)[:, allowed]
        np.testing.assert_array_equal(chosen.positions, np.sort(allowed[np.argsort(-best, axis=1)[:, :100]], axis=1))

    def test_builds_tell_their_progress(self):
        sequence, seen = self.filled(), []
        sequence.build_index(Index.pq(2, 6), iterations=3, seed=1, progress=seen.append)
        self.assertEqual((seen[-1].layers_done, seen[-1].layer_count), (1, 1))
        self.assertGreater(seen[-1].index_bytes, 0)
        info = sequence.describe()
        self.assertEqual((info.token_count, info.index_count), (TOKENS, 1))
        self.assertEqual(info.row_bytes, TOKENS * KV_HEADS * (KEY_DIM + VALUE_DIM) * 4)
        with self.fails(pqcached.AlreadyExists, "index"):
            sequence.build_index(Index.pq(2, 6))

    def test_a_build_takes_as_many_iterations_as_fit_into_the_prefill(self):
        def most_iterations(name, **prefill):
            cache = self.client.open_cache(name, model_fingerprint=name, groups=[group()], capacity_bytes=4 << 20, **prefill)
            with cache, cache.create_sequence() as sequence:
                sequence.ingest(0, 0, self.layer.keys, self.layer.values)
                seen = []
                sequence.build_index(Index.pq(2, 4), progress=seen.append)
            return max(progress.iterations for progress in seen)

        self.assertEqual(most_iterations("unknown"), 10)
        self.assertEqual(most_iterations("fast", prefill_seconds=(0, 1e-12, 0)), 1)
        self.assertEqual(most_iterations("measured", prefill_measured=True), 10)  # not known after one chunk
        known = {cache["name"]: cache["prefill_cost"] for cache in self.client.admin("ListCaches")["caches"]}
        self.assertEqual((known["fast"]["seconds_per_token"], known["measured"]["measured"]), (1e-12, True))

    def test_a_rebuild_replaces_the_index_when_it_is_done(self):
        sequence = self.filled()
        index = Index.pq(2, 4)

        def scores():
            return sequence.score(0, TOKENS - 1, self.layer.queries, (0, TOKENS), index).logits

        sequence.build_index(index, iterations=1, seed=1)
        first, during = scores(), []
        sequence.build_index(index, iterations=9, seed=2, rebuild=True, progress=lambda _: during.append(scores()))
        for seen in during:
            np.testing.assert_array_equal(seen, first)
        self.assertTrue(during)
        self.assertFalse(np.array_equal(scores(), first))
        with self.fails(pqcached.AlreadyExists, "drift"):
            sequence.build_index(index, rebuild=True, rebuild_drift=100)
        with self.fails(pqcached.InvalidArgument, "options.rebuild_drift"):
            sequence.build_index(index, rebuild=True, rebuild_drift=-1)
        with self.fails(pqcached.InvalidArgument, "options.rebuild_drift"):
            sequence.build_index(index, rebuild_drift=2)
        with self.fails(pqcached.AlreadyExists, "0 tokens are new, fewer than 1"):
            sequence.build_index(index, rebuild=True, rebuild_tokens=1)
        with self.fails(pqcached.InvalidArgument, "options.rebuild_tokens"):
            sequence.build_index(index, rebuild_tokens=1)

    def test_builds_end_when_the_callback_says_so(self):
        layers = range(8)
        sequence = self.sequence(layers=layers)
        for layer in layers:
            sequence.ingest(layer, 0, self.layer.keys, self.layer.values)
        seen = []
        with self.fails(pqcached.Cancelled, ""):
            sequence.build_index(progress=lambda progress: seen.append(progress) or False)
        self.assertEqual(len(seen), 1)  # nothing is told after the first False

    def test_an_exception_of_the_callback_ends_the_build_and_comes_out(self):
        layers = range(8)
        for error in (ZeroDivisionError, KeyboardInterrupt):
            sequence = self.cache(layers=layers).create_sequence()
            for layer in layers:
                sequence.ingest(layer, 0, self.layer.keys, self.layer.values)

            def progress(_, error=error):
                raise error("in the callback")

            with self.assertRaisesRegex(error, "in the callback"), sequence:
                sequence.build_index(progress=progress)

    def test_truncated_tokens_are_gone(self):
        sequence = self.filled()
        sequence.build_index()
        sequence.append(TOKENS, {0: (self.layer.keys[:20], self.layer.values[:20])})
        sequence.truncate(TOKENS + 5)
        self.assertEqual(sequence.describe().token_count, TOKENS + 5)
        with self.fails(pqcached.OutOfRange, "tokens"):
            sequence.fetch_blocks(0, (TOKENS, TOKENS + 10))

    def test_admin_answers_as_a_dict(self):
        self.assertIn("pq", " ".join(self.client.admin("GetServerInfo")["capabilities"]))
        sequence = self.filled()
        described = self.client.admin("DescribeSequence", {"sequence_id": sequence.id})
        self.assertTrue(described)
        with self.fails(pqcached.NotFound, str(1 << 60)):
            self.client.admin("DescribeSequence", {"sequence_id": 1 << 60})
        with self.assertRaises(pqcached.Error):
            self.client.admin("NoSuchMethod")

    def test_errors_have_a_field_and_a_retry_time(self):
        sequence = self.filled()

        def refused(error, call):
            with self.assertRaises(error) as caught:
                call()
            return caught.exception.field, caught.exception.retry_ms

        def select(ratio):
            return sequence.topk(0, TOKENS - 1, self.layer.queries, Selection(ratio=ratio, index=Index.flat()))

        invalid = pqcached.InvalidArgument
        self.assertEqual(refused(invalid, lambda: select(1.5)), ("selection.ratio", 0))
        self.assertEqual(refused(pqcached.OutOfRange, lambda: sequence.fork(TOKENS + 1)), ("token_count", 0))
        self.assertEqual(refused(invalid, lambda: sequence.fetch_blocks(0, (5, 5))), ("tokens", 0))  # of the package
        with running() as daemon, pqcached.Client(daemon.endpoint) as client:
            cache = self.cache(client=client)
            with self.assertRaises(pqcached.PermissionDenied):
                client.admin("Drain")
            with pqcached.Client(daemon.endpoint, path=pqcached.PathChoice.ADMIN) as operator:
                operator.admin("Drain")
                with self.assertRaises(pqcached.PermissionDenied):  # it has no session
                    self.cache(client=operator)
            self.assertEqual(refused(pqcached.Unavailable, cache.create_sequence), ("", 1000))

    def test_several_threads_at_once(self):
        sequence = self.filled()
        expected = sequence.attend(0, TOKENS - 1, self.layer.queries, FLAT)
        wrong, messages = [], []

        def work(number):
            for step in range(10):
                attention = sequence.attend(0, TOKENS - 1, self.layer.queries, FLAT)
                if not np.array_equal(attention.output, expected.output):
                    wrong.append((number, step))
                try:
                    sequence.fetch_blocks(0, (0, 701 + number))
                except pqcached.OutOfRange as error:
                    messages.append((number, error.message))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])
        self.assertEqual(len(messages), 40)
        for number, message in messages:  # each thread reads its own reasons
            self.assertIn(f"[0, {701 + number})", message)


class SharingTest(DaemonTest):
    def setUp(self):
        self.layer = Layer(TOKENS)
        self.ids = np.random.default_rng(3).integers(0, 1 << 32, TOKENS)

    def filled(self, tokens=TOKENS, **named):
        cache = self.cache()
        sequence = cache.create_sequence(**named)
        self.addCleanup(sequence.close)
        sequence.ingest(0, 0, self.layer.keys[:tokens], self.layer.values[:tokens])
        return cache, sequence

    def test_a_fork_goes_its_own_way(self):
        _, sequence = self.filled()
        sequence.build_index()
        for count, shared in ((0, TOKENS), (256, 256)):
            with sequence.fork(count) as child:
                self.assertNotEqual(child.id, sequence.id)
                self.assertEqual((child.shared_tokens, child.describe().token_count), (shared, shared))
                child.append(shared, {0: (self.layer.keys[:3], self.layer.values[:3])})
                np.testing.assert_array_equal(child.fetch_blocks(0, (shared, shared + 3), RowPart.KEY),
                                              self.layer.keys[:3].transpose(1, 0, 2))
        self.assertEqual(sequence.describe().token_count, TOKENS)
        with self.assertRaises(pqcached.Error):
            sequence.fork(TOKENS + 1)

    def test_ranks_make_one_sequence_by_its_key(self):
        caches = [self.client.open_cache("ranks", model_fingerprint="model", groups=[group()], capacity_bytes=16 << 20,
                                         rank=pqcached.Rank("group", rank, 2, rank * KV_HEADS)) for rank in range(2)]
        for cache in caches:
            self.addCleanup(cache.close)
        holders = [cache.create_sequence(self.ids) for cache in caches]
        for holder in holders:
            self.addCleanup(holder.close)
            holder.ingest(0, 0, self.layer.keys, self.layer.values)
        key = b"request\0"
        with caches[0].create_sequence(self.ids, group_key=key) as first:
            holders[1].close()
            with self.fails(pqcached.AlreadyExists, "group_key"):
                caches[0].create_sequence(self.ids, group_key=key)
            with self.fails(pqcached.FailedPrecondition, "group_key"):
                caches[1].create_sequence(self.ids[:10], group_key=key)
            with caches[1].create_sequence(self.ids, group_key=key) as second:
                self.assertGreater(first.shared_tokens, 0)
                self.assertEqual(second.shared_tokens, first.shared_tokens)

    def test_prefixes_are_found_and_shared(self):
        cache, sequence = self.filled(token_ids=self.ids)
        self.assertEqual(sequence.shared_tokens, 0)
        sequence.build_index()
        matched = cache.match_prefix(self.ids)
        self.assertGreaterEqual(matched, 256)
        self.assertEqual(matched % 128, 0)
        self.assertEqual(cache.match_prefix(self.ids, extra_key=b"an\0image"), 0)
        self.assertEqual(cache.match_prefix(self.ids[1:].astype(np.uint32)), 0)
        with cache.create_sequence(self.ids) as other:
            self.assertEqual(other.shared_tokens, matched)
            np.testing.assert_array_equal(other.fetch_blocks(0, (0, matched), RowPart.KEY),
                                          self.layer.keys[:matched].transpose(1, 0, 2))
        with self.fails(pqcached.NotFound, "at_least_tokens"):
            cache.create_sequence(self.ids, at_least_tokens=matched + 1)
        cache.create_sequence(self.ids, at_least_tokens=matched).close()

    def test_a_sequence_may_leave_no_prefix(self):
        cache = self.client.open_cache("left", model_fingerprint="1", groups=[group()], capacity_bytes=16 << 20)
        self.addCleanup(cache.close)
        for retain in (False, True):
            sequence = cache.create_sequence(self.ids, retain=retain)
            sequence.ingest(0, 0, self.layer.keys, self.layer.values)
            matched = cache.match_prefix(self.ids)
            self.assertGreaterEqual(matched, 256)
            sequence.drop()
            self.assertEqual(cache.match_prefix(self.ids), matched if retain else 0)
        cache.drop()

    def test_admission_and_pins(self):
        cache, sequence = self.filled()
        admission = cache.admit(TOKENS, 16)
        self.assertEqual(admission.verdict, pqcached.Verdict.FITS_NOW)
        self.assertGreater(admission.needed_bytes, 0)
        self.assertEqual(cache.admit(1 << 29).verdict, pqcached.Verdict.FITS_NEVER)
        with self.fails(pqcached.OutOfRange, "token"):
            cache.admit(1 << 30, 1)
        sequence.pin(60_000)
        pinned = self.client.admin("ListSequences")["sequences"][0]
        self.assertGreater(float(pinned["pin_left_seconds"]), 30)
        with self.fails(pqcached.InvalidArgument, "ttl_ms"):
            sequence.pin(1 << 40)

    def test_a_cache_is_dropped(self):
        cache = self.client.open_cache("dropped", model_fingerprint="1", groups=[group()], capacity_bytes=16 << 20)
        self.addCleanup(cache.close)
        sequence = cache.create_sequence()
        with self.fails(pqcached.FailedPrecondition, "cache"):
            cache.drop()
        sequence.drop()
        cache.drop()
        with self.fails(pqcached.NotFound, "cache"):
            cache.drop()

    def test_suspended_sequences_answer_again_when_resumed(self):
        _, sequence = self.filled()
        sequence.build_index()
        sequence.suspend()
        with self.fails(pqcached.FailedPrecondition, "suspend"):
            sequence.topk(0, TOKENS - 1, self.layer.queries, FLAT)
        self.assertEqual(sequence.resume(), TOKENS)
        sequence.topk(0, TOKENS - 1, self.layer.queries, FLAT)

    def test_a_live_index_is_finished_by_the_build(self):
        _, sequence = self.filled(live_index=True, index=Index.pq(2, 6), iterations=3)
        sequence.build_index(Index.pq(2, 6), iterations=3)
        self.assertEqual(sequence.describe().index_count, 1)
        sequence.attend(0, TOKENS - 1, self.layer.queries, Selection(ratio=0.2, index=Index.pq(2, 6)))

    def test_counts(self):
        before = self.client.counts()
        self.filled()[1].describe()
        self.assertGreater(self.client.counts().rpcs, before.rpcs)

    def test_wrong_arguments_are_refused(self):
        cache, sequence = self.filled(40)
        for ids, error, part in (([[1, 2]], pqcached.InvalidArgument, "token_ids.shape"), ([0.5], TypeError, "integers"),
                                 ([-1], pqcached.InvalidArgument, "token_ids"),
                                 ([1 << 32], pqcached.InvalidArgument, "token_ids")):
            with self.fails(error, part):
                cache.match_prefix(ids)
            with self.fails(error, part):
                cache.create_sequence(ids)
        with self.fails(TypeError, "extra_key: str"):
            cache.match_prefix([1], extra_key="text")
        with self.fails(pqcached.InvalidArgument, "extra_key"):
            cache.create_sequence(self.ids, extra_key=b"k" * 257)
        with self.fails(TypeError, "group_key: str"):
            cache.create_sequence(self.ids, group_key="text")
        with self.fails(pqcached.InvalidArgument, "group_key_bytes: 65"):
            cache.create_sequence(self.ids, group_key=b"k" * 65)
        with self.fails(pqcached.InvalidArgument, "group_key: the cache has no rank.group"):
            cache.create_sequence(self.ids, group_key=b"k")
        with self.fails(pqcached.InvalidArgument, "token_count: -1"):
            sequence.fork(-1)


if __name__ == "__main__":
    unittest.main()
