#!/usr/bin/env python3
"""The plug-in in real llama.cpp with a real sidecar: selections of everything are exact, whatever happens to the sidecar.

sidecar_test.py BUILD PLUGIN [unittest arguments]   PQCACHED_LLAMA_KILLS=N: kills in the test of killed workers (10).
"""

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()

import engine  # noqa: E402  (after the argument)
from llama_test import PLUGIN, Folder, needs  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import children  # noqa: E402

KILLS = int(os.environ.get("PQCACHED_LLAMA_KILLS", "10"))
SELECTED = re.compile(r"; selected tokens in (\d+); the longest wait was ([\d.]+) ms")
# Everything is selected: the result is that of exact attention, from rows in the sidecar's memory.
ALL = "min_tokens=64,ratio=1,index=flat,sink_tokens=4,window_tokens=8"
OPERATIONS = 600


class Daemon:
    def __init__(self, socket, *flags):
        self.endpoint = f"unix://{socket}"
        self.process = subprocess.Popen(
            [BUILD / "service/pqcached", "--listen", self.endpoint, "--threads", "1", "--shutdown-timeout", "2s", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=children.end_with_parent)
        for line in self.process.stdout:
            if "event=ready" in line:
                break
        else:
            raise RuntimeError("the daemon did not start")
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)  # a full pipe would stop it
        self._reader.start()

    def processes(self):
        """The supervisor and its worker; none when they have ended."""
        if self.process.poll() is not None:
            return []
        children_of = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children_of)]

    def kill_worker(self):
        for process in self.processes()[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def send(self, number):
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def stop(self):
        self.send(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(timeout=30)
        self._reader.join(timeout=30)
        self.process.stdout.close()


class Sidecars:
    version = None

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.socket = pathlib.Path(holder.name, "s")

    def daemon(self, *flags):
        daemon = Daemon(self.socket, *flags)
        self.addCleanup(daemon.stop)
        return daemon

    def compare(self, modes=(), seed=21, count=OPERATIONS, beside=None, settings=ALL, layers=1):
        """Runs a script exactly and with a sidecar, compares all logits, and returns what the plug-in printed. `beside` runs on
        a thread until its argument, an event, is set."""
        model = self.model(layers)
        exact, _ = self.logits(self.version, model, seed, count, modes, PLUGIN, "min_tokens=64")
        ended = threading.Event()
        thread = threading.Thread(target=beside, args=(ended,)) if beside else None
        if thread:
            thread.start()
        try:
            ours, messages = self.logits(self.version, model, seed, count, [*modes, "paced"], PLUGIN,
                                         f"{settings},endpoint=unix://{self.socket}")
        finally:
            ended.set()
            if thread:
                thread.join()
        self.assertEqual(exact.shape, ours.shape)
        # Rows of later layers are rounded to f16, where the last bit of an attention makes another value now and then.
        self.assertLess(np.abs(exact - ours).max(), 1e-4 if layers == 1 else 5e-3)
        self.assertLess(np.median(np.abs(exact - ours).max(1)), 1e-4)
        return messages

    def selected(self, messages):
        nodes, longest = SELECTED.search(messages).groups()
        print(f"{self.id().split('.')[-1]}: {nodes} nodes selected, the longest wait was {longest} ms")
        return int(nodes)

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


@needs(engine.TESTED[0])
class NewestVersion(Sidecars, Folder):
    version = engine.TESTED[0]

    def test_a_killed_worker_changes_nothing(self):
        daemon = self.daemon()
        chance = random.Random(5)
        kills = []

        def kill(ended):
            while not ended.wait(chance.uniform(0.5, 1.5)):
                daemon.kill_worker()
                kills.append(1)

        selected = 0
        while len(kills) < KILLS:
            selected += self.selected(self.compare(["unified"], seed=30 + len(kills), beside=kill))
        self.assertGreater(selected, 0)

    def test_a_restarted_daemon_changes_nothing(self):
        daemons = [self.daemon()]

        def restart(ended):
            ended.wait(1.0)
            daemons[0].send(signal.SIGKILL)
            daemons[0].process.wait()
            daemons.append(self.daemon())
            ended.wait()  # the daemon ends with the thread that started it

        self.assertGreater(self.selected(self.compare(["unified"], beside=restart)), 20)

    def test_a_frozen_sidecar_changes_nothing(self):
        daemon = self.daemon()

        def freeze(ended):
            while not ended.wait(0.3):
                daemon.send(signal.SIGSTOP)
                ended.wait(0.5)
                daemon.send(signal.SIGCONT)

        self.assertGreater(self.selected(self.compare(["unified"], beside=freeze)), 0)

    def test_an_absent_sidecar_changes_nothing(self):
        messages = self.compare()
        self.assertIn("ggml-pqcached: exact until the sidecar answers: ", messages)
        self.assertEqual(self.selected(messages), 0)

    def test_a_late_sidecar_is_used(self):
        def start(ended):
            time.sleep(1.0)
            self.daemon()
            ended.wait()  # the daemon ends with the thread that started it

        self.assertGreater(self.selected(self.compare(beside=start)), 20)

    def test_a_full_sidecar_changes_nothing(self):
        self.daemon("--max-pool-bytes", "64mib")
        self.selected(self.compare(count=OPERATIONS // 2))


@needs(engine.TESTED[1])
class EarlierVersion(Sidecars, Folder):
    version = engine.TESTED[1]


if __name__ == "__main__":
    unittest.main()
