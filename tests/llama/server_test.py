#!/usr/bin/env python3
"""A real llama-server with the plug-in, beside one without: parallel requests with a shared prefix, greedily.

server_test.py PLUGIN [unittest arguments]   PQCACHED_LLAMA_LONG=1 runs the earlier version of llama.cpp as well, and longer texts.
"""

import concurrent.futures
import os
import pathlib
import sys
import unittest

import engine
import server

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / name) for name in (".", "quality")]
import pretrained  # noqa: E402
from skip import skip_unless  # noqa: E402

PLUGIN = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else "libggml-pqcached.so").resolve()
IS_LONG = os.environ.get("PQCACHED_LLAMA_LONG", "0") != "0"
SMOLLM2 = pretrained.cache() / pretrained.FILE
SLOTS = 4
TEXT_LETTERS = 8000 if IS_LONG else 1200
ANSWER_TOKENS = 24
MIN_TOKENS = 256
NEAR_TIE = 1.0  # where the best two tokens are nearer to each other, a rounding may choose between them: models_test.py


def fixed_text():
    license_text = " ".join((pathlib.Path(__file__).resolve().parents[2] / "LICENSE").read_text().split())
    return license_text[license_text.index('"License" shall mean'):][:TEXT_LETTERS]


class Slots:
    """Each request has a text, and the beginning of its repetition. The model copies most of what follows there, without much doubt."""

    version = None

    def answers(self, kv, plugin):
        text = fixed_text()
        ends = [text.index(" ", TEXT_LETTERS * (3 + slot) // (3 + SLOTS)) for slot in range(SLOTS)]
        prompts = [f"{text}\n\n{text[:end]}" for end in ends]
        words = ["--parallel", SLOTS, kv, "--ctx-size", SLOTS * TEXT_LETTERS, "--threads", 1, "--cache-ram", 0, "--no-warmup"]
        with server.Server(self.version, SMOLLM2, words, plugin, f"min_tokens={MIN_TOKENS}") as running:
            running.complete(text, 1)
            with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool:
                answers = list(pool.map(lambda prompt: running.complete(prompt, ANSWER_TOKENS, n_probs=2), prompts))
        self.assertEqual(running.computed() > 0, plugin is not None, running.messages[-2000:])
        self.assertEqual(len({answer["id_slot"] for answer in answers}), SLOTS)
        return [answer["completion_probabilities"] for answer in answers]

    def compare(self, ours, plain):
        self.assertEqual((len(ours), len(plain)), (ANSWER_TOKENS, ANSWER_TOKENS))
        for own, other in zip(ours, plain):
            best, second = (each["logprob"] for each in other["top_logprobs"])
            if own["id"] != other["id"]:
                self.assertLess(best - second, NEAR_TIE, (own, other))
                return  # what follows has another text before it
            self.assertLess(abs(own["logprob"] - other["logprob"]), NEAR_TIE)

    def test_parallel_requests_have_the_tokens_of_plain_llama(self):
        for kv in ("--kv-unified", "--no-kv-unified"):
            with self.subTest(kv=kv):
                plain, ours = self.answers(kv, None), self.answers(kv, PLUGIN)
                for own, other in zip(ours, plain, strict=True):
                    self.compare(own, other)
                equal = sum(all(a["id"] == b["id"] for a, b in zip(own, other)) for own, other in zip(ours, plain))
                print(f"llama-server {kv}: {equal} of {SLOTS} answers are equal", flush=True)
                self.assertGreaterEqual(equal, SLOTS // 2)


def needs_server(version):
    def decorated(test):
        test = skip_unless("smollm2", SMOLLM2.exists(), "SmolLM2 is not fetched: tests/quality/pretrained.py --model")(test)
        return skip_unless("llama_server", engine.is_built(version, ("llama-server",)),
                           f"llama-server of {engine.PACKAGE} {version} is not built: tests/llama/engine.py --tools")(test)
    return decorated


@needs_server(engine.TESTED[0])
class NewestVersion(Slots, unittest.TestCase):
    version = engine.TESTED[0]


if IS_LONG:
    @needs_server(engine.TESTED[1])
    class EarlierVersion(Slots, unittest.TestCase):
        version = engine.TESTED[1]


if __name__ == "__main__":
    unittest.main()
