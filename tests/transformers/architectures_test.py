"""Models with layers of other kinds, learned sinks, softcap, and other shapes. Usage: architectures_test.py BUILD"""

import unittest
import unittest.mock

import models  # first
from models import ALL_BY_INDEX, SHAPE, HfTest, Index, hf, needs_transformers, one_by_one, pqcached, select, tokens

if models.is_installed():
    import torch
    import transformers


@needs_transformers
class Architecture(HfTest):
    """Passes of all kinds, against the eager attention of the engine, which has all features."""

    stock_implementation = "eager"
    stored_layers = 3

    def test_passes(self):
        ids, mask = tokens(2, 330), torch.ones(2, 330, dtype=torch.long)
        mask[1, :90] = 0
        chunks = [ids[:, :250], *one_by_one(ids[:, 250:262]), ids[:, 262:267], ids[:, 267:310], *one_by_one(ids[:, 310:])]
        for selection, named in ((select(), {}), (select(**ALL_BY_INDEX), {"index": Index.pq(4, 8), "index_tokens": 64})):
            with self.subTest(selection=selection):
                cache = self.compare(chunks, self.pqc_cache(selection, **named), mask=mask)
                self.assertEqual(sum(isinstance(layer, hf.PqcLayer) for layer in cache.layers), self.stored_layers)
                cache.sequences[1].flush()
                self.assertEqual(cache.sequences[1].describe().token_count, 240)

    def test_beam_search(self):
        ids = tokens(1, 100)
        named = {"num_beams": 2, "max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        expected = self.stock.generate(ids, past_key_values=self.stock_cache(), **named)
        self.assertTrue(torch.equal(self.ours.generate(ids, past_key_values=self.pqc_cache(), **named), expected))


@needs_transformers
class Gemma3(Architecture):
    """Five layers with a window of 32 tokens, and one with full attention whose scale is not that of its dimension."""

    stored_layers = 1

    @classmethod
    def make_model(cls):
        return models.random_model(transformers.Gemma3TextConfig(
            num_hidden_layers=6, sliding_window=32, query_pre_attn_scalar=24, **SHAPE))

    def test_a_failed_pass_is_not_continued(self):
        cache = self.pqc_cache()
        ids = tokens(1, 100)
        self.run_pass(self.ours, cache, ids)
        with unittest.mock.patch.object(hf.PqcCache, "attend", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            self.run_pass(self.ours, cache, ids[:, :1])
        with self.fails(pqcached.FailedPrecondition, "layers of other kinds"):
            self.run_pass(self.ours, cache, ids[:, :1])
        cache.reset()
        self.compare([ids, *one_by_one(ids[:, :3])], cache)


@needs_transformers
class GptOss(Architecture):
    """Learned sinks, and every other layer with a window."""

    stored_layers = 2

    @classmethod
    def make_model(cls):
        return models.random_model(transformers.GptOssConfig(
            num_hidden_layers=4, sliding_window=32, num_local_experts=2, num_experts_per_tok=1, **SHAPE))


@needs_transformers
class Gemma2(Architecture):
    """Softcap of the logits, and every other layer with a window."""

    stored_layers = 1

    @classmethod
    def make_model(cls):
        return models.random_model(transformers.Gemma2Config(
            num_hidden_layers=2, sliding_window=32, query_pre_attn_scalar=24, attn_logit_softcapping=3.0, **SHAPE))


@needs_transformers
class Qwen3(Architecture):
    """Norms of queries and keys."""

    @classmethod
    def make_model(cls):
        return models.random_model(transformers.Qwen3Config(num_hidden_layers=3, **SHAPE))


@needs_transformers
class Refused(HfTest):
    """What cannot work is refused by name."""

    def test_models(self):
        for config, name in ((transformers.T5Config(), "is_encoder_decoder"),
                             (transformers.Gemma3nTextConfig(num_hidden_layers=6, num_kv_shared_layers=2), "num_kv_shared_layers"),
                             (transformers.Gemma3TextConfig(num_hidden_layers=6, use_bidirectional_attention=True), "is_causal")):
            with self.subTest(name=name), self.fails(pqcached.Unimplemented, name):
                hf.PqcCache(self.client, config, selection=select())

    def test_arguments(self):
        with self.fails(pqcached.InvalidArgument, "window_tokens"):
            self.pqc_cache(select(window=0))
        with self.fails(pqcached.InvalidArgument, "excluded"):
            self.pqc_cache(pqcached.Selection(ratio=0.5, window_tokens=4, excluded=[(1, 2)]))
        with self.fails(pqcached.InvalidArgument, "dtype"):
            self.run_pass(self.ours, self.pqc_cache(dtype=torch.float64), tokens(1, 8))
        with self.fails(pqcached.InvalidArgument, "model_fingerprint"):
            self.pqc_cache().begin(tokens(1, 8))

    def test_another_attention_implementation(self):
        with self.fails(pqcached.FailedPrecondition, "attn_implementation: 'sdpa'"):
            self.run_pass(self.stock, self.pqc_cache(model=self.stock), tokens(1, 8))

    def test_static_cache(self):
        ids = tokens(1, 8)
        static = transformers.StaticCache(config=self.ours.config, max_cache_len=32)
        with self.fails(pqcached.Unimplemented, "static cache"):
            self.run_pass(self.ours, static, ids)
        with self.assertRaisesRegex(ValueError, "cache_implementation"):
            self.ours.generate(ids, past_key_values=self.pqc_cache(), cache_implementation="static", max_new_tokens=2)

    def test_continuous_batching(self):
        with self.fails(pqcached.Unimplemented, "continuous batching"):
            transformers.AttentionInterface()[f"paged|{hf.NAME}"](None)

    def test_compile(self):
        compiled = torch.compile(self.ours, backend="eager")
        with self.assertRaises(Exception) as caught:
            self.run_pass(compiled, self.pqc_cache(), tokens(1, 8))
        self.assertIn("torch.compile", str(caught.exception))

    def test_padding_that_is_not_on_the_left(self):
        mask = torch.ones(1, 8, dtype=torch.long)
        for hole in (7, 3):
            with self.subTest(hole=hole), self.fails(pqcached.Unimplemented, "on the left"):
                torn = mask.clone()
                torn[0, hole] = 0
                self.run_pass(self.ours, self.pqc_cache(), tokens(1, 8), torn)

    def test_padding_that_changes(self):
        cache = self.pqc_cache()
        mask = torch.ones(2, 60, dtype=torch.long)
        self.run_pass(self.ours, cache, tokens(2, 59), mask[:, :59])
        mask[1, :5] = 0
        with self.fails(pqcached.Unimplemented, "row 1 has 5 padding tokens"):
            self.run_pass(self.ours, cache, tokens(2, 1), mask)

    def test_masks_that_are_not_causal(self):
        square = torch.zeros(1, 1, 8, 8)
        with self.fails(pqcached.Unimplemented, "four dimensions"):
            self.ours(tokens(1, 8), past_key_values=self.pqc_cache(), attention_mask=square)
        cache = self.pqc_cache()
        length, _ = cache.get_mask_sizes(8, 0)
        with self.fails(pqcached.Unimplemented, "mask_function"):
            hf.causal_mask(batch_size=1, q_length=8, kv_length=length, mask_function=lambda *_: True)

    def test_keys_that_are_not_those_of_update(self):
        update = hf.PqcCache.update

        def copies(cache, *arguments, **named):
            key, value = update(cache, *arguments, **named)
            return key.clone(), value

        cache = self.pqc_cache()
        with unittest.mock.patch.object(hf.PqcCache, "update", copies), self.fails(pqcached.FailedPrecondition, "key: not the tensor"):
            self.run_pass(self.ours, cache, tokens(1, 8))

    def test_another_number_of_rows(self):
        cache = self.pqc_cache()
        self.run_pass(self.ours, cache, tokens(2, 20))
        with self.fails(pqcached.FailedPrecondition, "3 rows, but the cache has 2"):
            self.run_pass(self.ours, cache, tokens(3, 1))

    def test_dropout(self):
        cache = self.pqc_cache()
        layer = self.ours.model.layers[0].self_attn
        layer.attention_dropout, before = 0.5, layer.attention_dropout
        self.ours.train()
        try:
            with self.fails(pqcached.Unimplemented, "dropout"):
                self.run_pass(self.ours, cache, tokens(1, 8))
        finally:
            self.ours.eval()
            layer.attention_dropout = before


if __name__ == "__main__":
    unittest.main()
