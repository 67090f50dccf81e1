"""Indexes of plug-ins in a real daemon, over both paths. Usage: plugins_test.py BUILD"""

import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import unittest

import numpy as np

from daemon import BUILD, KEY_DIM, KV_HEADS, VALUE_DIM, Daemon, Layer, group  # finds pqcached: first

import pqcached
from pqcached import Index, IndexKind, PathChoice, Selection

EXAMPLE = BUILD / "kvstore/example"
COPY = BUILD / "tests/kvstore/test_plugins/copy"
WRONG_VERSION = BUILD / "tests/kvstore/test_plugins/wrong_version"
TOKENS = 600
LAYERS = (0, 1)
CRASH_IN_ENCODE, CRASH_IN_SCORE = 2, 3
PATHS = (PathChoice.ONLY_LOCAL, PathChoice.ONLY_REMOTE)
PART = Selection(ratio=0.2, sink_tokens=4, window_tokens=32)


class PluginsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.layer = Layer(TOKENS + 20)

    def start(self, plugins, *flags):
        """A daemon whose log is a file. Each start of a test has the same endpoint."""
        (self.folder / "pools").mkdir(exist_ok=True)
        if plugins:
            flags += ("--index-plugins", plugins)
        daemon = Daemon(self.folder, ("--log-file", self.folder / "log", "--pool-directory", self.folder / "pools", *flags),
                        log=self.folder / "log")
        self.addCleanup(daemon.stop)
        return daemon

    def log(self):
        log = self.folder / "log"
        return log.read_text() if log.exists() else ""

    def client(self, path=PathChoice.ONLY_REMOTE):
        client = pqcached.Client(f"unix://{self.folder}/s", timeout_ms=60000, path=path)
        self.addCleanup(client.close)
        return client

    def cache(self, client, index):
        return client.open_cache("cache", model_fingerprint="model", groups=[group(LAYERS)], capacity_bytes=16 << 20,
                                 default_index=index)

    def ingest(self, sequence):
        for layer in LAYERS:
            sequence.ingest(layer, 0, self.layer.keys[:TOKENS], self.layer.values[:TOKENS])

    def filled(self, client, index, build=True):
        """A sequence with TOKENS tokens in two layers, and the index, which is its default."""
        sequence = self.cache(client, index).create_sequence()
        self.ingest(sequence)
        if build:
            sequence.build_index(index)
        return sequence

    def kill_worker(self, daemon):
        """Kills the worker, and waits for the next one."""
        ready = self.log().count("event=ready")
        children = pathlib.Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
        self.assertEqual(len(children), 1, children)
        os.kill(int(children[0]), signal.SIGKILL)
        while self.log().count("event=ready") == ready:
            time.sleep(0.02)

    def exact(self, sequence, selection=Selection(ratio=0.2, index=Index.flat())):
        return sequence.topk(0, TOKENS - 1, self.layer.queries, selection).positions

    def test_the_example_is_listed_made_and_refused_by_field(self):
        self.start(EXAMPLE)
        client = self.client()
        listed = {one.name: one for one in client.index_types()}
        self.assertEqual(sorted(listed), ["clusters", "flat", "graph", "pq", "sq"])
        self.assertTrue(listed["sq"].needs_build)
        self.assertEqual([(one.name, one.least, one.most, one.default) for one in listed["sq"].parameters], [("bits", 4, 8, 8)])
        self.assertEqual(client.make_index("sq").kind, IndexKind.PLUGIN)
        self.assertEqual(client.make_index("sq"), client.make_index("sq", bits=8))
        self.assertNotEqual(client.make_index("sq"), client.make_index("sq", bits=4))
        self.assertEqual(client.make_index("pq", bits=6), Index.make("pq", bits=6))
        for field, wanted, kind, parameters in (
                ("type", '"hnsw", no such index type', "hnsw", {}),
                ("parameters[lists]", "no parameter of sq", "sq", {"lists": 1}),
                ("parameters[bits]", "9, must lie in [4, 8]", "sq", {"bits": 9}),
                ("parameters[bits]", '"six", must lie in [4, 8]', "sq", {"bits": "six"})):
            with self.subTest(field=field), self.assertRaises(pqcached.InvalidArgument) as caught:
                client.make_index(kind, **parameters)
            self.assertEqual(caught.exception.field, field)
            self.assertIn(wanted, str(caught.exception))
        with self.assertRaises(pqcached.InvalidArgument) as caught:
            self.filled(client, client.make_index("sq", bits=5))
        self.assertIn("bits must be 4 or 8", str(caught.exception))

    def test_the_example_selects_on_both_paths_and_outlives_the_worker(self):
        daemon = self.start(EXAMPLE)
        for path in PATHS:
            with self.subTest(path=path.name):
                client = self.client(path)
                sequence = self.filled(client, client.make_index("sq"))
                wanted = self.exact(sequence)
                found = self.exact(sequence, Selection(ratio=0.2))
                hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found, wanted))
                self.assertGreater(hits, 0.97 * wanted.size)
                four = client.make_index("sq", bits=4)
                sequence.build_index(four)
                coarse = self.exact(sequence, Selection(ratio=0.2, index=four))
                hits = sum(len(np.intersect1d(a, b)) for a, b in zip(coarse, wanted))
                self.assertGreater(hits, 0.8 * wanted.size)
                self.assertLess(hits, wanted.size)
                self.kill_worker(daemon)
                np.testing.assert_array_equal(self.exact(sequence, Selection(ratio=0.2)), found)
                np.testing.assert_array_equal(self.exact(sequence, Selection(ratio=0.2, index=four)), coarse)
        self.assertNotIn("event=index_plugin_crashed", self.log())

    def test_a_step_makes_one_rpc_for_each_layer_and_none_with_a_built_in_index(self):
        self.start(COPY)
        client = self.client(PathChoice.ONLY_LOCAL)
        self.assertEqual(client.path, pqcached.Path.LOCAL)
        for index, rpcs in ((client.make_index("copy"), len(LAYERS)), (Index.pq(4, 8), 0)):
            with self.subTest(index=index.kind.name):
                sequence = self.filled(client, index)
                selection = Selection(ratio=0.2, sink_tokens=4, window_tokens=32, index=index)
                with client.begin_step([(sequence, TOKENS)], selection) as step:  # fetches lease and index
                    step.attend(0, self.layer.queries[None])
                with client.begin_step([(sequence, TOKENS)], selection) as step:
                    before = client.counts().rpcs
                    attended = [step.attend(layer, self.layer.queries[None]) for layer in LAYERS]
                    self.assertEqual(client.counts().rpcs - before, rpcs)
                    chosen = step.topk(0, self.layer.queries[None])[0]
                if index.kind == IndexKind.PQ:
                    continue
                best = self.layer.best(range(4, TOKENS + 1 - 32), chosen.shape[1])
                np.testing.assert_array_equal(chosen, best)
                output, lse = self.layer.attend(best)
                for one in attended:
                    np.testing.assert_allclose(one.output[0], output, atol=1e-5)
                    np.testing.assert_allclose(one.lse[0], lse, atol=1e-5)

    def test_pages_scores_and_attentions_of_both_paths_agree(self):
        self.start(EXAMPLE)
        results = []
        for path in PATHS:
            client = self.client(path)
            sequence = self.filled(client, client.make_index("sq", bits=4))
            queries = self.layer.queries
            with client.begin_step([(sequence, TOKENS)], PART) as step:
                results.append([step.topk_pages(0, queries[None], 16).pages, step.topk(1, queries[None])[0],
                                sequence.attend(0, TOKENS - 1, queries, PART).output,
                                sequence.score(0, TOKENS - 1, queries, (10, 400)).logits])
        for local, remote in zip(*results):
            self.assertGreater(np.asarray(local).size, 0)
            np.testing.assert_allclose(local, remote, atol=1e-5)

    def test_decoders_of_both_paths_agree(self):
        self.start(COPY)
        decoded = []
        for path in PATHS:
            client = self.client(path)
            sequence = self.filled(client, client.make_index("copy"), build=False)
            with sequence.decoder(PART) as decoder:
                decoded.append([decoder.decode(layer, self.layer.queries, self.layer.keys[token], self.layer.values[token])
                                for token in range(TOKENS, TOKENS + 20) for layer in LAYERS])
        np.testing.assert_allclose(decoded[0], decoded[1], atol=1e-5)

    def test_a_plugin_that_crashes_three_times_is_switched_off_and_its_layers_are_exact(self):
        self.start(COPY)
        client = self.client()
        index = client.make_index("copy", fault=CRASH_IN_SCORE)
        sequence = self.filled(client, index)
        wanted = self.exact(sequence)
        for _ in range(3):
            with self.assertRaises(pqcached.Unavailable):
                self.exact(sequence, Selection(ratio=0.2))
        np.testing.assert_array_equal(self.exact(sequence, Selection(ratio=0.2)), wanted)
        self.assertEqual(self.log().count("event=index_plugin_crashed"), 3)
        self.assertEqual(len(re.findall("event=index_plugin_switched_off.*index=copy", self.log())), 1)
        listed = {one.name: one for one in client.index_types()}["copy"]
        self.assertIn("switched off after 3 crashes within a minute", listed.text)
        with self.assertRaises(pqcached.FailedPrecondition) as caught:
            sequence.build_index(client.make_index("copy"))
        self.assertIn("copy is switched off", str(caught.exception).replace("index.copy: is", "copy is"))
        for layer in LAYERS:
            self.assertEqual(sequence.fetch_blocks(layer, (0, TOKENS)).shape, (KV_HEADS, TOKENS, KEY_DIM + VALUE_DIM))
        with sequence.decoder(PART) as decoder:
            for layer in LAYERS:
                decoder.decode(layer, self.layer.queries, self.layer.keys[TOKENS], self.layer.values[TOKENS])

    def test_a_live_index_is_followed_on_both_paths(self):
        self.start(COPY)
        for path in PATHS:
            with self.subTest(path=path.name):
                client = self.client(path)
                sequence = self.cache(client, client.make_index("copy")).create_sequence(live_index=True)
                self.ingest(sequence)
                for token in range(TOKENS, TOKENS + 20):
                    with client.begin_step([(sequence, token)], PART) as step:
                        chosen = step.topk(0, self.layer.queries[None])[0]
                        np.testing.assert_array_equal(chosen, self.layer.best(range(4, token + 1 - 32), chosen.shape[1]))
                        step.end({layer: (self.layer.keys[token:token + 1], self.layer.values[token:token + 1]) for layer in LAYERS})
                sequence.flush()
                other = self.client(path)
                attached = self.cache(other, other.make_index("copy")).attach(sequence.id)
                with other.begin_step([(attached, token)], PART) as step:
                    np.testing.assert_array_equal(step.topk(0, self.layer.queries[None])[0], chosen)

    def test_a_live_index_that_crashes_is_switched_off_and_the_rows_stay(self):
        self.start(COPY)
        client = self.client()
        sequence = self.cache(client, client.make_index("copy", fault=CRASH_IN_ENCODE)).create_sequence(live_index=True)
        while True:  # the sidecar works on the index, and crashes, by itself
            try:
                self.ingest(sequence)
                sequence.append(TOKENS, {layer: (self.layer.keys[TOKENS:TOKENS + 1], self.layer.values[TOKENS:TOKENS + 1])
                                         for layer in LAYERS})
                break
            except pqcached.Unavailable:
                pass
        while "event=index_plugin_switched_off" not in self.log():
            time.sleep(0.02)
        np.testing.assert_array_equal(self.exact(sequence, Selection(ratio=0.2)), self.exact(sequence))
        self.assertIn("index copy fault=2 number=7", self.log())

    def test_a_library_of_another_version_is_refused_at_the_start_by_its_name(self):
        ended = subprocess.run([BUILD / "service/pqcached", "--listen", f"unix://{self.folder}/s", "--index-plugins", WRONG_VERSION],
                               capture_output=True, text=True, timeout=60)
        self.assertEqual(ended.returncode, 2, ended)
        self.assertIn("wrong_version/copy.so: is of version 3 of the interface, must lie in [1, 2]", ended.stderr)

    def test_rows_are_recovered_without_the_plugin_of_their_index(self):
        daemon = self.start(COPY)
        client = self.client()
        sequence = self.filled(client, client.make_index("copy"))
        wanted = self.exact(sequence)
        daemon.stop(signal.SIGKILL)
        self.start(None)
        self.assertIn("index copy is left out, because its plug-in is not loaded; the rows stay", self.log())
        np.testing.assert_array_equal(self.exact(sequence), wanted)
        with self.assertRaises(pqcached.InvalidArgument) as caught:
            self.exact(sequence, Selection(ratio=0.2))
        self.assertIn('"copy", no such index type', str(caught.exception))
        sequence.build_index(Index.pq(4, 8))
        caches = client.admin("ListCaches")
        self.assertIn('copy', str(caches))


if __name__ == "__main__":
    unittest.main()
