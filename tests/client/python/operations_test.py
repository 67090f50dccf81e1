"""Calls that coroutines await, and events, against a real daemon on both paths."""

import asyncio
import gc
import os
import pathlib
import select
import signal
import threading
import time
import unittest
import weakref

import numpy as np

from daemon import BothPathsTest, Daemon, Layer, group, pqcached, running

TIME_LIMIT = 60


def within(coroutine):
    """Runs a coroutine in a loop of its own."""
    async def limited():
        return await asyncio.wait_for(coroutine, TIME_LIMIT)
    return asyncio.run(limited())


def stop_threads(pid):
    """Stops a process and waits until each of its threads has stopped, which the kernel does later."""
    os.kill(pid, signal.SIGSTOP)
    while True:
        stats = [task.joinpath("stat").read_text() for task in pathlib.Path(f"/proc/{pid}/task").iterdir()]
        if all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
            return
        time.sleep(0.001)


def rows(layer, begin, end, layers=(0,)):
    return {number: (layer.keys[begin:end], layer.values[begin:end]) for number in layers}


class OperationsTest(BothPathsTest):
    def sequence_of(self, client, layers):
        name = f"{client.path.name}-{len(layers)}"
        cache = client.open_cache(name, model_fingerprint="1", groups=[group(layers)], capacity_bytes=48 << 20)
        sequence = cache.create_sequence()
        self.addCleanup(sequence.close)
        return sequence

    def each_path(self, layers=(0, 1)):
        for client in self.clients:
            yield client, self.sequence_of(client, layers)

    def test_a_request_is_awaited_from_ingest_to_flush(self):
        layer = Layer(400)
        for _, sequence in self.each_path():
            calls = []

            async def serve():
                await sequence.ingest_async(0, rows(layer, 0, 300, (0, 1)))
                await sequence.build_index_async(sink_tokens=4, progress=lambda done: calls.append(done.layer))
                await sequence.ingest_async(300, rows(layer, 300, 310, (0, 1)),
                                            names=pqcached.TokenNames(0, token_ids=range(256)))
                await sequence.flush_async()

            within(serve())
            self.assertEqual(set(calls), {0, 1})
            info = sequence.describe()
            self.assertEqual((info.token_count, info.index_count), (310, 1))
            fetched = sequence.fetch_blocks(1, (0, 310), pqcached.RowPart.KEY)
            np.testing.assert_array_equal(fetched, layer.keys[:310].transpose(1, 0, 2))

    def test_many_sequences_at_once_and_the_loop_goes_on(self):
        layer = Layer(300)
        for client, _ in self.each_path():
            sequences = [self.sequence_of(client, (0, 1)) for _ in range(8)]
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0.001)

            async def serve(sequence):
                await sequence.ingest_async(0, rows(layer, 0, 300, (0, 1)))
                await sequence.build_index_async(sink_tokens=4, iterations=50)

            async def all_of_them():
                ticking = asyncio.ensure_future(tick())
                await asyncio.gather(*[serve(sequence) for sequence in sequences])
                ticking.cancel()

            within(all_of_them())
            self.assertGreater(ticks, 5)
            for sequence in sequences:
                self.assertEqual(sequence.describe().index_count, 1)

    def test_errors_are_those_of_the_plain_calls(self):
        layer = Layer(320)
        for _, sequence in self.each_path((0,)):
            within(sequence.ingest_async(0, rows(layer, 0, 300)))
            with self.assertRaises(pqcached.InvalidArgument) as plain:
                sequence.ingest(0, 310, layer.keys[310:], layer.values[310:])
            with self.assertRaises(pqcached.InvalidArgument) as awaited:
                within(sequence.ingest_async(310, rows(layer, 310, 320)))
            self.assertEqual(str(awaited.exception), str(plain.exception))
            self.assertEqual(awaited.exception.field, plain.exception.field)
            with self.assertRaises(pqcached.InvalidArgument) as early:
                within(sequence.ingest_async(300, rows(layer, 300, 310, (7,))))
            self.assertEqual(early.exception.field, "layers[0].layer")
            within(sequence.build_index_async(sink_tokens=4))
            with self.assertRaises(pqcached.AlreadyExists):
                within(sequence.build_index_async(sink_tokens=4))

    def test_an_exception_of_progress_ends_the_build(self):
        layer = Layer(700)
        for _, sequence in self.each_path():
            within(sequence.ingest_async(0, rows(layer, 0, 700, (0, 1))))

            def fails(_):
                raise KeyError("own")

            with self.assertRaises(KeyError):
                within(sequence.build_index_async(progress=fails))
            with self.assertRaises(pqcached.Cancelled):
                while True:  # the cancelled one may still be ending
                    try:
                        within(sequence.build_index_async(progress=lambda _: False, iterations=1000))
                        raise pqcached.Cancelled("it was too late")
                    except pqcached.Aborted:
                        time.sleep(0.01)
                    except pqcached.AlreadyExists as error:
                        raise pqcached.Cancelled("it was too late") from error

    def test_arrays_live_until_the_operation_has_ended(self):
        for _, sequence in self.each_path((0,)):
            layer = Layer(300)
            watched = []

            async def ingest():
                keys, values = layer.keys.copy(), layer.values.copy()
                watched.append(weakref.ref(keys))
                awaitable = sequence.ingest_async(0, {0: (keys, values)})
                task = asyncio.ensure_future(awaitable)
                del keys, values, awaitable
                await asyncio.sleep(0)  # it begins
                gc.collect()
                alive = watched[0]() is not None
                done = task.done()
                await task
                return alive or done

            self.assertTrue(within(ingest()))
            gc.collect()
            self.assertIsNone(watched[0]())
            np.testing.assert_array_equal(sequence.fetch_blocks(0, (0, 300), pqcached.RowPart.KEY),
                                          layer.keys.transpose(1, 0, 2))

    def test_arrays_outlive_a_cancelled_task(self):
        supervisor = self.daemon.process.pid
        worker = int(pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])
        for client, sequence in self.each_path((0,)):
            keys, values = Layer(300).keys.copy(), Layer(300).values.copy()
            watched = weakref.ref(keys)

            async def cancel(keys, values):
                stop_threads(worker)
                try:
                    task = asyncio.ensure_future(sequence.ingest_async(0, {0: (keys, values)}))
                    await asyncio.sleep(0.05)  # it has begun, and ends with the worker's answer
                    task.cancel()
                    with self.assertRaises(asyncio.CancelledError):
                        await task
                    del task, keys, values
                    gc.collect()
                    alive = watched() is not None
                finally:
                    os.kill(worker, signal.SIGCONT)
                while client._operations._pending:
                    await asyncio.sleep(0.001)
                return alive

            cancelling = cancel(keys, values)
            del keys, values
            self.assertTrue(within(cancelling))
            gc.collect()
            self.assertIsNone(watched())

    def test_a_cancelled_task_cancels_its_build(self):
        layer = Layer(700)
        for _, sequence in self.each_path():
            begun, go_on, calls = threading.Event(), threading.Event(), []

            def progress(done):
                calls.append(done.layers_done)
                begun.set()
                go_on.wait(TIME_LIMIT)

            async def cancel():
                await sequence.ingest_async(0, rows(layer, 0, 700, (0, 1)))
                task = asyncio.ensure_future(sequence.build_index_async(progress=progress))
                while not begun.is_set():
                    await asyncio.sleep(0.001)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                go_on.set()
                await sequence.flush_async()
                while sequence._operations._pending:  # until the build has ended
                    await asyncio.sleep(0.001)

            within(cancel())
            self.assertEqual(len(calls), 1)  # it is not called any more

    def test_loops_may_follow_each_other_and_run_at_once(self):
        layer = Layer(300)
        for client, _ in self.each_path((0,)):
            failures = []

            def serve():
                try:
                    for _ in range(5):
                        with self.sequence_of(client, (0,)) as sequence:
                            within(sequence.ingest_async(0, rows(layer, 0, 300)))
                            within(sequence.flush_async())
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=serve) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(failures, [])
            self.assertEqual(client._operations._watchers, {})
            self.assertEqual(client._operations._pending, {})

    def test_other_loops_take_events_by_hand(self):
        layer = Layer(300)
        for client, sequence in self.each_path((0,)):
            fd = client.event_fd()
            self.assertEqual(client.event_fd(), fd)
            self.assertFalse(os.get_blocking(fd))
            self.assertFalse(os.get_inheritable(fd))
            self.assertEqual(select.select([fd], [], [], 0)[0], [])
            self.assertIsNone(client.next_event())

            async def ingest():
                await sequence.ingest_async(0, rows(layer, 0, 300))
                return asyncio.get_running_loop().remove_reader(fd)

            self.assertFalse(within(ingest()))  # a loop without operations does not watch it
            self.assertEqual(select.select([fd], [], [], 0)[0], [])  # it was taken


class LifeOfAClientTest(unittest.TestCase):
    def test_a_closed_client_ends_what_is_awaited(self):
        layer = Layer(700)
        with running() as daemon:
            for path in (pqcached.PathChoice.ONLY_LOCAL, pqcached.PathChoice.ONLY_REMOTE):
                client = pqcached.Client(daemon.endpoint, timeout_ms=60000, path=path)
                cache = client.open_cache("cache", model_fingerprint="1", groups=[group((0, 1))], capacity_bytes=16 << 20)
                sequence = cache.create_sequence()
                begun = threading.Event()

                def progress(_):
                    begun.set()

                async def close():
                    listening = asyncio.ensure_future(collect(client))
                    await sequence.ingest_async(0, rows(layer, 0, 700, (0, 1)))
                    task = asyncio.ensure_future(sequence.build_index_async(progress=progress, iterations=1000))
                    await asyncio.sleep(0.002)
                    client.close()
                    try:
                        await task
                    except pqcached.Cancelled:
                        pass
                    self.assertEqual(await listening, [])
                    with self.assertRaises(pqcached.FailedPrecondition):
                        await sequence.flush_async()
                    with self.assertRaises(pqcached.FailedPrecondition):
                        client.next_event()

                within(close())

    def test_a_callback_may_close_what_it_is_called_from(self):
        layer = Layer(700)
        with running() as daemon:
            for closes in ("sequence", "client"):
                client = pqcached.Client(daemon.endpoint, timeout_ms=60000)
                self.addCleanup(client.close)
                cache = client.open_cache("cache", model_fingerprint="1", groups=[group((0, 1))], capacity_bytes=16 << 20)
                sequence = cache.create_sequence()

                async def build():
                    await sequence.ingest_async(0, rows(layer, 0, 700, (0, 1)))
                    try:
                        await sequence.build_index_async(
                            progress=lambda _: (client if closes == "client" else sequence).close())
                    except (pqcached.Cancelled, pqcached.NotFound):
                        pass

                within(build())
                self.assertTrue(sequence.closed)

    def test_nothing_is_left_of_a_client(self):
        layer = Layer(300)
        with running() as daemon:
            counts = []
            for _ in range(4):
                with pqcached.Client(daemon.endpoint, timeout_ms=60000) as client:
                    cache = client.open_cache("cache", model_fingerprint="1", groups=[group()], capacity_bytes=16 << 20)
                    sequence = cache.create_sequence()
                    within(sequence.ingest_async(0, rows(layer, 0, 300)))
                gc.collect()
                counts.append(len(os.listdir("/proc/self/fd")))
            self.assertLessEqual(counts[-1], counts[0])

    def test_a_new_worker_and_a_lost_session_are_events(self):
        layer = Layer(300)
        with running() as daemon:
            client = pqcached.Client(daemon.endpoint, timeout_ms=60000, path=pqcached.PathChoice.ONLY_LOCAL)
            self.addCleanup(client.close)
            cache = client.open_cache("cache", model_fingerprint="1", groups=[group()], capacity_bytes=16 << 20)
            sequence = cache.create_sequence()
            children = pathlib.Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")

            async def watch(happens):
                asyncio.get_running_loop().call_later(0.05, happens)
                async for event in client.events():
                    return event

            async def ingest():
                while True:
                    try:
                        return await sequence.ingest_async(0, rows(layer, 0, 300))
                    except pqcached.Unavailable as error:
                        self.assertEqual(error.retry_after, error.retry_ms / 1000)
                        self.assertGreater(error.retry_after, 0)

            def kill_worker():
                os.kill(int(children.read_text().split()[0]), signal.SIGKILL)

            self.assertEqual(within(watch(kill_worker)), pqcached.Event(pqcached.EventKind.NEW_WORKER))
            within(ingest())
            self.assertEqual(sequence.describe().token_count, 300)
            others = []

            def replace_daemon():
                daemon.stop()
                others.append(Daemon(daemon.endpoint[len("unix://"):-len("/s")]))

            try:
                self.assertEqual(within(watch(replace_daemon)), pqcached.Event(pqcached.EventKind.SESSION_LOST))
            finally:
                for other in others:
                    other.stop()


async def collect(client):
    return [event async for event in client.events()]


if __name__ == "__main__":
    unittest.main()
