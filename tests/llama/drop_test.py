#!/usr/bin/env python3
"""Memory of stored rows that the plug-in gives back: every read finds the rows that llama.cpp has written, or fails.

drop_test.py BUILD PLUGIN [unittest arguments]   PQCACHED_LLAMA_KILLS=N: kills in the test of killed workers (10).
"""

import ctypes
import os
import pathlib
import random
import re
import subprocess
import sys
import time
import unittest

import numpy as np

import sidecar_test
import engine
from kills import beside
from llama_test import PLUGIN, VOCABULARY, Folder, needs

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from skip import skip_unless  # noqa: E402

KILLS = int(os.environ.get("PQCACHED_LLAMA_KILLS", "10"))
GAVE_BACK = re.compile(r"; gave back (\d+) KiB, and fetched (\d+) again")
WORDS = "drop,min_tokens=64,sink_tokens=4,window_tokens=8"
SYSCALL = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)  # userfaultfd
USER_MODE_ONLY = 1


def has_userfaultfd():
    descriptor = -1 if SYSCALL is None else ctypes.CDLL(None).syscall(SYSCALL, os.O_CLOEXEC | USER_MODE_ONLY)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


@skip_unless("userfaultfd", has_userfaultfd(), "the system refuses userfaultfd")
class DroppedRows(sidecar_test.Sidecars):
    version = None
    selections = ("",)

    def bytes_of(self, messages):
        self.assertNotIn("gives no memory back", messages)
        return map(int, GAVE_BACK.search(messages).groups())

    def assert_equal(self, plain, exact, ours, layers=1):
        if len(ours) == 0:
            return
        errors = np.abs(exact - ours).max(1)
        # Prefills are ggml's, which rounds to f16, unless they need rows that were given back.
        of_ggml = np.all(plain == exact, 1)
        self.assertLess(errors[~of_ggml].max(initial=0), 1e-4 if layers == 1 else 2e-2)  # sidecar_test.py says why
        self.assertLess(errors.max(), 5e-3 if layers == 1 else 2e-2)
        self.assertLess(np.median(errors), 1e-4)

    def compare_all(self, modes, settings, seed=21, layers=1, work=None):
        """Runs a script with ggml alone, exactly, and with memory that is given back. Returns the last one's messages."""
        model = self.model(layers)
        plain, _ = self.logits(self.version, model, seed, sidecar_test.OPERATIONS, modes)
        exact, _ = self.logits(self.version, model, seed, sidecar_test.OPERATIONS, modes, PLUGIN, "min_tokens=64")
        with beside(work):
            ours, messages = self.logits(self.version, model, seed, sidecar_test.OPERATIONS, [*modes, "paced"], PLUGIN,
                                         f"{settings}{WORDS},endpoint=unix://{self.socket}")
        self.assertEqual(exact.shape, ours.shape)
        self.assert_equal(plain, exact, ours, layers)
        return messages

    # The scripts copy, shift, remove and restore sequences, whose rows llama.cpp reads itself.
    def test_every_read_finds_the_rows(self):
        self.daemon()
        for selection in self.selections:
            for seed, modes in ((21, []), (60, ["unified"])):
                with self.subTest(selection=selection, modes=modes):
                    gave_back, fetched = self.bytes_of(self.compare_all(modes, selection, seed))
                    print(f"{selection}{' '.join(modes)}: gave back {gave_back} KiB, fetched {fetched} KiB")
                    self.assertGreater(gave_back, 0)
                    self.assertGreater(fetched, 0)

    def test_three_layers(self):
        self.daemon()
        gave_back, _ = self.bytes_of(self.compare_all(["unified"], "ratio=1,index=flat,", layers=3))
        self.assertGreater(gave_back, 0)


@needs(engine.TESTED[0])
class NewestVersion(DroppedRows, Folder):
    version = engine.TESTED[0]
    selections = ("", "ratio=1,index=flat,", "ratio=1,")  # all of them attend to everything

    def test_a_killed_worker_changes_nothing(self):
        chance = random.Random(6)
        kills, gave_back = 0, 0
        while kills < KILLS:
            daemon = self.daemon()  # a new one restarts its worker at once

            def kill(ended):
                for _ in range(3):
                    ended.wait(chance.uniform(0.5, 1.5))
                    daemon.kill_worker()

            messages = self.compare_all(["unified"], "ratio=1,index=flat,deadline_ms=20000,", seed=60 + kills, work=kill)
            daemon.stop()
            kills += 3
            gave_back += next(iter(self.bytes_of(messages)))
        self.assertGreater(gave_back, 0)

    # Rows that the sidecar refuses are not given back.
    def test_a_full_sidecar_changes_nothing(self):
        self.daemon("--max-pool-bytes", "14mib")
        for selection in ("", "ratio=1,index=flat,"):
            messages = self.compare_all(["unified"], selection, seed=80)
            self.assertIn("rows are not stored yet: ", messages)
            print(f"{selection}: gave back {next(iter(self.bytes_of(messages)))} KiB")

    def test_after_a_lost_sidecar_no_token_is_wrong(self):
        """llama_decode fails when it needs rows that are lost, and other reads end the process."""
        failures = 0
        for seed in range(70, 76):
            daemon = self.daemon()
            plain, _ = self.logits(self.version, self.model(1), seed, sidecar_test.OPERATIONS, ["unified"])
            exact, _ = self.logits(self.version, self.model(1), seed, sidecar_test.OPERATIONS, ["unified"], PLUGIN, "min_tokens=64")
            words = [self.model(1), self.folder / "logits", seed, sidecar_test.OPERATIONS, "unified", "paced"]
            words[1].write_bytes(b"")
            engine_process = subprocess.Popen([self.program(self.version, "operations"), *map(str, words)],
                                              env=engine.environment(PLUGIN, f"{WORDS},deadline_ms=300,endpoint={daemon.endpoint}"),
                                              cwd=engine.binaries(self.version), stderr=subprocess.PIPE, text=True)
            while engine_process.poll() is None and words[1].stat().st_size < exact.nbytes / 2:
                time.sleep(0.01)
            daemon.kill()
            _, messages = engine_process.communicate(timeout=120)
            ours = np.fromfile(self.folder / "logits", np.float32)
            ours = ours[:len(ours) // VOCABULARY * VOCABULARY].reshape(-1, VOCABULARY)
            self.assert_equal(plain[:len(ours)], exact[:len(ours)], ours)
            if engine_process.returncode != 0:
                failures += 1
                self.assertRegex(messages, "ggml-pqcached: (llama_decode fails|ends the process): ")
        print(f"{failures} of 6 engines needed lost rows")
        self.assertGreater(failures, 0)


@needs(engine.TESTED[1])
class EarlierVersion(DroppedRows, Folder):
    version = engine.TESTED[1]


if __name__ == "__main__":
    unittest.main()
