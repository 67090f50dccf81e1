"""Attention implementation "pqcached" on a small randomly initialised Llama. Usage: transformers_test.py BUILD

With transformers the model is transformers' own, and one in plain torch (tiny_llama.py) is tested as well. Both need
torch, and are skipped where it is missing.
"""

import contextlib
import importlib.util
import unittest

from daemon import DaemonTest  # finds pqcached: first

import pqcached
from pqcached import Index, Selection
from skip import skip_unless

try:
    import torch
except ImportError:
    torch = None

HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_torch = skip_unless("torch", torch is not None, "torch is not installed (Debian: python3-torch)")
EVERYTHING = Selection(ratio=1.0, sink_tokens=4, window_tokens=8)


class SessionTest(DaemonTest):
    def session(self, config, selection=EVERYTHING, **named):
        from pqcached.transformers import Session
        dtype = named.pop("dtype", torch.float32)
        return Session(self.client, config, model_fingerprint=f"tiny {dtype}", capacity_bytes=64 << 20,
                       selection=selection, **{"cache_name": f"tiny {dtype}", "index_tokens": 32, **named})


@needs_torch
class TinyLlamaTest(SessionTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        import tiny_llama
        from pqcached.transformers import register
        cls.tiny = tiny_llama
        if HAVE_TRANSFORMERS:  # then its own names are tested below
            from pqcached import transformers
            tiny_llama.ATTENTION["pqcached"] = transformers.attention_forward
        else:
            registered = tiny_llama.install_fake_transformers()
            register()
            assert set(registered["mask"]) == {"pqcached"}

    def setUp(self):
        self.config = self.tiny.Config()
        self.model = self.tiny.Llama(self.config)
        self.prompt = torch.randint(self.config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(1))

    @contextlib.contextmanager
    def implementation(self, name):
        self.config._attn_implementation = name
        try:
            yield
        finally:
            self.config._attn_implementation = "eager"

    def passes(self, chunks, steps, tokens=None):
        """Logits of the last token after each pass: prompt in chunks, then greedy steps (or given ones)."""
        cache, logits, chosen, begin = self.tiny.Cache(), [], [], 0
        for chunk in chunks:
            logits.append(self.model(self.prompt[:, begin:begin + chunk], cache))
            begin += chunk
        for step in range(steps):
            token = tokens[step] if tokens else logits[-1].argmax(-1, keepdim=True)
            chosen.append(token)
            logits.append(self.model(token, cache))
        return torch.stack(logits), chosen

    def compare(self, chunks, steps, tolerance=2e-4, **named):
        expected, tokens = self.passes(chunks, steps)
        with self.implementation("pqcached"), self.session(self.config, **named) as session:
            got, _ = self.passes(chunks, steps, tokens)
            described = [sequence.describe() for sequence in session.sequences]
        self.assertEqual([info.token_count for info in described], [sum(chunks) + steps] * 2)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        return described

    def test_all_tokens_equal_eager_attention(self):
        described = self.compare([90], 25)
        self.assertEqual([info.index_count for info in described], [1, 1])

    def test_chunked_prefill_equals_eager_attention(self):
        self.compare([40, 1, 49], 5)

    def test_short_prompts_are_ranked_without_an_index_and_grow_into_one(self):
        described = self.compare([1], 60)
        self.assertEqual(described[0].index_count, 1)
        self.assertEqual(self.compare([20], 10)[0].index_count, 0)

    def test_flat_needs_no_index(self):
        self.assertEqual(self.compare([90], 5, index=Index.flat())[0].index_count, 0)

    def test_bfloat16(self):
        self.model.to(torch.bfloat16)
        self.compare([90], 10, tolerance=6e-2, dtype=torch.bfloat16)

    def test_a_budget_leaves_something_out_and_flat_loses_least(self):
        expected, tokens = self.passes([90], 10)

        def error(**named):
            with self.implementation("pqcached"), self.session(self.config, **named):
                got, _ = self.passes([90], 10, tokens)
            return float((got - expected).abs()[1:].mean())  # the first is prefill

        few = {"sink_tokens": 1, "window_tokens": 1}
        flat = error(selection=Selection(ratio=0.3, **few), index=Index.flat())
        window = error(selection=Selection(token_count=3, **few), index=Index.flat())
        self.assertGreater(flat, 1e-4)
        self.assertLess(flat, window / 2)

    def test_a_second_turn_goes_on_where_the_first_ended(self):
        def turns():
            cache, logits = self.tiny.Cache(), []
            for part in (self.prompt[:, :60], self.prompt[:, 60:61], self.prompt[:, 61:85], self.prompt[:, 85:86]):
                logits.append(self.model(part, cache))
            return torch.stack(logits)

        expected = turns()
        with self.implementation("pqcached"), self.session(self.config) as session:
            torch.testing.assert_close(turns(), expected, rtol=2e-4, atol=2e-4)
            self.assertEqual(session.sequences[0].describe().token_count, 86)

    def test_a_cropped_cache_is_followed(self):
        def crop():
            cache = self.tiny.Cache()
            self.model(self.prompt[:, :60], cache)
            for token in range(60, 70):
                self.model(self.prompt[:, token:token + 1], cache)
            cache.crop(64)
            return torch.stack([self.model(self.prompt[:, token:token + 1], cache) for token in range(75, 80)])

        expected = crop()
        with self.implementation("pqcached"), self.session(self.config) as session:
            torch.testing.assert_close(crop(), expected, rtol=2e-4, atol=2e-4)
            self.assertEqual(session.sequences[0].describe().token_count, 69)

    def test_each_generation_has_sequences_of_its_own_and_the_end_drops_them(self):
        with self.implementation("pqcached"), self.session(self.config) as session:
            self.passes([50], 3)
            first = [sequence.id for sequence in session.sequences]
            self.passes([50], 3)
            second = session.sequences
            self.assertFalse(set(first) & {sequence.id for sequence in second})
        self.assertTrue(all(sequence.closed for sequence in second))
        self.assertFalse(self.client.admin("ListSequences").get("sequences"))

    def test_layers_of_other_kinds_stay_exact(self):
        self.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
        self.compare([90], 5, cache_name="two layers")

    def test_reordered_rows_are_noticed(self):
        with self.implementation("pqcached"), self.session(self.config):
            cache = self.tiny.Cache()
            self.model(self.prompt[:, :60], cache)
            self.model(self.prompt[:, 60:61], cache)
            cache.reorder([1, 0])
            with self.fails(pqcached.FailedPrecondition, "beam search"):
                self.model(self.prompt[:, 61:62], cache)

    def test_what_it_cannot_do_is_refused(self):
        with self.implementation("pqcached"):
            with self.fails(pqcached.FailedPrecondition, "inside `with Session(...):`"):
                self.model(self.prompt, self.tiny.Cache())
            cache = self.tiny.Cache()
            with self.session(self.config):
                self.model(self.prompt[:, :60], cache)
            with self.session(self.config), self.fails(pqcached.FailedPrecondition, "from its first token on"):
                self.model(self.prompt[:, 60:61], cache)
            padded = torch.ones(2, 1, 60, 60, dtype=torch.bool).tril()
            padded[1, :, :, :7] = False
            for mask in (padded, torch.zeros(padded.shape).masked_fill(~padded, -1e9)):
                with self.session(self.config), self.fails(pqcached.Unimplemented, "attention_mask"):
                    self.model(self.prompt[:, :60], self.tiny.Cache(), mask)
        for name in ("softcap", "s_aux", "dropout"):
            with self.session(self.config) as session, self.fails(pqcached.Unimplemented, name):
                states = torch.zeros(1, 2, 5, 32)
                session.attend(self.model.layers[0].self_attn, states, states, states, None, **{name: 0.5})
        with self.fails(pqcached.InvalidArgument, "window_tokens"):
            self.session(self.config, Selection(ratio=1.0))

    def test_a_mask_that_masks_nothing_but_the_future_is_fine(self):
        expected = self.model(self.prompt[:, :60], self.tiny.Cache())
        with self.implementation("pqcached"), self.session(self.config):
            got = self.model(self.prompt[:, :60], self.tiny.Cache(), torch.ones(2, 1, 60, 60, dtype=torch.bool).tril())
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@needs_torch
@skip_unless("transformers", HAVE_TRANSFORMERS, "transformers is not installed (no Debian package)")
class TransformersTest(SessionTest):
    def test_a_random_llama_at_ratio_1_equals_eager_attention(self):
        from transformers import AutoModelForCausalLM, LlamaConfig
        from pqcached.transformers import register
        register()
        config = LlamaConfig(vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                             pad_token_id=0, bos_token_id=1, eos_token_id=None)
        torch.manual_seed(0)
        eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        ours = AutoModelForCausalLM.from_config(config, attn_implementation="pqcached").eval()
        ours.load_state_dict(eager.state_dict())
        prompt = torch.randint(2, 97, (2, 90), generator=torch.Generator().manual_seed(1))
        named = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        expected = eager.generate(prompt, attention_mask=torch.ones_like(prompt), **named)
        with self.session(config) as session:
            got = ours.generate(prompt, attention_mask=torch.ones_like(prompt), **named)
            self.assertEqual(session.sequences[0].describe().index_count, 1)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
        self.assertTrue(torch.equal(got.sequences, expected.sequences))


if __name__ == "__main__":
    unittest.main()
