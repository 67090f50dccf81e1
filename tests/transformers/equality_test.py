"""With all tokens selected, logits are those of SDPA: passes of all kinds, on a random Llama. Usage: equality_test.py BUILD"""

import unittest

import models  # first
from models import ALL_BY_INDEX, HfTest, Index, needs_transformers, one_by_one, pqcached, select, tokens

if models.is_installed():
    import torch

PQ = Index.pq(4, 8)


@needs_transformers
class Passes(HfTest):
    def caches(self):
        """A cache without an index, one whose index is built in the background, and one with live indexes."""
        yield "ratio 1", self.pqc_cache()
        yield "built", self.pqc_cache(select(**ALL_BY_INDEX), index=PQ, index_tokens=64, wait_for_index=True)
        yield "background", self.pqc_cache(select(**ALL_BY_INDEX), index=PQ, index_tokens=64)
        yield "late", self.pqc_cache(select(**ALL_BY_INDEX), index=PQ, index_tokens=320)

    def compare_all(self, *arguments, **named):
        for name, cache in self.caches():
            with self.subTest(cache=name):
                self.compare(*arguments, cache=cache, **named)

    def test_prefill_and_64_decodes(self):
        ids = tokens(1, 364)
        self.compare_all([ids[:, :300], *one_by_one(ids[:, 300:])])

    def test_a_prompt_shorter_than_sink_and_window_grows_past_them(self):
        ids = tokens(1, 40)
        for begin in (1, 7):
            self.compare([ids[:, :begin], *one_by_one(ids[:, begin:])])

    def test_batch_with_left_padding(self):
        ids, mask = tokens(3, 330), torch.ones(3, 330, dtype=torch.long)
        mask[1, :140] = 0
        mask[2, :297] = 0  # shorter than sink and window
        self.compare_all([ids[:, :300], *one_by_one(ids[:, 300:])], mask=mask)

    def test_prefill_in_chunks_one_of_which_is_padding_of_a_row(self):
        ids, mask = tokens(2, 320), torch.ones(2, 320, dtype=torch.long)
        mask[1, :150] = 0
        expected = self.passes(self.stock, self.stock_cache(), [ids[:, :300], *one_by_one(ids[:, 300:])], mask)
        for name, cache in self.caches():
            with self.subTest(cache=name):
                got = self.passes(self.ours, cache, [*ids[:, :300].split(128, dim=1), *one_by_one(ids[:, 300:])], mask)
                joined = [torch.cat(got[:3], 1), *got[3:]]
                self.assert_equal(joined, expected, mask=mask)

    def test_second_and_third_turn(self):
        ids = tokens(1, 520)
        self.compare_all([ids[:, :300], *one_by_one(ids[:, 300:310]), ids[:, 310:350], *one_by_one(ids[:, 350:360]), ids[:, 360:500],
                          *one_by_one(ids[:, 500:])])

    def test_second_turn_of_a_padded_batch(self):
        ids, mask = tokens(2, 360), torch.ones(2, 360, dtype=torch.long)
        mask[0, :200] = 0
        self.compare_all([ids[:, :250], *one_by_one(ids[:, 250:260]), ids[:, 260:330], *one_by_one(ids[:, 330:])], mask=mask)

    def test_blocks_of_2_to_9_tokens_behind_stored_ones(self):
        ids = tokens(2, 400)
        chunks, end = [ids[:, :300]], 300
        for count in (2, 8, 1, 9, 3, 5):
            chunks.append(ids[:, end:end + count])
            end += count
        self.compare_all(chunks)

    def test_tokens_of_a_block_have_selections_of_their_own(self):
        ids = tokens(1, 310)
        caches = [self.pqc_cache(select(retrieved_tokens=30), index=Index.flat()) for _ in range(2)]
        for cache in caches:
            self.run_pass(self.ours, cache, ids[:, :300])
        block, one = (self.run_pass(self.ours, cache, ids[:, 300:300 + count]) for cache, count in zip(caches, (6, 1)))
        self.assert_equal([block[:, :1]], [one])

    def test_bfloat16(self):
        stock, ours = self.stock, self.ours
        self.stock, self.ours = (models.copy.deepcopy(each).to(torch.bfloat16) for each in (stock, ours))
        try:
            ids = tokens(1, 320)
            cache = self.compare([ids[:, :300], *one_by_one(ids[:, 300:])], tolerance=5e-2)
            sequence = cache.sequences[0]
            sequence.flush()  # the rows of the last steps are stored in the background
            self.assertEqual(sequence.describe().token_count, 320)
        finally:
            self.stock, self.ours = stock, ours

    def test_a_small_budget_leaves_tokens_out_and_is_nearer_than_sink_and_window_alone(self):
        ids = tokens(1, 400)
        chunks = [ids[:, :380], *one_by_one(ids[:, 380:])]
        expected = self.passes(self.stock, self.stock_cache(), chunks)

        def error(selection, index=Index.flat()):
            cache = self.pqc_cache(selection, index=index, index_tokens=64, wait_for_index=True)
            got = self.passes(self.ours, cache, chunks)
            return sum(float((own - other).abs().mean()) for own, other in zip(got[1:], expected[1:]))

        least = error(select(retrieved_tokens=1))
        for index in (Index.flat(), PQ):
            with self.subTest(index=index.kind):
                chosen = error(select(ratio=0.3), index)
                self.assertGreater(chosen, 1e-4)
                self.assertLess(chosen, least / 2)
                estimated = error(select(ratio=0.3, tail_estimate=True), index)
                self.assertGreater(estimated, 1e-4)
                self.assertLess(estimated, chosen / 2)


if __name__ == "__main__":
    unittest.main()
