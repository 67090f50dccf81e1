"""generate() with our cache gives the tokens and logits that it gives with the engine's. Usage: generation_test.py BUILD"""

import unittest

import models  # first
from models import ALL_BY_INDEX, TOLERANCE, HfTest, Index, hf, needs_transformers, one_by_one, select, tokens

if models.is_installed():
    import torch
    from transformers import DynamicCache

NEW = 24


@needs_transformers
class Generation(HfTest):
    def caches(self):
        yield "ratio 1", self.pqc_cache()
        yield "built", self.pqc_cache(select(**ALL_BY_INDEX), index=Index.pq(4, 8), index_tokens=64, wait_for_index=True)
        yield "background", self.pqc_cache(select(**ALL_BY_INDEX), index=Index.pq(4, 8), index_tokens=64)

    def generate(self, model, cache, ids, **named):
        mask = named.pop("mask", None)
        return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, past_key_values=cache,
                              return_dict_in_generate=True, output_logits=True,
                              **{"max_new_tokens": NEW, "do_sample": False, **named})

    def compare_generations(self, ids, **named):
        expected = self.generate(self.stock, self.stock_cache(), ids, **named)
        for name, cache in self.caches():
            with self.subTest(cache=name):
                self.assert_same(self.generate(self.ours, cache, ids, **named), expected)

    def assert_same(self, got, expected):
        self.assertTrue(torch.equal(got.sequences, expected.sequences))
        for place, (own, other) in enumerate(zip(got.logits, expected.logits, strict=True)):
            self.assertLessEqual(float((own - other).abs().max()), TOLERANCE, place)

    def test_greedy(self):
        self.compare_generations(tokens(1, 200))

    def test_greedy_with_left_padding(self):
        ids, mask = tokens(2, 200), torch.ones(2, 200, dtype=torch.long)
        mask[1, :77] = 0
        self.compare_generations(ids, mask=mask)

    def test_prefill_in_chunks(self):
        self.compare_generations(tokens(1, 200), prefill_chunk_size=64)

    def test_beam_search(self):
        self.compare_generations(tokens(2, 150), num_beams=3)

    def test_beam_search_with_left_padding(self):
        ids, mask = tokens(2, 150), torch.ones(2, 150, dtype=torch.long)
        mask[0, :31] = 0
        self.compare_generations(ids, mask=mask, num_beams=3, num_return_sequences=2)

    def test_sampling_of_several_sequences(self):
        ids = tokens(1, 150)
        for name, cache in self.caches():
            with self.subTest(cache=name):
                made = []
                for model, each in ((self.stock, self.stock_cache()), (self.ours, cache)):
                    torch.manual_seed(5)
                    made.append(self.generate(model, each, ids, do_sample=True, num_return_sequences=3))
                self.assert_same(made[1], made[0])

    def test_prompt_lookup_rolls_back(self):
        ids = tokens(1, 40).repeat(1, 5)  # so that drafts are found
        for drafts in (3, 7, 12):  # 13 query tokens are more than a step takes
            with self.subTest(drafts=drafts):
                self.compare_generations(ids, prompt_lookup_num_tokens=drafts)

    def test_an_assistant_model(self):
        ids = tokens(1, 150)
        assistant = models.with_implementation(models.llama(layers=1), "sdpa")
        assistant.generation_config.num_assistant_tokens = 5
        self.compare_generations(ids, assistant_model=assistant)

    def test_the_assistant_may_be_of_this_implementation(self):
        assistant = models.with_implementation(models.llama(layers=1), hf.NAME)
        self.compare_generations(tokens(1, 150), assistant_model=assistant)

    def test_a_second_turn_on_the_same_cache(self):
        first, more = tokens(1, 150), tokens(1, 60, seed=2)
        made = []
        for model, cache in ((self.stock, self.stock_cache()), *((self.ours, cache) for _, cache in self.caches())):
            answer = self.generate(model, cache, first)
            made.append(self.generate(model, cache, torch.cat([answer.sequences, more], 1)))
        for got in made[1:]:
            self.assert_same(got, made[0])

    def test_crop_and_another_continuation(self):
        ids, other = tokens(1, 240), tokens(1, 20, seed=3)

        def run(model, cache):
            self.passes(model, cache, [ids[:, :200], *one_by_one(ids[:, 200:])])
            cache.crop(-33)  # into the prefill and out of the decoded tokens
            return [*self.passes(model, cache, one_by_one(other)), cache.crop(-5), *self.passes(model, cache, [other])]

        expected = run(self.stock, self.stock_cache())
        for name, cache in self.caches():
            with self.subTest(cache=name):
                got = run(self.ours, cache)
                self.assert_equal([*got[:20], *got[21:]], [*expected[:20], *expected[21:]])
                self.assertEqual(cache.get_seq_length(), 242)

    def test_crop_into_the_sink_and_to_nothing(self):
        ids = tokens(1, 60)
        for keep in (2, 0):
            with self.subTest(keep=keep):
                made = []
                for model, cache in ((self.stock, self.stock_cache()), (self.ours, self.pqc_cache())):
                    self.run_pass(model, cache, ids)
                    cache.crop(keep - 60)
                    made.append(self.passes(model, cache, one_by_one(ids[:, keep:])))
                self.assert_equal(made[1], made[0])

    def test_rows_leave_and_are_repeated(self):
        ids, mask = tokens(4, 160), torch.ones(4, 160, dtype=torch.long)
        mask[2, :50] = 0

        def run(model, cache):
            self.passes(model, cache, [ids[:, :140], *one_by_one(ids[:, 140:150])], mask)
            cache.batch_select_indices(torch.tensor([0, 2]))
            cache.batch_repeat_interleave(2)
            rows = [0, 0, 2, 2]
            return self.passes(model, cache, one_by_one(tokens(4, 10, seed=4)), torch.cat([mask[rows, :150], torch.ones(4, 10)], 1))

        expected = run(self.stock, DynamicCache())
        for name, cache in self.caches():
            with self.subTest(cache=name):
                self.assert_equal(run(self.ours, cache), expected)

    def test_a_deep_copy_is_a_fork(self):
        ids = tokens(1, 210)
        expected = self.passes(self.stock, self.stock_cache(), [ids[:, :200], *one_by_one(ids[:, 200:])])
        for name, cache in self.caches():
            with self.subTest(cache=name):
                self.run_pass(self.ours, cache, ids[:, :200])
                with models.copy.deepcopy(cache) as other:
                    self.passes(self.ours, other, one_by_one(tokens(1, 5, seed=9)))
                    self.assertNotEqual(other.sequences[0].id, cache.sequences[0].id)
                self.assert_equal(self.passes(self.ours, cache, one_by_one(ids[:, 200:])), expected[1:])

    def test_reset_begins_anew(self):
        cache = self.pqc_cache()
        self.compare([tokens(1, 80)], cache)
        first = cache.sequences
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        self.assertTrue(all(sequence.closed for sequence in first))
        self.compare([tokens(2, 90, seed=2), *one_by_one(tokens(2, 5))], cache)

    def test_another_cache_or_none_is_exact(self):
        ids = tokens(1, 100)
        self.assert_same(self.generate(self.ours, self.stock_cache(), ids), self.generate(self.stock, self.stock_cache(), ids))
        self.assert_equal([self.ours(ids, use_cache=False).logits], [self.stock(ids, use_cache=False).logits])


if __name__ == "__main__":
    unittest.main()
