"""A real pqcached on a unix socket in a folder of its own, and made-up layers with what is right about them.

Test programs are run as `x_test.py BUILD_FOLDER [unittest's arguments]`.
"""

import contextlib
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

SOURCE = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
sys.path[:0] = [str(SOURCE / "client/python"), str(SOURCE / "tests")]

import children  # noqa: E402
import pqcached  # noqa: E402  (found in the line above)

STOP_SECONDS = 30
KV_HEADS, QUERY_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 64, 32


class Daemon:
    """Small segments, so that a few hundred tokens lie in several of them.

    log: the file that `flags` name for the log, if they do.
    """

    def __init__(self, folder, flags=(), log=None):
        self.endpoint = f"unix://{folder}/s"
        self._log_begin = log.stat().st_size if log and log.exists() else 0
        self.process = subprocess.Popen(
            [BUILD / "service/pqcached", "--listen", self.endpoint, "--segment-tokens", "256", "--tail-tokens", "128",
             "--codebook-tokens", "512", "--max-pool-bytes", "256mib", "--shutdown-timeout", "2s", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=children.end_with_parent)
        said = []
        for line in self._lines_of(log) if log else self.process.stdout:  # it says when it listens; its end closes the pipe
            said.append(line)
            if "event=ready" in line:
                break
        else:
            raise RuntimeError("the daemon did not start:\n" + "".join(said))
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)  # a full pipe would stop it
        self._reader.start()

    def _lines_of(self, log):
        """The lines that the daemon adds to its log, until it ends."""
        while not log.exists():
            time.sleep(0.01)
        with log.open() as file:
            file.seek(self._log_begin)
            while self.process.poll() is None:
                yield file.readline()
                time.sleep(0.001)

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(timeout=STOP_SECONDS)
        self._reader.join(timeout=STOP_SECONDS)
        self.process.stdout.close()


@contextlib.contextmanager
def running(*flags):
    """A Daemon that lives as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(folder, flags)
        try:
            yield daemon
        finally:
            daemon.stop()


class DaemonTest(unittest.TestCase):
    """One daemon and client for all tests of a class; each test has sequences of its own."""

    @classmethod
    def setUpClass(cls):
        context = running()
        cls.daemon = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        cls.client = pqcached.Client(cls.daemon.endpoint, timeout_ms=60000)
        cls.addClassCleanup(cls.client.close)

    def cache(self, layers=(0,), dtype=pqcached.DType.F32, client=None):
        name = f"{dtype.name}-{len(layers)}-layers"  # one cache for all tests that need such layers
        cache = (client or self.client).open_cache(name, model_fingerprint=f"model of {name}",
                                                   groups=[group(layers, dtype)], capacity_bytes=16 << 20)
        self.addCleanup(cache.close)
        return cache

    def sequence(self, *arguments, **named):
        sequence = self.cache(*arguments, **named).create_sequence()
        self.addCleanup(sequence.close)
        return sequence

    @contextlib.contextmanager
    def fails(self, error, part):
        """That the block raises exactly this class, and the message has `part`."""
        with self.assertRaises(pqcached.Error if issubclass(error, pqcached.Error) else error) as caught:
            yield caught
        self.assertIs(type(caught.exception), error, caught.exception)
        self.assertIn(part, str(caught.exception))


class BothPathsTest(DaemonTest):
    """A DaemonTest with `clients`, one for each path."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.clients = [pqcached.Client(cls.daemon.endpoint, timeout_ms=60000, path=path)
                       for path in (pqcached.PathChoice.ONLY_LOCAL, pqcached.PathChoice.ONLY_REMOTE)]
        for client in cls.clients:
            cls.addClassCleanup(client.close)


def group(layers=(0,), dtype=pqcached.DType.F32):
    return pqcached.LayerGroup(list(layers), KV_HEADS, QUERY_HEADS, KEY_DIM, VALUE_DIM, dtype)


class Layer:
    """Made-up rows of one layer, float32."""

    def __init__(self, tokens, seed=0):
        random = np.random.default_rng(seed)
        self.keys = random.standard_normal((tokens, KV_HEADS, KEY_DIM), dtype=np.float32)
        self.values = random.standard_normal((tokens, KV_HEADS, VALUE_DIM), dtype=np.float32)
        self.queries = 2 * random.standard_normal((QUERY_HEADS, KEY_DIM), dtype=np.float32)

    def logits(self, keys=None):
        """[query_heads, tokens], scaled."""
        keys = (self.keys if keys is None else keys).astype(np.float64)
        grouped = self.queries.astype(np.float64).reshape(KV_HEADS, -1, KEY_DIM)
        return np.einsum("hgd,thd->hgt", grouped, keys).reshape(QUERY_HEADS, -1) / np.sqrt(KEY_DIM)

    def attend(self, positions, keys=None, values=None):
        """Output and lse over positions [kv_heads][...]."""
        logits, values = self.logits(keys), (self.values if values is None else values).astype(np.float64)
        output, lse = np.zeros((QUERY_HEADS, VALUE_DIM)), np.full(QUERY_HEADS, -np.inf)
        for head in range(QUERY_HEADS):
            kv_head = head // (QUERY_HEADS // KV_HEADS)
            tokens = np.asarray(positions[kv_head], dtype=np.int64)
            if tokens.size:
                lse[head] = np.logaddexp.reduce(logits[head, tokens])
                output[head] = np.exp(logits[head, tokens] - lse[head]) @ values[tokens, kv_head]
        return output, lse

    def best(self, candidates, count):
        """Per kv head, the `count` of the candidates with the largest sum over the query heads of softmax; ascending."""
        logits = self.logits()[:, candidates]
        shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
        scores = shares.reshape(KV_HEADS, -1, len(candidates)).sum(axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return np.sort(np.asarray(candidates)[order], axis=1)
