"""Rows, ranges, positions, sets and pages in the layouts of engines, over both paths. Usage: layouts_test.py BUILD"""

import dataclasses
import unittest

import numpy as np

from daemon import KEY_DIM, KV_HEADS, QUERY_HEADS, VALUE_DIM, BothPathsTest, DaemonTest, Layer  # finds pqcached: first

import pqcached
from pqcached import GroupRule, Index, PathChoice, Selection, StepItem
from one_path import ALL, TOKENS, OnePath, new_rows
from skip import skip_unless

try:
    import torch
except ImportError:
    torch = None


class LayoutsOverOnePath(OnePath):
    def test_paged_rows_of_any_order_are_read_by_their_table(self):
        block_tokens, blocks = 16, -(-TOKENS // 16)
        table = np.random.default_rng(7).permutation(blocks + 3)[:blocks]
        place = table[np.arange(TOKENS) // block_tokens], np.arange(TOKENS) % block_tokens
        vllm = np.zeros((blocks + 3, 2, block_tokens, KV_HEADS, KEY_DIM), np.float32)  # K and V have one dim there
        vllm[:, 0][place] = self.layer.keys
        by_head = np.zeros((blocks + 3, KV_HEADS, block_tokens, VALUE_DIM), np.float32)
        by_head.transpose(0, 2, 1, 3)[place] = self.layer.values
        transposed = np.zeros((blocks + 3, KV_HEADS, VALUE_DIM, block_tokens), np.float32)  # llama.cpp's V
        transposed.transpose(0, 3, 1, 2)[place] = self.layer.values
        for values in (by_head.transpose(0, 2, 1, 3), transposed.transpose(0, 3, 1, 2)):
            sequence = self.sequence()
            sequence.ingest(0, 0, pqcached.Paged(vllm[:, 0], table, TOKENS), pqcached.Paged(values, table, TOKENS))
            fetched = sequence.fetch_blocks(0, (0, TOKENS))
            np.testing.assert_array_equal(fetched[:, :, :KEY_DIM], self.layer.keys.transpose(1, 0, 2))
            np.testing.assert_array_equal(fetched[:, :, KEY_DIM:], self.layer.values.transpose(1, 0, 2))

    @skip_unless("torch", torch is not None, "torch is not installed (Debian: python3-torch)")
    def test_paged_rows_of_torch_are_read_too(self):
        memory = torch.zeros(40, 2, 16, KV_HEADS, VALUE_DIM)
        keys = torch.zeros(40, 16, KV_HEADS, KEY_DIM)
        keys.view(-1, KV_HEADS, KEY_DIM)[:100] = torch.from_numpy(self.layer.keys[:100])
        memory[:, 1].reshape(-1)  # a copy; the view below is not
        memory[:7, 1].copy_(torch.from_numpy(self.layer.values[:112]).view(7, 16, KV_HEADS, VALUE_DIM))
        sequence = self.sequence()
        sequence.ingest(0, 0, pqcached.Paged(keys, range(7), 100), pqcached.Paged(memory[:, 1], range(7), 100))
        np.testing.assert_array_equal(sequence.fetch_blocks(0, (0, 100), pqcached.RowPart.VALUE),
                                      self.layer.values[:100].transpose(1, 0, 2))

    def test_wrong_block_tables_are_named(self):
        sequence = self.sequence()
        keys, values = np.zeros((4, 16, KV_HEADS, KEY_DIM), np.float32), np.zeros((4, 16, KV_HEADS, VALUE_DIM), np.float32)
        paged = lambda blocks, count: (pqcached.Paged(keys, blocks, count), pqcached.Paged(values, blocks, count))
        with self.fails(pqcached.InvalidArgument, "block"):
            sequence.ingest(0, 0, *paged([0, 4], 20))  # there is no block 4
        with self.fails(pqcached.InvalidArgument, "block_table.block_count"):
            sequence.ingest(0, 0, *paged([0, 1], 33))
        with self.fails(pqcached.InvalidArgument, "must be [blocks, block_tokens, heads, dim]"):
            pqcached.Paged(keys[0], [0], 3)
        with self.fails(TypeError, "blocks"):
            pqcached.Paged(keys, [0.5], 3)
        self.assertEqual(sequence.describe().token_count, 0)

    def test_chunks_begin_inside_a_block_and_slots_map_tokens(self):
        random = np.random.default_rng(7)
        slots = random.permutation(50 * 16)[:TOKENS]
        keys, values = np.zeros((50 * 16, KV_HEADS, KEY_DIM), np.float32), np.zeros((50 * 16, KV_HEADS, VALUE_DIM), np.float32)
        keys[slots], values[slots] = self.layer.keys, self.layer.values
        blocks = lambda rows: rows.reshape(50, 16, *rows.shape[1:])
        sequence = self.sequence()
        sequence.ingest(0, 0, *(pqcached.PagedSlots(blocks(rows), slots) for rows in (keys, values)))
        table = random.permutation(50)[:-(-TOKENS // 16)]
        place = table[np.arange(TOKENS) // 16], np.arange(TOKENS) % 16
        blocks(keys)[place], blocks(values)[place] = self.layer.keys, self.layer.values
        chunked = self.sequence()
        for first, count in ((0, 5), (5, 100), (105, 7), (112, TOKENS - 112)):
            chunked.ingest(0, first, *(pqcached.Paged(blocks(rows), table, count, first_token=first) for rows in (keys, values)))
        for stored in (sequence, chunked):
            fetched = stored.fetch_blocks(0, (0, TOKENS))
            np.testing.assert_array_equal(fetched[:, :, :KEY_DIM], self.layer.keys.transpose(1, 0, 2))
            np.testing.assert_array_equal(fetched[:, :, KEY_DIM:], self.layer.values.transpose(1, 0, 2))
        wrong = self.sequence()
        for bad in (-1, 50 * 16):
            with self.fails(pqcached.InvalidArgument, "keys.block_table.slots[1]"):
                wrong.ingest(0, 0, *(pqcached.PagedSlots(blocks(rows), [0, bad]) for rows in (keys, values)))
        with self.fails(pqcached.InvalidArgument, "keys.block_table.block_count"):
            wrong.ingest(0, 0, *(pqcached.Paged(blocks(rows), [1], 10, first_token=7) for rows in (keys, values)))

    # ---- Ranges

    def causal(self, queries, position, tokens):
        """Output and lse of queries [tokens, query_heads, key_dim] over a range, causally."""
        outputs, lses = [], []
        for i, query in enumerate(queries):
            layer = Layer(TOKENS)
            layer.queries = query
            output, lse = layer.attend([np.arange(tokens[0], min(tokens[1], position + i + 1))] * KV_HEADS)
            outputs.append(output)
            lses.append(lse)
        return np.stack(outputs), np.stack(lses)

    def test_ranges_are_attended_causally(self):
        sequence = self.sequence()
        sequence.ingest(0, 0, self.layer.keys, self.layer.values)  # without an index
        queries = np.random.default_rng(3).standard_normal((9, QUERY_HEADS, KEY_DIM), dtype=np.float32)
        for tokens in ((0, TOKENS), (10, TOKENS - 3), (5, 5)):
            output, lse = self.causal(queries, TOKENS - 6, tokens)
            attention = sequence.attend_range(0, TOKENS - 6, queries, tokens)
            np.testing.assert_allclose(attention.output, output, atol=1e-4)
            np.testing.assert_allclose(attention.lse, lse, atol=1e-4)
            self.assertEqual(attention.selected.count, tokens[1] - tokens[0])
            # In the engine's memory: heads first, in half precision, and with logarithms to base 2.
            memory = np.empty((QUERY_HEADS, 9, VALUE_DIM), np.float16)
            lses = np.empty((QUERY_HEADS, 9), np.float32)
            sequence.attend_range(0, TOKENS - 6, queries, tokens, out=(memory.transpose(1, 0, 2), lses.T),
                                  log_base=pqcached.LogBase.BASE2)
            np.testing.assert_allclose(memory.transpose(1, 0, 2), output, atol=2e-3)
            np.testing.assert_allclose(lses.T, lse / np.log(2), atol=1e-4)
        with self.fails(pqcached.OutOfRange, "tokens"):
            sequence.attend_range(0, 0, queries, (0, TOKENS + 1))
        with self.fails(pqcached.InvalidArgument, "queries.shape"):
            sequence.attend_range(0, 0, queries[0], (0, TOKENS))
        with self.fails(TypeError, "output"):
            sequence.attend_range(0, 0, queries, (0, TOKENS), out=(np.empty((9, QUERY_HEADS, VALUE_DIM)), lses.T))

    def test_steps_attend_to_ranges(self):
        items, queries = self.batch()
        ranges = [(0, TOKENS), (7, TOKENS - 150)]
        with self.client.begin_step(items, None) as step:
            found = step.attend_range(0, queries, ranges)
            out = np.empty((2, QUERY_HEADS, VALUE_DIM), np.float16)[:, ::-1], np.empty((QUERY_HEADS, 2), np.float32).T
            step.attend_range(0, queries, ranges, out=out)
        for i in range(2):
            output, lse = self.causal(queries[i:i + 1], items[i].query_position, ranges[i])
            np.testing.assert_allclose(found.output[i], output[0], atol=1e-4)
            np.testing.assert_allclose(found.lse[i], lse[0], atol=1e-4)
            np.testing.assert_allclose(out[0][i], output[0], atol=2e-3)
            np.testing.assert_allclose(out[1][i], lse[0], atol=1e-4)
        self.assertEqual(list(found.counts), [TOKENS, TOKENS - 157])

    def test_steps_attend_to_positions_of_the_engine(self):
        items, queries = self.batch()
        random = np.random.default_rng(5)
        per_head = np.full((2, KV_HEADS, 100), -1, np.int64)
        for i, item in enumerate(items):
            for head in range(KV_HEADS):
                count = 60 + 10 * head
                per_head[i, head, :count] = random.permutation(item.query_position)[:count]
        for positions in (per_head, per_head.astype(np.int32), per_head.astype(np.int32).view(np.uint32), per_head[:, 0]):
            lists = positions if positions.ndim == 3 else positions[:, None]
            lengths = (lists.view(np.int32) if lists.dtype == np.uint32 else lists).astype(np.int64) >= 0
            with self.client.begin_step(items) as step:
                found = step.attend_positions(0, queries, positions)
                again = step.attend_positions(0, queries, positions, lengths.sum(-1))
            np.testing.assert_array_equal(found.output, again.output)
            for i, item in enumerate(items):
                one = {head: np.sort(lists[i, head % lists.shape[1]][:60 + 10 * (head % lists.shape[1])]).astype(np.uint32)
                       for head in range(KV_HEADS)}
                self.assertEqual(found.counts[i], max(len(chosen) for chosen in one.values()))
                group = QUERY_HEADS // KV_HEADS
                for head in range(KV_HEADS):
                    chosen = np.stack([one[head]] * KV_HEADS)
                    expected = item.sequence.attend_positions(0, item.query_position - 1, queries[i], chosen)
                    heads = slice(head * group, (head + 1) * group)
                    np.testing.assert_allclose(found.output[i, heads], expected.output[heads], atol=1e-5)
                    np.testing.assert_allclose(found.lse[i, heads], expected.lse[heads], atol=1e-5)
        # A list for each query head: its kv head's, but one, which has its first half.
        per_query_head = np.repeat(per_head, QUERY_HEADS // KV_HEADS, 1)
        per_query_head[0, 1, 30:] = -1
        with self.client.begin_step(items) as step:
            whole, half = (step.attend_positions(0, queries, lists)
                           for lists in (per_head, np.repeat(per_query_head[:, 1:2], KV_HEADS, 1)))
            found = step.attend_positions(0, queries, per_query_head)
        for i in range(len(items)):
            for head in range(QUERY_HEADS):
                expected = half if (i, head) == (0, 1) else whole
                np.testing.assert_allclose(found.output[i, head], expected.output[i, head], atol=1e-5)
                np.testing.assert_allclose(found.lse[i, head], expected.lse[i, head], atol=1e-5)
        self.assertGreater(np.abs(found.lse[0, 1] - whole.lse[0, 1]), 1e-3)
        with self.client.begin_step(items) as step:
            with self.fails(pqcached.InvalidArgument, "lists.positions[0]"):
                step.attend_positions(0, queries, [[TOKENS], [0]])
            with self.fails(pqcached.InvalidArgument, "lists.positions.shape"):
                step.attend_positions(0, queries, [[1]])
            with self.fails(pqcached.InvalidArgument, "lists.lengths"):
                step.attend_positions(0, queries, [[1], [2]], [1])

    def test_kcache_equals_its_formulas(self):
        """The engine has the keys and the softmax over all of them; the cache has other keys, and the values."""
        items = [StepItem(self.sequence(), tokens) for tokens in (TOKENS, TOKENS - 150)]
        for item in items:
            item.sequence.ingest(0, 0, new_rows(item.query_position, 9)[0], self.layer.values[:item.query_position])
        layers = [Layer(TOKENS), Layer(TOKENS)]
        layers[1].queries = -layers[1].queries
        group = QUERY_HEADS // KV_HEADS
        for top in (32, 64, 128):
            # A kv head's list is the union of what the query heads of its group have selected: N rows for MHA, and
            # for GQA up to N x group, each read once.
            positions = np.full((2, KV_HEADS, top * group), -1, np.int32)
            logits = np.full((2, QUERY_HEADS, top * group), -np.inf, np.float32)
            renormalised, plain = np.zeros((2, QUERY_HEADS, VALUE_DIM)), np.zeros((2, QUERY_HEADS, VALUE_DIM))
            lse_all = np.zeros((2, QUERY_HEADS))
            for i, item in enumerate(items):
                all_logits = layers[i].logits()[:, :item.query_position]
                lse_all[i] = np.logaddexp.reduce(all_logits, axis=1)
                best = np.argsort(-all_logits, axis=1)[:, :top]
                for head in range(QUERY_HEADS):
                    union = np.unique(best[head // group * group:(head // group + 1) * group])
                    positions[i, head // group, :len(union)] = union
                    logits[i, head, :len(union)] = np.where(np.isin(union, best[head]), all_logits[head, union], -np.inf)
                    shares = np.exp(all_logits[head, best[head]] - lse_all[i, head])
                    plain[i, head] = shares @ self.layer.values[best[head], head // group].astype(np.float64)
                    renormalised[i, head] = plain[i, head] / shares.sum()
            with self.client.begin_step(items) as step:
                found = step.attend_positions(0, None, positions, logits=logits)
            np.testing.assert_allclose(found.output, renormalised, atol=1e-5)
            scale = np.exp(found.lse - lse_all)  # without renormalisation
            np.testing.assert_allclose(found.output * scale[..., None], plain, atol=1e-5)
            self.assertLess(scale.max(), 1)

    def test_wrong_logits_are_named(self):
        items, queries = self.batch()
        positions, logits = np.array([[3, 5], [1, 2]]), np.zeros((2, QUERY_HEADS, 2), np.float32)
        prepared = pqcached.PreparedAttention(queries, (np.empty((2, QUERY_HEADS, VALUE_DIM), np.float32),
                                                        np.empty((2, QUERY_HEADS), np.float32)), item_count=2)
        with self.client.begin_step(items) as step:
            found = step.attend_positions(0, None, positions, logits=logits)
            np.testing.assert_allclose(found.lse, np.log(2), atol=1e-6)
            step.attend_positions(0, prepared, positions, logits=logits)
            np.testing.assert_array_equal(prepared.attention.output, found.output)
            with self.fails(pqcached.InvalidArgument, "queries"):
                step.attend_positions(0, None, positions)
            with self.fails(pqcached.InvalidArgument, "lists.positions[1]"):
                step.attend_positions(0, None, positions[:, ::-1], logits=logits)
            for bad in (logits[:, :, :1], logits[:1], logits[:, :-1]):
                with self.fails(pqcached.InvalidArgument, "lists.logits.shape"):
                    step.attend_positions(0, None, positions, logits=bad)
            for number in (np.nan, np.inf):
                logits[1, 2, 0] = number
                with self.fails(pqcached.InvalidArgument, "items[1].logits"):
                    step.attend_positions(0, None, positions, logits=logits)

    def test_steps_select_pages(self):
        items, queries = self.batch()
        some = Selection(retrieved_tokens=100, sink_tokens=4, window_tokens=32)
        with self.client.begin_step(items, some) as step:
            each = step.topk_pages(0, queries, 16)
            one = step.topk_pages(0, queries, 32, heads=pqcached.HeadRule.SUM, with_sink=True, with_window=True)
            every = step.topk_pages(0, queries, 64, ALL, heads=pqcached.HeadRule.MAX)
            with self.fails(pqcached.InvalidArgument, "options.page_tokens"):
                step.topk_pages(0, queries, 17)
        self.assertEqual(each.pages.shape, (2, KV_HEADS, 7))
        self.assertEqual(list(each.lengths), [7, 7])
        for i, item in enumerate(items):
            best = item.sequence.topk(0, item.query_position, queries[i],
                                      Selection(retrieved_tokens=1, sink_tokens=4, window_tokens=32)).positions
            for head in range(KV_HEADS):  # the best token's page is one of the best
                self.assertIn(best[head][0] // 16, each.pages[i, head])
            window = range((item.query_position - 31) // 32, item.query_position // 32 + 1)
            listed = {0, *window}
            self.assertTrue(listed <= set(one.pages[i, 0, :one.lengths[i]]))
            self.assertEqual(one.lengths[i], len(listed) + 4)
            last = (item.query_position - 32) // 64
            np.testing.assert_array_equal(every.pages[i, 0, :last + 1], np.arange(last + 1))
            self.assertTrue((every.pages[i, 0, last + 1:] == -1).all())

    def test_parts_in_tensors_of_the_engine_merge(self):
        sequence = self.filled()
        queries = np.random.default_rng(3).standard_normal((4, QUERY_HEADS, KEY_DIM), dtype=np.float32)
        output, lse = self.causal(queries, TOKENS, (0, TOKENS))
        a, b = ((np.empty((QUERY_HEADS, 4, VALUE_DIM), np.float16).transpose(1, 0, 2), np.empty((QUERY_HEADS, 4), np.float32).T)
                for _ in range(2))
        sequence.attend_range(0, TOKENS, queries, (0, 200), out=a, log_base=pqcached.LogBase.BASE2)
        sequence.attend_range(0, TOKENS, queries, (200, TOKENS), out=b)
        pqcached.merge_tensors(*a, *b, log_base_a=pqcached.LogBase.BASE2)
        np.testing.assert_allclose(a[0], output, atol=2e-3)
        np.testing.assert_allclose(a[1], lse / np.log(2), atol=1e-4)
        with self.fails(pqcached.InvalidArgument, "b.output.shape"):
            pqcached.merge_tensors(*a, b[0][:2], b[1][:2])

    def test_learned_sinks_join_the_softmax_of_a_merge(self):
        sequence = self.filled()
        queries = np.random.default_rng(3).standard_normal((4, QUERY_HEADS, KEY_DIM), dtype=np.float32)
        output, lse = self.causal(queries, TOKENS, (0, TOKENS))
        sinks = np.linspace(-2, 9, QUERY_HEADS, dtype=np.float32)
        a, b = (sequence.attend_range(0, TOKENS, queries, tokens) for tokens in ((0, 200), (200, TOKENS)))
        pqcached.merge_tensors(a.output, a.lse, b.output, b.lse, sink_logits=sinks)
        expected = np.logaddexp(lse, sinks)
        np.testing.assert_allclose(a.lse, expected, atol=1e-4)
        np.testing.assert_allclose(a.output, output * np.exp(lse - expected)[..., None], atol=1e-4)
        with self.fails(pqcached.InvalidArgument, "a.sink_logits.shape"):
            pqcached.merge_tensors(a.output, a.lse, b.output, b.lse, sink_logits=sinks[1:])


class LocalLayoutsTest(LayoutsOverOnePath, DaemonTest):
    path = PathChoice.ONLY_LOCAL


class RemoteLayoutsTest(LayoutsOverOnePath, DaemonTest):
    path = PathChoice.ONLY_REMOTE


PQ = Index.pq(2, 4)
KV_GROUP = QUERY_HEADS // KV_HEADS


class QueryHeadSetsTest(BothPathsTest):
    def setUp(self):
        self.layer = Layer(TOKENS)
        self.sequences = []
        for client in self.clients:
            sequence = self.sequence(client=client)
            sequence.ingest(0, 0, self.layer.keys, self.layer.values)
            sequence.build_index(PQ, iterations=3, seed=1)
            self.sequences.append((client, sequence))

    def expect(self, attention, positions, index=0):
        """That each query head has attended to its own positions."""
        for head in range(QUERY_HEADS):
            lists = [positions[head] if head // KV_GROUP == kv_head else [] for kv_head in range(KV_HEADS)]
            output, lse = self.layer.attend(lists)
            np.testing.assert_allclose(np.asarray(attention.output).reshape(-1, *output.shape)[index, head], output[head], atol=1e-4)
            np.testing.assert_allclose(np.asarray(attention.lse).reshape(-1, *lse.shape)[index, head], lse[head], atol=1e-4)

    def test_exact_sets_are_the_largest_logits_of_each_head(self):
        selection = Selection(retrieved_tokens=60, sink_tokens=4, window_tokens=32, index=Index.flat(),
                              group_rule=GroupRule.PER_QUERY_HEAD)
        best = np.sort(4 + np.argsort(-self.layer.logits()[:, 4:TOKENS - 32], axis=1)[:, :60], axis=1)
        for client, sequence in self.sequences:
            chosen = sequence.topk(0, TOKENS - 1, self.layer.queries, selection)
            self.assertEqual((chosen.kv_heads, chosen.count), (QUERY_HEADS, 60))
            np.testing.assert_array_equal(chosen.positions, best)
            attention = sequence.attend(0, TOKENS - 1, self.layer.queries, selection)
            self.expect(attention, best)
            rows = sequence.fetch_tokens(0, chosen.positions, pqcached.RowPart.KEY)
            for head in range(QUERY_HEADS):
                np.testing.assert_array_equal(rows.reshape(QUERY_HEADS, 60, KEY_DIM)[head],
                                              self.layer.keys[best[head], head // KV_GROUP])
            with client.begin_step([StepItem(sequence, TOKENS)], selection) as step:
                best_in_step = np.sort(4 + np.argsort(-self.layer.logits()[:, 4:TOKENS - 31], axis=1)[:, :60], axis=1)
                np.testing.assert_array_equal(step.topk(0, self.layer.queries[None])[0], best_in_step)
                self.expect(step.attend(0, self.layer.queries[None]), best_in_step)

    def test_an_index_selects_for_each_head(self):
        selection = Selection(retrieved_tokens=60, window_tokens=32, index=PQ, group_rule=GroupRule.PER_QUERY_HEAD)
        for rerank in (0, 2):
            terms = dataclasses.replace(selection, rerank_factor=rerank)
            found = [sequence.topk(0, TOKENS - 1, self.layer.queries, terms).positions for _, sequence in self.sequences]
            np.testing.assert_array_equal(*found)
            for (client, sequence), positions in zip(self.sequences, found):
                self.expect(sequence.attend(0, TOKENS - 1, self.layer.queries, terms), positions)
                for head in range(QUERY_HEADS):
                    alone = sequence.topk(0, TOKENS - 1, np.repeat(self.layer.queries[head:head + 1], QUERY_HEADS, axis=0),
                                          dataclasses.replace(terms, group_rule=GroupRule.MAX_LOGIT))
                    np.testing.assert_array_equal(positions[head], alone.positions[head // KV_GROUP])
                with client.begin_step([StepItem(sequence, TOKENS, 2)], terms) as step:
                    queries = np.stack([self.layer.queries, self.layer.queries])
                    chosen = step.topk(0, queries)[0]
                    self.assertEqual(chosen.shape, (QUERY_HEADS, 60))
                    attention = step.attend(0, queries)
                    for token in range(2):
                        self.expect(attention, chosen, token)

    def test_pages_are_refused_by_name(self):
        selection = Selection(ratio=0.5, window_tokens=32, index=Index.flat(), group_rule=GroupRule.PER_QUERY_HEAD)
        for client, sequence in self.sequences:
            with client.begin_step([StepItem(sequence, TOKENS)], selection) as step:
                with self.fails(pqcached.Unimplemented, "selection.group_rule"):
                    step.topk_pages(0, self.layer.queries[None], 16)


class ForeignArraysTest(DaemonTest):
    def test_arrays_of_dlpack_are_read_and_written_in_place(self):
        from arrays_test import Dlpack
        layer, tokens = Layer(40), 40
        sequence = self.sequence()
        by_head = np.ascontiguousarray(layer.keys.transpose(1, 0, 2))
        sequence.ingest(0, 0, Dlpack(by_head.transpose(1, 0, 2)), Dlpack(layer.values, flags=1))
        keys = np.zeros_like(by_head)
        self.assertIsInstance(sequence.fetch_blocks(0, (0, tokens), pqcached.RowPart.KEY, out=Dlpack(keys)), Dlpack)
        np.testing.assert_array_equal(keys, by_head)
        exact = pqcached.Selection(ratio=1.0, index=pqcached.Index.flat())
        expected = sequence.attend(0, tokens - 1, Dlpack(layer.queries), exact)
        for flags in (None, 0):
            output, lse = np.zeros((VALUE_DIM, QUERY_HEADS), np.float32).T, np.zeros(QUERY_HEADS, np.float32)
            sequence.attend(0, tokens - 1, layer.queries, exact, out=(Dlpack(output, flags=flags), Dlpack(lse, flags=flags)))
            np.testing.assert_array_equal(output, expected.output)
            np.testing.assert_array_equal(lse, expected.lse)
        if hasattr(np, "from_dlpack"):  # results are exported too
            shared = np.from_dlpack(expected.output)
            self.assertTrue(np.shares_memory(shared, expected.output))


if __name__ == "__main__":
    unittest.main()
