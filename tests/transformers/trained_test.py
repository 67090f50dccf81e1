"""Trained models give the logits and answers that they give with the engine's own attention. Usage: trained_test.py BUILD"""

import unittest

import models  # first
import trained
from models import HfTest, Index, hf, needs_transformers, one_by_one, select
from skip import skip_unless

PROMPT, DECODED = 600, 24


@needs_transformers
class TinyRope(HfTest):
    """The answers are those of the reference of the test engine, exactly."""

    make_model = staticmethod(trained.tiny_rope)

    def test_answers_are_those_of_the_reference(self):
        for task in ("niah", "kv", "mq", "var"):
            for length in (256, 1024):
                for context, asked in trained.questions(task, length, lines=1):
                    for selection, index in ((select(), Index.flat()), (select(retrieved_tokens=1 << 20), Index.pq(4, 8))):
                        with self.subTest(task=task, length=length, index=index.kind):
                            cache = self.pqc_cache(selection, index=index, index_tokens=64)
                            self.run_pass(self.ours, cache, models.torch.tensor([context]))
                            for segments, outputs in asked:
                                self.assertEqual(trained.answer(self.ours, cache, segments, [len(each) for each in outputs]), outputs)


class Pretrained:
    @classmethod
    def make_model(cls):
        model, cls.tokenizer = trained.load(cls.file)
        return model

    def test_logits_of_a_text(self):
        ids = trained.text_tokens(self.tokenizer, PROMPT + DECODED)
        self.compare([ids[:, :PROMPT], *one_by_one(ids[:, PROMPT:])])
        print(f"{self.file.name}: largest difference of a logit {self.largest:.2e}", flush=True)

    def test_generate_gives_the_same_tokens(self):
        inputs = self.tokenizer(["The key of a cache is", "In the morning, the captain of the old ship"], return_tensors="pt",
                                padding=True, padding_side="left")
        named = {"max_new_tokens": DECODED, "do_sample": False}
        expected = self.stock.generate(**inputs, past_key_values=self.stock_cache(), **named)
        self.assertTrue(models.torch.equal(self.ours.generate(**inputs, past_key_values=self.pqc_cache(), **named), expected))


@needs_transformers
@skip_unless("smollm2", trained.SMOLLM2.exists(), "SmolLM2 is not fetched: tests/quality/pretrained.py --model")
class SmolLm2(Pretrained, HfTest):
    file = trained.SMOLLM2


@needs_transformers
@skip_unless("gemma", trained.GEMMA.exists(), "Gemma 3 is not fetched: tests/quality/pretrained.py --gemma")
class Gemma3(Pretrained, HfTest):
    """Three layers with full attention, and 15 with a window."""

    file = trained.GEMMA

    def test_only_layers_with_full_attention_are_stored(self):
        layers = self.pqc_cache().layers
        self.assertEqual([number for number, layer in enumerate(layers) if isinstance(layer, hf.PqcLayer)], [5, 11, 17])


if __name__ == "__main__":
    unittest.main()
