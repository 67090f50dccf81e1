"""vLLM goes on with the same tokens, whatever happens to the sidecar. Usage: faults_test.py BUILD

PQCACHED_VLLM_LONG=1 kills the sidecar 100 times (6 otherwise).
"""

import pathlib
import random
import shutil
import signal
import tempfile
import time
import unittest

import engines  # first
from engines import IS_LONG, Engine, environment, needs_vllm
from equality_test import mixed_requests, tokens_of

from daemon import Daemon, running as daemon

import pqcached

KILLS = 100 if IS_LONG else 6


@needs_vllm
class KillsTest(unittest.TestCase):
    """Each round begins with a new sidecar, stores the prompts there, and runs them again. The sidecar ends meanwhile."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.requests = mixed_requests(8, seed=3)
        self.stock, self.ours = Engine(environment.tiny()), Engine(environment.tiny(), {
            "endpoint": f"unix://{self.folder.name}/s", "timeout_ms": 300, "retry_ms": 1, "threads": 1}, enable_prefix_caching=False)
        context = engines.running(self.stock, self.ours)
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.expected = tokens_of(self.stock.run(self.requests))

    def run_and(self, disturb):
        """Runs the requests twice; during the second time calls `disturb(sidecar)` after a random time. Returns the counts of the second."""
        sidecar = Daemon(self.folder.name)
        try:
            begin = time.monotonic()
            self.assertEqual(tokens_of(self.ours.run(self.requests)), self.expected)
            self.ours.send(self.requests)
            time.sleep(self.random.random() * 0.8 * (time.monotonic() - begin))
            disturb(sidecar)
            answer = self.ours.receive()
            self.assertEqual(tokens_of(answer), self.expected)
            return answer["counts"]
        finally:
            sidecar.stop(signal.SIGKILL)

    def test_kills_at_random_instants_change_no_token(self):
        self.random, loaded = random.Random(4), 0
        for number in range(KILLS):
            with self.subTest(kill=number):
                counts = self.run_and(lambda sidecar: sidecar.stop(signal.SIGKILL))
                loaded = counts["loaded_tokens"]
        self.assertGreater(loaded, 0)
        self.assertGreater(counts["failed_calls"], 0)
        print(f"tokens of {KILLS * len(self.requests)} requests compared after {KILLS} kills")

    def test_a_frozen_sidecar_changes_no_token(self):
        self.random = random.Random(5)

        def freeze(sidecar):
            sidecar.process.send_signal(signal.SIGSTOP)
            time.sleep(2)
            sidecar.process.send_signal(signal.SIGCONT)

        self.run_and(freeze)


@needs_vllm
class FailedLoadTest(unittest.TestCase):
    """The loads of a copy of the package fail while a file exists. vLLM's prefix cache is on, and is filled with other prompts in between."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.failing, package = pathlib.Path(folder.name, "failing"), pathlib.Path(folder.name, "package")
        shutil.copytree(engines.PACKAGE, package)
        worker = package / "pqcached_vllm/worker.py"
        begin = "        assert stored is not None\n"
        fault = f"        import os, pqcached\n        if os.path.exists({str(self.failing)!r}):\n            raise pqcached.NotFound('a test')\n"
        self.assertEqual(worker.read_text().count(begin), 1)
        worker.write_text(worker.read_text().replace(begin, begin + fault))
        sidecar = self.enterContext(daemon())
        self.stock, self.ours = self.enterContext(engines.running(Engine(environment.tiny()), Engine(
            environment.tiny(), {"endpoint": sidecar.endpoint, "timeout_ms": 20000, "threads": 1}, package=package, num_gpu_blocks_override=12,
            max_model_len=1024)))

    def fail_loads(self, requests):
        """Makes the pass in which requests begin, and their loads fail."""
        made = random.Random(8)
        self.ours.run([{"ids": [made.randrange(2, 500) for _ in range(640)], "tokens": 10} for _ in range(3)])
        self.failing.touch()
        failed = self.ours.run(requests, passes=1)["counts"]["failed_calls"]
        self.failing.unlink()
        return failed

    def test_a_request_that_is_aborted_after_it_leaves_nothing_to_others(self):
        made = random.Random(7)
        prompt = {"ids": [made.randrange(2, 500) for _ in range(640)], "tokens": 10}
        (expected,) = tokens_of(self.stock.run([prompt]))
        self.assertEqual(tokens_of(self.ours.run([prompt])), [expected])
        self.assertEqual(self.fail_loads([prompt]), 1)
        with self.subTest("that come later"):
            self.assertEqual(tokens_of(self.ours.run([prompt], abort=[0])), [expected])
        self.assertEqual(self.fail_loads([prompt, prompt]), 2)
        with self.subTest("that came with it"):
            self.assertEqual(tokens_of(self.ours.run(abort=[0]))[1], expected)


@needs_vllm
class RefusalsTest(unittest.TestCase):
    """vLLM starts, and runs without us or with less of us, after one line that says why."""

    @classmethod
    def setUpClass(cls):
        context = daemon()
        sidecar = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        other = pathlib.Path(cls.folder.name, "package")
        shutil.copytree(engines.PACKAGE, other)
        table = other / "pqcached_vllm/versions.py"
        table.write_text(table.read_text().replace("VERSIONS = (V32, V31)", "VERSIONS = ()"))
        base = {"endpoint": sidecar.endpoint, "timeout_ms": 20000, "threads": 1}
        cls.cases = {
            "a key that does not exist": ({**base, "rate": 1}, {}, "takes no part in this engine: kv_connector_extra_config: rate: there is no such key"),
            "an absent sidecar": ({"endpoint": "unix:///nowhere/s"}, {}, "pqcached: no sidecar at unix:///nowhere/s"),
            "a cache of another model": ({**base, "cache": "taken"}, {}, "FAILED_PRECONDITION"),
            "a full sidecar": ({**base, "cache": "small", "capacity_bytes": 2 << 20}, {}, "RESOURCE_EXHAUSTED"),
            "an unknown version": (base, {"package": other}, "pqcached: takes no part in this engine: vLLM 0.3"),
        }
        with pqcached.Client(sidecar.endpoint) as client:
            client.open_cache("taken", model_fingerprint="another", groups=[pqcached.LayerGroup([0], 2, 4, 32, 32)], capacity_bytes=2 << 20).close()
        cls.requests = mixed_requests(6, seed=6)
        made = [Engine(environment.tiny()), *(Engine(environment.tiny(), ours, **more) for ours, more, _ in cls.cases.values())]
        with engines.running(*made):
            answers = [tokens_of(engine.run(cls.requests)) for engine in made]
            cls.lines = dict(zip(cls.cases, (engine.lines() for engine in made[1:])))
        cls.expected, cls.got = answers[0], dict(zip(cls.cases, answers[1:]))

    def test_each_is_said_in_a_line_and_changes_no_token(self):
        for name, (_, _, text) in self.cases.items():
            with self.subTest(case=name):
                self.assertEqual(self.got[name], self.expected)
                lines = sorted(set(self.lines[name]))
                self.assertTrue(any(text in line for line in lines), lines)
                self.assertLessEqual(len(lines), 2, lines)


if __name__ == "__main__":
    unittest.main()
