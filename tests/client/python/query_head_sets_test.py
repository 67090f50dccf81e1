"""Sets of tokens for each query head, against a real daemon on both paths. Usage: query_head_sets_test.py BUILD"""

import dataclasses
import unittest

import numpy as np

from daemon import KEY_DIM, KV_HEADS, QUERY_HEADS, BothPathsTest, Layer  # finds pqcached: first

import pqcached
from pqcached import GroupRule, Index, Selection, StepItem

TOKENS = 700
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
        selection = Selection(retrieved_tokens=60, index=PQ, group_rule=GroupRule.PER_QUERY_HEAD)
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
        selection = Selection(ratio=0.5, index=Index.flat(), group_rule=GroupRule.PER_QUERY_HEAD)
        for client, sequence in self.sequences:
            with client.begin_step([StepItem(sequence, TOKENS)], selection) as step:
                with self.fails(pqcached.Unimplemented, "selection.group_rule"):
                    step.topk_pages(0, self.layer.queries[None], 16)


if __name__ == "__main__":
    unittest.main()
