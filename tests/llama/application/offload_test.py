#!/usr/bin/env python3
"""Sequences that are longer than llama.cpp's context: offloaded tokens are attended to exactly, or llama_decode fails.

offload_test.py BUILD PLUGIN [unittest arguments]   PQCACHED_LLAMA_KILLS=N: kills in the test of killed workers (10).
"""

import os
import pathlib
import random
import subprocess
import sys
import unittest

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
from kills import beside  # noqa: E402
from sidecar_test import BUILD, Sidecars  # noqa: E402  (takes its argument)
from llama_test import PLUGIN, VOCABULARY, Folder, needs  # noqa: E402
import engine  # noqa: E402

KILLS = int(os.environ.get("PQCACHED_LLAMA_KILLS", "10"))
CELLS = 768  # of both sequences, which have up to 1,400 tokens each
COUNT = 400
WORDS = "offload,min_tokens=1,sink_tokens=4,window_tokens=32"
LIBRARIES = BUILD / "client"


class OffloadedSequences(Sidecars):
    version = None

    def run_script(self, layers, seed, cells, ubatch, modes, settings, statuses=(0,)):
        """Runs a script. Logits, what it printed, and the messages."""
        output = self.folder / "logits"
        ended = subprocess.run([self.program(self.version, "application/offloading", LIBRARIES),
                                *map(str, [self.model(layers), output, seed, COUNT, cells, ubatch, *modes])],
                               env=engine.environment(PLUGIN, settings), cwd=engine.binaries(self.version), capture_output=True, text=True,
                               timeout=300)
        self.assertIn(ended.returncode, statuses, ended.stderr[-2000:])
        logits = np.fromfile(output, np.float32)
        return logits[:len(logits) // VOCABULARY * VOCABULARY].reshape(-1, VOCABULARY), ended.stdout, ended.stderr

    def expected(self, layers, seed, modes):
        """The same script with cells for all tokens. The plug-in computes all of its batches, which have 32 tokens."""
        return self.run_script(layers, seed, 4096, 32, modes, "min_tokens=1")[0]

    def offloaded(self, layers, seed, modes, settings="", statuses=(0,)):
        return self.run_script(layers, seed, CELLS, 192, [*modes, "offload"], f"{settings}{WORDS},endpoint=unix://{self.socket}", statuses)

    def test_exact(self):
        self.daemon()
        for layers, bound in ((1, 1e-5), (3, 5e-3)):  # rows of later layers are rounded to f16: see sidecar_test.py
            for modes in ([], ["unified"]):
                with self.subTest(layers=layers, modes=modes):
                    expected = self.expected(layers, 5, modes)
                    ours, _, messages = self.offloaded(layers, 5, modes)
                    self.assertEqual(expected.shape, ours.shape)
                    self.assertGreater(len(ours), COUNT / 2)
                    self.assertLess(np.abs(expected - ours).max(), bound)
                    self.assertIn("and left 0 to llama.cpp", messages)

    def test_selecting_everything_is_exact(self):
        self.daemon()
        for settings in ("ratio=1,index=flat,", "ratio=1,"):
            with self.subTest(settings=settings):
                expected = self.expected(1, 6, ["unified"])
                ours, _, messages = self.offloaded(1, 6, ["unified"], settings)
                self.assertEqual(expected.shape, ours.shape)
                self.assertLess(np.abs(expected - ours).max(), 1e-5)
                self.assertGreater(self.selected(messages), 10)

    def test_a_copy_a_shift_and_a_hole_make_llama_decode_fail(self):
        self.daemon()
        for change in ("copy", "shift", "hole"):
            with self.subTest(change=change):
                _, printed, messages = self.offloaded(1, 7, ["unified", change])
                failed, after = map(int, printed.split())
                self.assertLess(failed, 0)
                self.assertEqual(after, 0, "a removed sequence begins anew")
                self.assertRegex(messages, "llama_decode fails: a sequence with offloaded tokens was copied")


@needs(engine.TESTED[0])
class NewestVersion(OffloadedSequences, Folder):
    version = engine.TESTED[0]

    def test_a_killed_worker_changes_nothing(self):
        chance = random.Random(5)
        kills = 0
        while kills < KILLS:
            daemon = self.daemon()  # a new one restarts its worker at once

            def kill(ended):
                for _ in range(3):
                    ended.wait(chance.uniform(0.2, 0.8))
                    daemon.kill_worker()

            seed = 40 + kills
            expected = self.expected(1, seed, ["unified"])
            with beside(kill):
                ours, _, messages = self.offloaded(1, seed, ["unified", "persistent", "slow"], "deadline_ms=10000,")
            daemon.stop()
            kills += 3
            self.assertEqual(expected.shape, ours.shape)
            self.assertLess(np.abs(expected - ours).max(), 5e-3, messages)  # see below
            self.assertLess(np.median(np.abs(expected - ours).max(1)), 1e-5)
        print(f"{kills} kills changed nothing")

    def test_a_lost_sidecar_makes_llama_decode_fail(self):
        for restarts in (False, True):
            with self.subTest(restarts=restarts):
                daemon = self.daemon()

                def end(ended):
                    ended.wait(0.7)
                    daemon.kill()
                    if restarts:
                        other = self.daemon()
                        ended.wait()  # the daemon ends with the thread that started it
                        other.stop()

                expected = self.expected(1, 8, ["unified", "slow"])
                with beside(end):
                    ours, _, messages = self.offloaded(1, 8, ["unified", "slow"], "deadline_ms=300,", statuses=(3, 4))
                self.assertGreater(len(ours), 0)
                # A prefill of which nothing is offloaded yet is ggml's, which rounds to f16.
                self.assertLess(np.abs(expected[:len(ours)] - ours).max(), 5e-3, "what was computed is right")
                self.assertLess(np.median(np.abs(expected[:len(ours)] - ours).max(1)), 1e-5)
                self.assertRegex(messages, "llama_decode fails: |not offloaded: ")

    def test_an_absent_sidecar_is_said(self):
        _, _, messages = self.offloaded(1, 9, [], "deadline_ms=100,", statuses=(4,))
        self.assertIn("not offloaded: the sidecar has not stored the rows in time", messages)

    def test_a_program_registers_the_plugin_itself(self):
        expected = self.expected(1, 10, [])
        for path, status in ((PLUGIN, 0), (LIBRARIES / "libpqcached_client.so", 5), (self.folder / "absent.so", 5)):
            environment = {**engine.environment(None, "min_tokens=1"), "PQCACHED_LLAMA_REGISTER": str(path)}
            output = self.folder / "logits"
            ended = subprocess.run([self.program(self.version, "application/offloading", LIBRARIES),
                                    *map(str, [self.model(1), output, 10, COUNT, 4096, 32])],
                                   env=environment, cwd=engine.binaries(self.version), capture_output=True, text=True, timeout=300)
            self.assertEqual(ended.returncode, status, ended.stderr)
            if status == 0:
                self.assertRegex(ended.stderr, r"computed [1-9]\d+ attention nodes")
                self.assertLess(np.abs(np.fromfile(output, np.float32).reshape(-1, VOCABULARY) - expected).max(), 1e-5)
            else:
                self.assertRegex(ended.stderr, "not registered: (path: not a backend of ggml|.*cannot open shared object file)")

    def test_without_the_word_it_is_refused(self):
        _, _, messages = self.run_script(1, 9, CELLS, 192, ["offload"], "min_tokens=1", statuses=(4,))
        self.assertIn("not offloaded: PQCACHED_LLAMA lacks the word offload", messages)


@needs(engine.TESTED[1])
class EarlierVersion(OffloadedSequences, Folder):
    version = engine.TESTED[1]


if __name__ == "__main__":
    unittest.main()
