#!/usr/bin/env python3
"""llama-server with deploy/llama_server.patch (patched_server.py builds it): a restarted server has the prompts of the earlier one.

server_patch_test.py BUILD PLUGIN [unittest arguments]
"""

import contextlib
import pathlib
import sys
import tempfile
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / name) for name in ("llama/application", "llama", ".", "quality")]
from sidecar_test import BUILD  # noqa: E402  (takes its arguments)
from daemon import Daemon  # noqa: E402
import patched_server  # noqa: E402
import pretrained  # noqa: E402
import server  # noqa: E402
from skip import skip_unless  # noqa: E402

SMOLLM2 = pretrained.cache() / pretrained.FILE
ANSWER_TOKENS = 16
STEP = 128


def text(letters):
    license_text = " ".join((TESTS.parent / "LICENSE").read_text().split())
    return license_text[license_text.index('"License" shall mean'):][:letters]


@skip_unless("smollm2", SMOLLM2.exists(), "SmolLM2 is not fetched: tests/quality/pretrained.py --model")
@skip_unless("llama_server", patched_server.is_built(), "the patched llama-server is not built: tests/llama/application/patched_server.py")
class PatchedServer(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.socket = pathlib.Path(holder.name, "s")

    def daemon(self):
        daemon = Daemon(BUILD, self.socket)
        self.addCleanup(daemon.stop)

    @contextlib.contextmanager
    def server(self, *words, is_used=True):
        name = f"SmolLM2 {len(words)}"  # each test begins with nothing stored
        variables = {"PQCACHED_LLAMA_ENDPOINT": f"unix://{self.socket}", "PQCACHED_LLAMA_MODEL": name,
                     "PQCACHED_LLAMA_TIMEOUT_MS": "20000"} if is_used else {}
        common = ["--ctx-size", 4096, "--parallel", 2, "--threads", 1, "--cache-ram", 0, "--no-warmup", "--flash-attn", "on"]
        with server.Server(patched_server.VERSION, SMOLLM2, [*common, *words], binaries=patched_server.binaries(),
                           variables=variables) as running:
            yield running

    def test_a_restarted_server_has_the_prompt(self):
        self.daemon()
        prompt = text(1800)
        for words in ([], ["--kv-unified", "--cache-type-k", "bf16", "--cache-type-v", "bf16"]):
            with self.subTest(words=words):
                with self.server(*words, is_used=False) as plain:
                    computed = plain.complete(prompt, ANSWER_TOKENS)
                with self.server(*words) as first:
                    saved = first.complete(prompt, ANSWER_TOKENS)
                with self.server(*words) as second:
                    restored = second.complete(prompt, ANSWER_TOKENS, id_slot=0)
                    longer = second.complete(prompt + " In short,", 1, id_slot=1)
                    own = second.complete(prompt, 1, id_slot=0)  # the slot has more than the sidecar
                self.assertNotIn("pqcached: not", first.messages + second.messages)
                count = computed["timings"]["prompt_n"]
                print(f"{words}: {count} tokens of prompt in {computed['timings']['prompt_ms']:.0f} ms; restored: "
                      f"{restored['timings']['prompt_n']} in {restored['timings']['prompt_ms']:.0f} ms", flush=True)
                self.assertEqual(saved["content"], computed["content"])
                self.assertEqual(restored["content"], saved["content"])
                self.assertEqual(saved["timings"]["prompt_n"], count)
                self.assertEqual(restored["timings"]["prompt_n"], count % STEP or 1)
                self.assertLess(longer["timings"]["prompt_n"], STEP + 10)
                self.assertLessEqual(own["timings"]["prompt_n"], 1)

    def test_an_absent_sidecar_changes_nothing(self):
        prompt = text(1500)
        with self.server(is_used=False) as plain:
            computed = plain.complete(prompt, ANSWER_TOKENS)
        with self.server() as running:
            answered = running.complete(prompt, ANSWER_TOKENS)
        self.assertEqual(answered["content"], computed["content"])
        self.assertEqual(answered["timings"]["prompt_n"], computed["timings"]["prompt_n"])
        self.assertIn("pqcached: not saved: ", running.messages)

    def test_models_that_cannot_be_stored(self):
        """Context shift moves rows to other positions: the server says that prompts are not kept, and runs."""
        self.daemon()
        with self.server("--context-shift") as running:
            self.assertGreater(len(running.complete(text(1500), 4)["content"]), 0)
        self.assertIn("pqcached: not used with context shift", running.messages)


if __name__ == "__main__":
    unittest.main()
