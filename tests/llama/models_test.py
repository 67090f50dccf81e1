#!/usr/bin/env python3
"""Trained models in real llama.cpp with the plug-in: a small one whose answers are known, and SmolLM2 beside plain llama.cpp.

models_test.py PLUGIN [unittest arguments]   PQCACHED_LLAMA_LONG=1 asks all questions of the small model (of one context in ten
                                             otherwise), and follows 8K tokens of SmolLM2's text (2K otherwise).
"""

import contextlib
import json
import math
import os
import pathlib
import sys
import tempfile
import unittest

import dialogue
import engine
import tinylm_gguf

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / name) for name in (".", "quality")]
import pretrained  # noqa: E402
from skip import skip_unless  # noqa: E402

PLUGIN = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else "libggml-pqcached.so").resolve()
IS_LONG = os.environ.get("PQCACHED_LLAMA_LONG", "0") != "0"
ROOT = pathlib.Path(__file__).resolve().parents[2]
SETTINGS = "min_tokens=1"  # the plug-in takes all contexts

TASKS = ("niah", "kv", "mq", "var")
LENGTH = 1024

SMOLLM2 = pretrained.cache() / pretrained.FILE
TEXTS = ("README.md", "client/README.md", "client/INTEGRATE.md", "service/README.md", "tests/quality/FINDINGS.md", "kvstore/README.md")
PROMPT_TOKENS, FOLLOWED_TOKENS = (7168, 1024) if IS_LONG else (2048, 128)
ANSWER_TOKENS = 64
# The model's products of weights of 4 bits with activations of 8 turn each difference in rounding, also that between two instruction
# sets of the plug-in, into differences of logits up to 0.5. Those of the perplexity become smaller with the number of tokens.
NEAR_TIE = 1.0
PERPLEXITY_TOLERANCE = 0.004 if IS_LONG else 0.02


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Models(unittest.TestCase):
    """Programs that are compiled against a version once."""

    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.folder = pathlib.Path(holder.name)
        cls.program = engine.compile_program(cls.version, "dialogue", cls.folder)

    @contextlib.contextmanager
    def dialogue(self, model, tokens, plugin=None):
        """A dialogue whose attention is computed by the plug-in, when there is one."""
        with dialogue.Dialogue(self.version, self.program, [model, tokens], plugin, SETTINGS) as opened:
            yield opened
            self.assertEqual(opened.end() > 0, plugin is not None)


class TinyLm:
    """The answers of PyTorch to questions about contexts of 1,024 tokens."""

    def test_answers_are_those_of_the_reference(self):
        model = self.folder / "tinylm.gguf"
        tinylm_gguf.write(model)
        with self.dialogue(model, LENGTH + 128, PLUGIN) as asked:
            for task in TASKS:
                self.compare(asked, task)

    def compare(self, asked, task):
        prompts = lines_of(tinylm_gguf.FOLDER / f"prompts_dev/{task}_{LENGTH}.jsonl")
        references = lines_of(tinylm_gguf.FOLDER / f"reference_dev/{task}_{LENGTH}.ref.jsonl")
        for line, prompt in enumerate(prompts[:None if IS_LONG else 1]):
            asked.prefill(prompt["context"])
            for reference in references:
                if reference["line"] != line:
                    continue
                answers = []
                for segment in prompt["questions"][reference["question"]]["segments"]:
                    answers.append([each.token for each in asked.ask(len(segment["answer"]), segment["input"])])
                asked.rewind()
                with self.subTest(task=task, line=line, question=reference["question"]):
                    self.assertEqual(answers, reference["outputs"])


def needs(version):
    return skip_unless("llama", engine.is_built(version), f"llama.cpp of {engine.PACKAGE} {version} is not built: tests/llama/engine.py")


@needs(engine.TESTED[0])
class TinyLmInNewestVersion(TinyLm, Models):
    version = engine.TESTED[0]


@needs(engine.TESTED[1])
class TinyLmInEarlierVersion(TinyLm, Models):
    version = engine.TESTED[1]


@needs(engine.TESTED[0])
@skip_unless("smollm2", SMOLLM2.exists(), "SmolLM2 is not fetched: tests/quality/pretrained.py --model")
class SmolLm2(Models):
    version = engine.TESTED[0]

    def run_model(self, plugin, tokens, answer=None):
        """The tokens' logarithms, and the best tokens in the places of `answer`, which is the model's own one when it is None."""
        with self.dialogue(SMOLLM2, PROMPT_TOKENS + FOLLOWED_TOKENS, plugin) as run:
            run.prefill(tokens[:PROMPT_TOKENS])
            _, logarithms = run.follow(tokens[PROMPT_TOKENS:])
            run.rewind()
            return logarithms, run.ask(ANSWER_TOKENS) if answer is None else run.follow(answer)[0]

    def test_tokens_and_perplexity_are_those_of_plain_llama(self):
        text = self.folder / "text"
        text.write_text("\n".join((ROOT / name).read_text() for name in TEXTS))
        with self.dialogue(SMOLLM2, 256) as opened:
            tokens = opened.text(PROMPT_TOKENS + FOLLOWED_TOKENS, text)
        plain, answer = self.run_model(None, tokens)
        ours, own_answer = self.run_model(PLUGIN, tokens, [each.token for each in answer])
        for place, (own, other) in enumerate(zip(own_answer, answer, strict=True)):
            if other.margin >= NEAR_TIE:
                self.assertEqual(own.token, other.token, place)
        ratio = math.exp((sum(plain) - sum(ours)) / FOLLOWED_TOKENS)
        equal = sum(own.token == other.token for own, other in zip(own_answer, answer))
        print(f"SmolLM2: perplexity {math.exp(-sum(ours) / FOLLOWED_TOKENS):.3f} is {ratio:.4f} of plain llama.cpp's; {equal} of "
              f"{ANSWER_TOKENS} tokens are equal; largest difference of a margin "
              f"{max(abs(own.margin - other.margin) for own, other in zip(own_answer, answer)):.3f}", flush=True)
        self.assertLess(abs(ratio - 1), PERPLEXITY_TOLERANCE)


if __name__ == "__main__":
    unittest.main()
