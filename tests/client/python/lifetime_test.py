"""Handles may be closed in any order, at any time, by anyone: nothing crashes, hangs or leaks. Usage:
lifetime_test.py BUILD"""

import gc
import os
import signal
import subprocess
import sys
import threading
import unittest

import numpy as np

from daemon import SOURCE, DaemonTest, Layer, group, running  # finds pqcached: first

import pqcached
from pqcached import Index, Selection

TOKENS = 300
FLAT = Selection(ratio=0.5, sink_tokens=4, window_tokens=32, index=Index.flat())
LAYER = Layer(TOKENS)


def filled(cache):
    sequence = cache.create_sequence()
    sequence.ingest(0, 0, LAYER.keys, LAYER.values)
    return sequence


def attend(sequence):
    return sequence.attend(0, TOKENS - 1, LAYER.queries, FLAT)


class LifetimeTest(DaemonTest):
    def setUp(self):
        gc.collect()
        self.wait_for(lambda: self.listed() == [])

    def listed(self):
        """What sequences the sidecar still has."""
        return sorted(int(entry["sequence_id"]) for entry in self.client.admin("ListSequences").get("sequences", []))

    def wait_for(self, condition):
        """A session's end is seen by the sidecar a moment later."""
        for _ in range(2000):
            if condition():
                return
            threading.Event().wait(0.005)
        self.fail("the sidecar keeps sequences: " + str(self.listed()))

    def open(self):
        client = pqcached.Client(self.daemon.endpoint, timeout_ms=60000)
        cache = client.open_cache("lifetime", model_fingerprint="m", groups=[group()], capacity_bytes=64 << 20)
        return client, cache, filled(cache)

    def test_the_end_of_with_drops_the_sequence(self):
        with self.cache().create_sequence() as sequence:
            self.assertEqual(self.listed(), [sequence.id])
            self.assertFalse(sequence.closed)
        self.assertTrue(sequence.closed)
        self.assertEqual(self.listed(), [])
        with self.assertRaisesRegex(pqcached.FailedPrecondition, "sequence: it is closed"):
            attend(sequence)
        with self.assertRaisesRegex(pqcached.FailedPrecondition, "sequence: it is closed"):
            sequence.id  # pylint: disable=pointless-statement

    def test_an_exception_inside_with_drops_it_too_and_comes_out(self):
        with self.assertRaisesRegex(KeyError, "of the engine"), self.cache().create_sequence() as sequence:
            raise KeyError("of the engine")
        self.assertTrue(sequence.closed)
        self.assertEqual(self.listed(), [])
        with self.assertRaises(pqcached.InvalidArgument), self.cache().create_sequence() as sequence:
            sequence.ingest(9, 0, LAYER.keys, LAYER.values)
        self.assertEqual(self.listed(), [])

    def test_the_end_of_an_attached_handle_does_not_drop_the_sequence(self):
        with self.cache() as cache, filled(cache) as sequence:
            with pqcached.Client(self.daemon.endpoint, timeout_ms=60000) as worker:
                with self.cache(client=worker).attach(sequence.id) as attached:
                    self.assertEqual(attached.shared_tokens, TOKENS)
                    np.testing.assert_allclose(attend(attached).output, attend(sequence).output, rtol=1e-5)
                self.assertTrue(attached.closed)
                del attached
                forgotten = self.cache(client=worker).attach(sequence.id)
                del forgotten
                gc.collect()
                self.cache(client=worker).attach(sequence.id).detach()
                self.assertEqual(self.listed(), [sequence.id])
                self.cache(client=worker).attach(sequence.id).drop()
                self.assertEqual(self.listed(), [])
                with self.assertRaisesRegex(pqcached.NotFound, "sequence_id"):
                    self.cache(client=worker).attach(sequence.id)

    def test_handles_may_be_closed_in_any_order_and_twice(self):
        for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
            with self.subTest(order=order):
                handles = self.open()
                for index in order:
                    handles[index].close()
                    handles[index].close()
                    with self.assertRaises(pqcached.FailedPrecondition):
                        attend(handles[2]) if index != 1 else handles[1].create_sequence()
                self.wait_for(lambda: self.listed() == [])

    def test_a_closed_cache_leaves_its_sequences_alone(self):
        client, cache, sequence = self.open()
        with client:
            cache.close()
            attend(sequence)
            sequence.drop()

    def test_after_the_client_all_is_closed(self):
        client, cache, sequence = self.open()
        client.close()
        for call in (lambda: attend(sequence), cache.create_sequence, lambda: client.admin("Stats"),
                     sequence.describe):
            with self.assertRaisesRegex(pqcached.FailedPrecondition, "client: it is closed"):
                call()
        self.assertTrue(sequence.closed and cache.closed)

    def test_whoever_holds_a_sequence_holds_its_session(self):
        sequence = self.open()[2]  # client and cache are not referred to any more
        gc.collect()
        attend(sequence)
        identifier = sequence.id
        self.assertIn(identifier, self.listed())
        del sequence
        gc.collect()
        self.wait_for(lambda: self.listed() == [])

    def test_cycles_are_collected(self):
        client, cache, sequence = self.open()
        client.self, client.all = client, [client, cache, sequence]
        del client, cache, sequence
        gc.collect()
        self.wait_for(lambda: self.listed() == [])

    def test_the_collector_does_not_take_the_reason_of_a_call_that_failed(self):
        cache = self.cache()
        live = filled(cache)
        threshold = gc.get_threshold()
        self.addCleanup(gc.set_threshold, *threshold)
        self.addCleanup(live.close)
        for step in range(60):
            garbage = [cache.create_sequence()]
            garbage.append(garbage)
            del garbage
            gc.set_threshold(1)  # collects somewhere in the next call
            try:
                with self.assertRaisesRegex(pqcached.OutOfRange, f"{TOKENS + 1 + step}"):
                    live.fetch_blocks(0, (0, TOKENS + 1 + step))
            finally:
                gc.set_threshold(*threshold)

    def test_a_handle_closed_by_the_collector_keeps_the_reason(self):
        from pqcached import _library
        sequence = self.cache().create_sequence()
        self.assertEqual(_library.library().pqc_sequence_describe(None, None), pqcached.Status.INVALID_ARGUMENT)
        sequence._handle.close_from_collector()
        self.assertEqual(_library.error_of(3).message, "sequence: must not be NULL")

    def test_closing_under_calls_of_other_threads_is_safe(self):
        for victim in (2, 0, 1):
            handles = self.open()
            started, ended = threading.Barrier(4), []

            def work(handles=handles, started=started, ended=ended):
                started.wait()
                try:
                    for _ in range(10_000):
                        attend(handles[2])
                        handles[1].create_sequence().close()
                except pqcached.FailedPrecondition as error:
                    ended.append(error.message)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            started.wait()
            attend(handles[2])
            handles[victim].close()
            for thread in threads:
                thread.join()
            self.assertEqual(len(ended), 3)
            for message in ended:
                self.assertIn("it is closed", message)
            handles[0].close()
            self.wait_for(lambda: self.listed() == [])

    def test_everything_closed_at_once_by_several_threads_is_safe(self):
        for _ in range(20):
            client, cache, sequence = self.open()
            handles = [client, cache, sequence] + [cache.create_sequence() for _ in range(5)]
            together = threading.Barrier(len(handles))

            def close(handle, together=together):
                together.wait()
                handle.close()

            threads = [threading.Thread(target=close, args=(handle,)) for handle in handles]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertTrue(all(handle.closed for handle in handles))
        self.wait_for(lambda: self.listed() == [])

    def test_a_callback_may_close_what_it_is_called_from(self):
        client, _, sequence = self.open()
        sequence.build_index(progress=lambda progress: sequence.close())
        self.assertTrue(sequence.closed)
        self.wait_for(lambda: self.listed() == [])
        sequence = client.open_cache("lifetime", model_fingerprint="m", groups=[group()],
                                     capacity_bytes=64 << 20).create_sequence()
        sequence.ingest(0, 0, LAYER.keys, LAYER.values)
        sequence.build_index(progress=lambda progress: client.close())
        self.assertTrue(client.closed)
        self.wait_for(lambda: self.listed() == [])

    def test_a_step_and_a_change_of_one_sequence_exclude_each_other(self):
        client, _, sequence = self.open()
        with client.begin_step([(sequence, 0)]):
            with self.assertRaisesRegex(pqcached.Aborted, "it is in a step"):
                sequence.truncate(0)
        sequence.truncate(0)

    def test_a_forked_child_neither_uses_nor_closes_what_its_parent_opened(self):
        client, cache, sequence = self.open()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    attend(sequence)
                except pqcached.FailedPrecondition as error:
                    os.write(writer, str(error).encode())
                del client, cache, sequence
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        with os.fdopen(reader) as pipe:
            self.assertIn("opened before a fork", pipe.read())
        attend(sequence)
        client.close()

    def test_a_program_that_closes_nothing_ends_well(self):
        program = f"""
import sys
sys.path[:0] = [{str(SOURCE / 'client/python')!r}]
import numpy, pqcached
client = pqcached.Client({self.daemon.endpoint!r}, timeout_ms=60000)
group = pqcached.LayerGroup([0], 2, 6, 64, 32, pqcached.DType.F32)
cache = client.open_cache("ends", model_fingerprint="m", groups=[group], capacity_bytes=8 << 20)
sequences = [cache.create_sequence() for _ in range(20)]
print(len(sequences))
"""
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              check=False)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "20\n", ""))
        self.wait_for(lambda: self.listed() == [])


class DaemonsEndTest(unittest.TestCase):
    def test_a_killed_sidecar_is_unavailable_and_everything_can_still_be_closed(self):
        with running() as daemon:
            client = pqcached.Client(daemon.endpoint, timeout_ms=5000)
            cache = client.open_cache("killed", model_fingerprint="m", groups=[group()], capacity_bytes=8 << 20)
            sequence = filled(cache)
            daemon.stop(signal.SIGKILL)
            with self.assertRaises(pqcached.Unavailable) as caught:
                attend(sequence)
            self.assertTrue(caught.exception.message)
            with self.assertRaises(pqcached.Unavailable):
                sequence.drop()
            self.assertTrue(sequence.closed)
            cache.close()
            client.close()


if __name__ == "__main__":
    unittest.main()
