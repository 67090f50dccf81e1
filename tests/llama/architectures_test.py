#!/usr/bin/env python3
"""Tiny models of several architectures (architectures.py) in real llama.cpp: the recorded graphs are those that it makes, and the
plug-in, which takes the attention of most of them, gives the logits of plain llama.cpp.

architectures_test.py PLUGIN [unittest arguments]
architectures_test.py --record   writes the recordings, which graphs_test.cc reads, anew
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

import architectures
import engine
from llama_test import PLUGIN, Folder, needs

GRAPHS = pathlib.Path(__file__).resolve().parent / "graphs"
REFUSED = {"deepseek2": "V that is a part of K (MLA)", "bloom": "ALiBi"}


class Architectures:
    version = None

    def graphs(self, name, *words, plugin=None, settings=None):
        """The logits of a model, and what the plug-in printed."""
        model = self.folder / f"{name}.gguf"
        if not model.exists():
            architectures.write(self.folder, name)
        _, messages = self.run_program(self.version, "graphs", [model, self.folder / "logits", *words], plugin, settings)
        return np.fromfile(self.folder / "logits", np.float32).reshape(-1, architectures.VOCABULARY), messages

    def test_recordings_are_the_graphs_that_llama_makes(self):
        recording = self.folder / "recording"
        for name in architectures.ARCHITECTURES:
            with self.subTest(name):
                self.graphs(name, recording)
                self.assertEqual(recording.read_text(), (GRAPHS / f"{name}.txt").read_text(), "see --record")

    # The differences are ggml's roundings: it adds up f16 values in f16.
    def test_logits_are_those_of_plain_llama(self):
        for name in architectures.ARCHITECTURES:
            with self.subTest(name):
                plain, _ = self.graphs(name)
                ours, messages = self.graphs(name, plugin=PLUGIN, settings="min_tokens=64")
                self.assertEqual(plain.shape, ours.shape)
                self.assertGreater(plain.std(), 0.5)
                if refusal := REFUSED.get(name):
                    self.assertIn(f"ggml-pqcached: leaves layers with {refusal} to llama.cpp\n", messages)
                    self.assertNotIn("computed", messages)
                    self.assertTrue(np.array_equal(plain, ours))
                    continue
                self.assertNotIn("leaves layers", messages)
                self.assertGreater(self.computed(messages), 50)
                self.assertLess(np.abs(plain - ours).max(), 0.03)
                self.assertLess(np.sqrt(np.mean((plain - ours)**2)), 0.003)


@needs(engine.TESTED[0])
class NewestVersion(Architectures, Folder):
    version = engine.TESTED[0]


@needs(engine.TESTED[1])
class EarlierVersion(Architectures, Folder):
    version = engine.TESTED[1]


def record():
    with tempfile.TemporaryDirectory() as folder:
        program = engine.compile_program(engine.TESTED[0], "graphs", folder)
        for name in architectures.ARCHITECTURES:
            subprocess.run([program, architectures.write(folder, name), "/dev/null", GRAPHS / f"{name}.txt"], env=engine.environment(),
                           cwd=engine.binaries(engine.TESTED[0]), check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        unittest.main()
