#!/usr/bin/env python3
"""The plug-in in real llama.cpp with a real sidecar: selections of everything are exact, whatever happens to the sidecar.

sidecar_test.py BUILD PLUGIN [unittest arguments]   PQCACHED_LLAMA_KILLS=N: kills in the test of random kills (20).
"""

import collections
import concurrent.futures
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()

import architectures  # noqa: E402  (after the argument)
import dialogue  # noqa: E402
import engine  # noqa: E402
from daemon import Daemon  # noqa: E402
from kills import EVENTS, Kills, beside  # noqa: E402
from llama_test import PLUGIN, VOCABULARY, Folder, needs  # noqa: E402

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the cores from the sidecars
KILLS = int(os.environ.get("PQCACHED_LLAMA_KILLS", "20"))
SELECTED = re.compile(r"; selected tokens in (\d+); the longest wait was ([\d.]+) ms")
# Everything is selected: the result is that of exact attention, from rows in the sidecar's memory.
ALL = "min_tokens=64,ratio=1,index=flat,sink_tokens=4,window_tokens=8"
OPERATIONS = 600
OPERATIONS_BESIDE_KILLS = 1200
LANES = 4  # engines with sidecars of their own, beside each other


class Sidecars:
    version = None

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.socket = pathlib.Path(holder.name, "s")

    def daemon(self, *flags):
        daemon = Daemon(BUILD, self.socket, *flags)
        self.addCleanup(daemon.stop)
        return daemon

    def compare(self, modes=(), seed=21, count=OPERATIONS, work=None, settings=ALL, layers=1, socket=None):
        """Runs a script exactly and with a sidecar, compares all logits, and returns what the plug-in printed. `work` runs on
        a thread until its argument, an event, is set."""
        model = self.model(layers)
        socket = socket or self.socket
        output = f"logits{socket}".replace("/", "_")
        exact, _ = self.logits(self.version, model, seed, count, modes, PLUGIN, "min_tokens=64", output)
        with beside(work):
            ours, messages = self.logits(self.version, model, seed, count, [*modes, "paced"], PLUGIN,
                                         f"{settings},endpoint=unix://{socket}", output)
        self.assertEqual(exact.shape, ours.shape)
        # Rows of later layers are rounded to f16, where the last bit of an attention makes another value now and then.
        self.assertLess(np.abs(exact - ours).max(), 1e-4 if layers == 1 else 5e-3)
        self.assertLess(np.median(np.abs(exact - ours).max(1)), 1e-4)
        return messages

    def selected(self, messages):
        nodes, longest = SELECTED.search(messages).groups()
        print(f"{self.id().split('.')[-1]}: {nodes} nodes selected, the longest wait was {longest} ms")
        return int(nodes)


class Selections(Sidecars):
    def test_selecting_everything_is_exact(self):
        self.daemon()
        for modes in ([], ["unified"]):
            with self.subTest(modes=modes):
                self.assertGreater(self.selected(self.compare(modes)), 50)

    def test_three_layers(self):
        self.daemon()
        self.assertGreater(self.selected(self.compare(["unified"], layers=3)), 150)

    def test_an_index_of_codes(self):
        self.daemon("--segment-tokens", "256", "--tail-tokens", "128", "--codebook-tokens", "512")
        self.selected(self.compare(["unified"], settings=ALL.replace("index=flat", "index=pq")))

    def test_a_tail_estimate_is_nearer(self):
        self.daemon()
        chance, model = random.Random(1), self.model(2, "f32", "--sharpness", "0.7")
        prompt, followed = ([chance.randrange(2, VOCABULARY) for _ in range(count)] for count in (1500, 12))

        def follow(settings, is_enough):
            """The logarithms of the tokens' probabilities, as soon as they are enough twice."""
            end, before = time.monotonic() + 60, None
            with dialogue.Dialogue(self.version, self.program(self.version, "dialogue"), [model, 4096], PLUGIN, settings) as opened:
                opened.prefill(prompt)
                while True:
                    logarithms = np.array(opened.follow(followed)[1])
                    opened.rewind()
                    if (is_enough(logarithms) and np.array_equal(logarithms, before)) or time.monotonic() > end:
                        return logarithms
                    before = logarithms
                    time.sleep(0.2)

        exact = follow("min_tokens=64", lambda _: True)

        def error(logarithms):
            return np.abs(logarithms - exact).mean()

        words = f"ratio=0.1,index=flat,min_tokens=64,endpoint=unix://{self.socket}"
        alone = error(follow(f"{words},tail=0", lambda found: error(found) > 1e-2))
        estimated = error(follow(words, lambda found: 1e-4 < error(found) < alone / 2))
        print(f"error of a tenth of the tokens {alone:.4f}, with a tail estimate {estimated:.4f}")
        self.assertGreater(alone, 1e-2)
        self.assertGreater(estimated, 1e-4)
        self.assertLess(estimated, alone / 2)

    # Models whose layers have windows, and those whose attention is not to the cache, are attended to exactly.
    def test_architectures(self):
        self.daemon()
        for name in ("llama", "qwen3", "phi3", "falcon-h1", "gemma3", "gpt-oss", "t5"):
            with self.subTest(name):
                model, logits = architectures.write(self.folder, name), self.folder / "logits"
                found = []
                for settings in ("min_tokens=64", f"{ALL},endpoint=unix://{self.socket}"):
                    _, messages = self.run_program(self.version, "graphs", [model, logits, "paced"], PLUGIN, settings)
                    found.append(np.fromfile(logits, np.float32))
                self.assertLess(np.abs(found[0] - found[1]).max(), 5e-3)
                self.assertEqual(int(SELECTED.search(messages)[1]) > 10, name not in ("gemma3", "gpt-oss", "t5"), messages)


@needs(engine.TESTED[0])
class NewestVersion(Selections, Folder):
    version = engine.TESTED[0]

    def test_random_kills_change_nothing(self):
        self.program(self.version, "operations"), self.model(1)  # before the lanes, which share them
        lanes = max(1, min(LANES, KILLS // 10))
        with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
            found = list(pool.map(lambda lane: self.scripts_beside_kills(lane, KILLS // lanes), range(lanes)))
        counts = sum((each[0] for each in found), collections.Counter())
        selected, computed = sum(each[1] for each in found), sum(each[2] for each in found)
        print(f"{sum(counts[event] for event in EVENTS)} kills changed no token: {dict(counts)}; tokens selected in {selected} of "
              f"{computed} nodes; the longest wait was {max(each[3] for each in found)} ms", flush=True)
        if not engine.IS_TSAN:  # which makes the client slower than the scripts
            self.assertGreater(selected, 0)

    def scripts_beside_kills(self, lane, number):
        """Runs scripts until so many kills have happened: their counts, nodes with selected tokens, nodes, and the longest wait."""
        socket = f"{self.socket}{lane}"
        kills = Kills(BUILD, socket, number, seed=5 + lane)
        selected, computed, longest, seed = 0, 0, 0.0, 1000 * lane
        try:
            while kills.is_running():
                messages = self.compare(["unified"], seed=(seed := seed + 1), count=OPERATIONS_BESIDE_KILLS, socket=socket)
                nodes, wait = SELECTED.search(messages).groups()
                selected, computed, longest = selected + int(nodes), computed + self.computed(messages), max(longest, float(wait))
        finally:
            kills.end()
        return kills.counts, selected, computed, longest

    def test_a_restarted_daemon_changes_nothing(self):
        daemons = [self.daemon()]

        def restart(ended):
            ended.wait(1.0)
            daemons[0].send(signal.SIGKILL)
            daemons[0].process.wait()
            daemons.append(self.daemon())
            ended.wait()  # the daemon ends with the thread that started it

        self.assertGreater(self.selected(self.compare(["unified"], work=restart)), 20)

    # The sidecar has sequences that the engine wants to drop. It does not wait for each of them.
    def test_an_engine_ends_soon_after_its_sidecar(self):
        daemons = [self.daemon()]

        def end(ended):
            ended.wait(2.0)
            daemons[0].send(signal.SIGKILL)

        begin = time.monotonic()
        self.selected(self.compare(["unified"], count=OPERATIONS_BESIDE_KILLS, work=end))
        self.assertLess(time.monotonic() - begin, 600 if engine.PRELOAD else 30)

    def test_a_frozen_sidecar_changes_nothing(self):
        daemon = self.daemon()

        def freeze(ended):
            while not ended.wait(0.3):
                daemon.send(signal.SIGSTOP)
                ended.wait(0.5)
                daemon.send(signal.SIGCONT)

        self.assertGreater(self.selected(self.compare(["unified"], work=freeze)), 0)

    def test_an_absent_sidecar_changes_nothing(self):
        messages = self.compare()
        self.assertIn("ggml-pqcached: exact until the sidecar answers: ", messages)
        self.assertEqual(self.selected(messages), 0)

    def test_a_late_sidecar_is_used(self):
        def start(ended):
            time.sleep(1.0)
            self.daemon()
            ended.wait()  # the daemon ends with the thread that started it

        self.assertGreater(self.selected(self.compare(work=start)), 20)

    def test_a_full_sidecar_changes_nothing(self):
        self.daemon("--max-pool-bytes", "64mib")
        self.selected(self.compare(count=OPERATIONS // 2))


@needs(engine.TESTED[1])
class EarlierVersion(Selections, Folder):
    version = engine.TESTED[1]


if __name__ == "__main__":
    unittest.main()
