#!/usr/bin/env python3
"""The plug-in in real llama.cpp, beside plain llama.cpp.

llama_test.py PLUGIN [unittest arguments]   PQCACHED_LLAMA_OPERATIONS=N makes the random scripts N operations long (2000).
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import numpy as np

import engine
import gguf_model

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from skip import skip_unless  # noqa: E402

PLUGIN = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else "libggml-pqcached.so").resolve()
OPERATIONS = int(os.environ.get("PQCACHED_LLAMA_OPERATIONS", "2000"))
VOCABULARY = 128
COMPUTED = re.compile(r"ggml-pqcached: computed (\d+) attention nodes, and left (\d+) to llama.cpp")


def needs(version):
    return skip_unless("llama", engine.is_built(version), f"llama.cpp of {engine.PACKAGE} {version} is not built: tests/llama/engine.py")


class Folder(unittest.TestCase):
    """A folder with models, and programs that are compiled against a version once."""

    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.folder = pathlib.Path(holder.name)
        cls.programs = {}

    def model(self, layers, kind="f32", *words):
        path = self.folder / f"{'-'.join([str(layers), kind, *words])}.gguf"
        if not path.exists():
            gguf_model.random_model(path, gguf_model.arguments(
                [str(path), "--layers", str(layers), "--type", kind, "--vocabulary", str(VOCABULARY), *words]))
        return path

    def program(self, version, program, libraries=None):
        if (version, program) not in self.programs:
            own = self.folder / version
            own.mkdir(exist_ok=True)
            self.programs[version, program] = engine.compile_program(version, program, own, libraries)
        return self.programs[version, program]

    def run_program(self, version, program, words, plugin=None, settings=None):
        """Runs a program; its output, and what the plug-in printed."""
        ended = subprocess.run([self.program(version, program), *map(str, words)], env=engine.environment(plugin, settings),
                               cwd=engine.binaries(version), capture_output=True, text=True, timeout=900)
        self.assertEqual(ended.returncode, 0, ended.stderr[-2000:])
        return ended.stdout, ended.stderr

    def logits(self, version, model, seed, count, modes, plugin=None, settings=None, output="logits"):
        output = self.folder / output
        if engine.IS_TSAN:  # it does not see how the engine's threads wait for each other
            modes = [*modes, "alone"]
        _, messages = self.run_program(version, "operations", [model, output, seed, count, *modes], plugin, settings)
        return np.fromfile(output, np.float32).reshape(-1, VOCABULARY), messages

    def computed(self, messages):
        return int(COMPUTED.search(messages)[1])


class RandomOperations:
    """Random scripts of llama.cpp's API, with plain llama.cpp as the oracle."""

    version = None

    def compare(self, layers, modes, settings, count, seed):
        model = self.model(layers)
        plain, _ = self.logits(self.version, model, seed, count, modes)
        ours, messages = self.logits(self.version, model, seed, count, modes, PLUGIN, settings)
        self.assertEqual(plain.shape, ours.shape)
        self.assertGreater(len(plain), count / 2)
        self.assertGreater(self.computed(messages), count / 4, messages)
        return plain, ours

    # ggml adds up bf16 values in fp32, so that its result is exact, and the rows of a single layer do not depend on attention:
    # then both runs store the same rows, and all that differs is the order of the sums.
    def test_exact_for_the_same_rows(self):
        for modes in ([], ["unified"]):
            with self.subTest(modes=modes):
                plain, ours = self.compare(1, [*modes, "bf16"], "min_tokens=1,kernel_level=portable", OPERATIONS, 11)
                self.assertLess(np.abs(plain - ours).max(), 1e-4)

    # ggml adds up f16 values in f16. The differences are its rounding errors.
    def test_close_with_half_precision(self):
        for modes in ([], ["unified"]):
            with self.subTest(modes=modes):
                plain, ours = self.compare(3, modes, "min_tokens=1", OPERATIONS // 4, 12)
                self.assertLess(np.abs(plain - ours).max(), 0.03)
                self.assertLess(np.sqrt(np.mean((plain - ours) ** 2)), 0.003)
                self.assertGreater(np.mean(plain.argmax(1) == ours.argmax(1)), 0.98)

    def test_short_contexts_are_left_to_llama(self):
        model = self.model(3)
        plain, _ = self.logits(self.version, model, 13, 200, [])
        ours, messages = self.logits(self.version, model, 13, 200, [], PLUGIN)
        self.assertEqual(self.computed(messages), 0)
        self.assertTrue(np.array_equal(plain, ours), "not even a rounding differs")

    def test_wrong_settings_are_refused_and_the_engine_runs(self):
        model = self.model(3)
        plain, _ = self.logits(self.version, model, 13, 20, [])
        for settings, message in (("speed", 'PQCACHED_LLAMA: "speed" is not exact, k=NUMBER, ratio=NUMBER, '),
                                  ("min_tokens=x", '"min_tokens=x" is not min_tokens=NUMBER of 0 to '),
                                  ("exact,kernel_level=mmx", '"kernel_level=mmx" is not kernel_level=NAME')):
            ours, messages = self.logits(self.version, model, 13, 20, [], PLUGIN, settings)
            self.assertIn(f"ggml-pqcached: not used, and llama.cpp runs without it: ", messages)
            self.assertIn(message, messages)
            self.assertTrue(np.array_equal(plain, ours))


@needs(engine.TESTED[0])
class NewestVersion(RandomOperations, Folder):
    version = engine.TESTED[0]


@needs(engine.TESTED[1])
class EarlierVersion(RandomOperations, Folder):
    version = engine.TESTED[1]


@needs(engine.REFUSED)
class RefusedVersion(Folder):
    def test_the_engine_runs_without_the_plugin(self):
        model = self.model(3)
        plain, _ = self.logits(engine.REFUSED, model, 13, 200, [])
        ours, messages = self.logits(engine.REFUSED, model, 13, 200, [], PLUGIN)
        self.assertRegex(messages, r"ggml-pqcached: not used, and llama.cpp runs without it: ggml \S+ has backend API version 1, "
                                   r"and this plug-in was made for version 2\n")
        self.assertTrue(np.array_equal(plain, ours))


if __name__ == "__main__":
    unittest.main()
