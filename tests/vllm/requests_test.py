"""The requests of a worker of vLLM and their sequences in a real sidecar, without vLLM. Usage: requests_test.py BUILD"""

import sys
import time
import types
import unittest

import engines  # first
import numpy as np
from daemon import running

import pqcached
from pqcached import DType, LayerGroup

sys.path.insert(0, str(engines.PACKAGE))

from pqcached_vllm.model import Model  # noqa: E402
from pqcached_vllm.plan import Beginning, NewNames, Part  # noqa: E402
from pqcached_vllm.requests import Requests  # noqa: E402
from pqcached_vllm.scheduler import Scheduler  # noqa: E402
from pqcached_vllm.settings import Settings  # noqa: E402
from pqcached_vllm.sidecar import Sidecar  # noqa: E402

LAYERS = 2
GROUP = LayerGroup(list(range(LAYERS)), 2, 4, 32, 32, DType.F32)


def rows(first, count, seed=0):
    """Rows that depend on their position."""
    made = {}
    for layer in range(LAYERS):
        random = np.random.default_rng([seed, layer])
        whole = random.standard_normal((2, 1000, 2, 32), dtype=np.float32)
        made[layer] = whole[0, first:first + count], whole[1, first:first + count]
    return made


def beginning(name, tokens, local=0, loaded=0, key=b""):
    return Beginning(name, tuple(tokens), key, local, loaded, tuple(range(10)))


class RequestsTest(unittest.TestCase):
    def setUp(self):
        context = running()
        self.daemon = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.requests = self.make()

    def make(self, **changes):
        settings = Settings(endpoint=self.daemon.endpoint, timeout_ms=20000, retry_ms=1, **changes)
        self.sidecar = Sidecar(settings, GROUP, "model", "cache", 1)
        self.addCleanup(self.sidecar.close)
        made = Requests(self.sidecar, settings)
        made.begin_pass()
        return made

    def drop_cache(self):
        with pqcached.Client(self.daemon.endpoint) as client:
            client.open_cache("cache", model_fingerprint="model", groups=[GROUP]).drop()

    def store(self, name, tokens, **named):
        stored = self.requests.begin(beginning(name, tokens, **named))
        self.requests.enqueue(Part(name, 0, len(tokens), 9), rows(0, len(tokens)))
        return stored

    def matched(self, tokens, key=b""):
        return self.sidecar.cache.match_prefix(np.asarray(tokens, np.uint32), extra_key=key)

    def check_rows(self, stored, count):
        for layer, expected in rows(0, count).items():
            got = np.empty((count, 2, 32), np.float32), np.empty((count, 2, 32), np.float32)
            stored.sequence.load((0, count), {layer: got})
            np.testing.assert_array_equal(got, expected)

    def test_a_prompt_is_there_for_later_requests_and_its_rows_are_the_same(self):
        tokens = list(range(300))
        self.store("a", tokens)
        self.requests.end("a")
        stored = self.requests.begin(beginning("b", tokens, loaded=256))
        self.assertEqual(stored.passed, 256)
        self.check_rows(stored, 256)

    def test_rows_that_are_stored_already_are_not_stored_again(self):
        self.store("a", range(300))
        self.requests.end("a")
        part = Part("b", 128, 172, 9)
        for store in ("enqueue", "ingest"):
            with self.subTest(store=store):
                stored = self.requests.begin(beginning("b", range(300), loaded=128))
                self.assertEqual(stored.passed, 256)
                if store == "enqueue":
                    self.requests.enqueue(part, rows(128, 172))
                for layer in range(LAYERS):  # after the first way, all rows are there
                    self.requests.ingest(part, layer, *rows(128, 172)[layer])
                self.requests.pass_on(part)
                self.assertEqual((stored.passed, self.requests.counts.failed_calls), (300, 0))
                stored.sequence.flush()
                self.check_rows(stored, 300)

    def test_a_prefix_that_is_gone_is_not_begun(self):
        self.assertIsNone(self.requests.begin(beginning("a", range(300), loaded=256)))
        self.assertFalse(self.requests.is_followed("a"))

    def test_a_request_whose_first_tokens_another_one_stores_in_the_same_pass_begins_late(self):
        tokens = list(range(256)) + [7] * 20
        self.store("a", range(300))
        self.assertIsNone(self.requests.begin(beginning("b", tokens, local=256)))
        self.assertTrue(self.requests.is_late("b"))
        self.requests.begin_late()
        self.assertEqual(self.requests.find("b").passed, 256)

    def test_a_request_whose_first_tokens_nobody_stores_is_not_followed(self):
        self.requests.begin(beginning("b", range(300), local=256))
        self.requests.begin_late()
        self.assertFalse(self.requests.is_followed("b"))

    def test_a_gap_ends_the_sequence(self):
        self.store("a", range(100))
        self.assertTrue(self.requests.continues(Part("a", 100, 1, 0)))
        self.assertFalse(self.requests.continues(Part("a", 101, 1, 0)))
        self.assertFalse(self.requests.is_followed("a"))

    def test_nothing_is_stored_in_a_pass_that_is_distrusted_and_in_the_next_one(self):
        self.store("a", range(100))
        self.requests.distrust()
        for _ in range(2):
            self.assertIsNone(self.requests.begin(beginning("b", range(100))))
            self.assertFalse(self.requests.is_followed("a"))
            self.requests.begin_pass()
        self.assertIsNotNone(self.requests.begin(beginning("b", range(100))))

    def test_a_prefix_is_loaded_in_a_pass_that_is_distrusted_and_nothing_is_stored_behind_it(self):
        self.store("a", range(300))
        self.requests.end("a")
        self.requests.distrust()
        for _ in range(2):
            self.requests.begin_pass()
            self.check_rows(self.requests.begin(beginning("b", range(300), loaded=256)), 256)
            is_distrusted = self.requests.is_distrusted
            self.requests.loaded()
            self.assertEqual(self.requests.is_followed("b"), not is_distrusted)
        self.assertFalse(is_distrusted)

    def test_a_reply_with_names_is_shared_too(self):
        self.store("a", range(100))
        self.requests.name(NewNames("a", 100, tuple(range(100, 120))))
        self.requests.name(NewNames("a", 120, tuple(range(120, 260))))
        self.requests.enqueue(Part("a", 100, 160, 9), rows(100, 160))
        self.requests.end("a")
        self.assertEqual(self.matched(range(300)), 256)

    def test_names_that_come_with_the_end_count(self):
        self.store("a", range(100))
        self.requests.enqueue(Part("a", 100, 160, 9), rows(100, 160))
        self.requests.name(NewNames("a", 100, tuple(range(100, 260))))
        self.requests.end("a")
        self.assertEqual(self.matched(range(300)), 256)

    def test_prompts_with_different_keys_are_apart(self):
        self.store("a", range(300), key=b"one")
        self.requests.end("a")
        self.assertEqual((self.matched(range(300), b"one"), self.matched(range(300), b"two"), self.matched(range(300))), (256, 0, 0))

    def test_a_request_that_must_not_be_stored_has_no_sequence(self):
        self.assertIsNone(self.requests.begin(Beginning("a", None, b"", 0, 0, ())))
        self.assertFalse(self.requests.is_followed("a"))

    def test_after_an_error_a_request_is_not_stored_any_further(self):
        stored = self.store("a", range(100))
        stored.sequence.flush()
        bad = rows(100, 10)
        bad[1][0][:] = np.nan
        self.requests.ingest(Part("a", 100, 10, 9), 1, *bad[1])
        self.assertEqual(self.requests.counts.failed_calls, 1)
        self.assertFalse(self.requests.is_followed("a"))

    def test_a_cache_that_was_dropped_is_made_anew(self):
        self.requests.begin_pass()
        self.drop_cache()
        self.assertIsNone(self.requests.begin(beginning("a", range(100), loaded=64)))  # its prefix may be gone
        self.assertIsNotNone(self.sidecar.cache)
        self.assertIsNone(self.requests.begin(beginning("a", range(100))))
        self.assertIsNone(self.sidecar.cache)
        time.sleep(0.01)
        self.requests.begin_pass()
        self.assertIsNotNone(self.requests.begin(beginning("a", range(100))))

    def test_without_a_sidecar_no_request_is_stored(self):
        self.store("a", range(100))
        self.store("b", range(100))
        self.daemon.stop(9)

        def fail():
            raise pqcached.Unavailable("gone")

        self.requests.call("a", "a test", fail)
        self.assertFalse(self.requests.is_followed("b"))  # at once: a pass may be going on
        self.requests.begin_pass()
        self.assertIsNone(self.requests.begin(beginning("b", range(100))))
        self.assertIsNone(self.sidecar.cache)


class SchedulerTest(unittest.TestCase):
    """The scheduler's half, with a worker's requests."""

    def setUp(self):
        self.endpoint = self.enterContext(running()).endpoint
        made = Settings(endpoint=self.endpoint, timeout_ms=20000, retry_ms=1)
        self.scheduler = Scheduler([Model(GROUP, ["a", "b"], "model", "cache", 128)], made)
        self.addCleanup(self.scheduler.close)
        self.sidecar = Sidecar(made, GROUP, "model", "cache", 1)
        self.addCleanup(self.sidecar.close)
        self.requests, self.made = Requests(self.sidecar, made), 0

    def request(self, count=300):
        self.made += 1
        return types.SimpleNamespace(request_id=f"r{self.made}", all_token_ids=list(range(count)), prompt_token_ids=[1], prompt_embeds=None,
                                     mm_features=[], lora_request=None, cache_salt=None, skip_reading_prefix_cache=False)

    def store(self):
        """Stores a request as a pass does."""
        request = self.request()
        self.scheduler.allocated(request, 0)
        new = types.SimpleNamespace(req_id=request.request_id, block_ids=[[1, 2, 3]], num_computed_tokens=0)
        output = types.SimpleNamespace(
            scheduled_new_reqs=[new], finished_req_ids=set(), preempted_req_ids=None, num_scheduled_tokens={request.request_id: 300},
            scheduled_cached_reqs=types.SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()))
        made = self.scheduler.plan(output, {})
        self.requests.begin_pass()
        self.requests.begin(made.beginnings[0])
        self.requests.enqueue(made.parts[0], rows(0, 300))
        self.requests.end(request.request_id)

    def test_a_cache_that_was_dropped_is_made_anew(self):
        self.store()
        with pqcached.Client(self.endpoint) as client:
            client.open_cache("cache", model_fingerprint="model", groups=[GROUP]).drop()
        self.assertEqual(self.scheduler.matched(self.request(), 0), 0)
        time.sleep(0.01)
        for _ in range(2):  # the worker's half finds out by itself
            self.store()
            time.sleep(0.01)
        self.assertEqual(self.scheduler.matched(self.request(), 0), 256)

    def test_a_request_waits_while_its_local_tokens_are_loaded_for_another_one(self):
        self.store()
        self.scheduler.allocated(self.request(), 0)  # it computes all
        self.assertEqual(self.scheduler.matched(self.request(), 128), 128)
        first, second = self.request(), self.request()
        self.assertEqual(self.scheduler.matched(first, 128), 128)
        self.scheduler.allocated(first, 128)
        self.assertEqual([self.scheduler.matched(second, local) for local in (0, 128, 256)], [256, 128, None])
        other = self.request()
        other.all_token_ids[200] = 7
        self.assertEqual(self.scheduler.matched(other, 256), 0)
        self.store()  # plans the pass
        self.assertEqual(self.scheduler.matched(second, 256), 0)

    def test_after_a_reset_nothing_is_matched_that_was_stored_before(self):
        self.store()
        waiting = self.request()
        self.assertEqual(self.scheduler.matched(waiting, 0), 256)
        self.scheduler.reset()
        self.assertEqual([self.scheduler.matched(each, 0) for each in (waiting, self.request())], [0, 0])
        self.store()
        self.assertEqual(self.scheduler.matched(self.request(), 0), 256)


if __name__ == "__main__":
    unittest.main()
