"""Memory, RPCs and failures of generations whose rows are in the sidecar. Usage: sidecar_test.py BUILD

PQCACHED_TRANSFORMERS_LONG=1 follows memory over 4,096 tokens (512 otherwise).
"""

import itertools
import os
import pathlib
import random
import signal
import time
import unittest
import unittest.mock

import models  # first
from models import ALL_BY_INDEX, TOLERANCE, HfTest, Index, hf, needs_transformers, one_by_one, pqcached, select, tokens, torch_bytes

from daemon import running

if models.is_installed():
    import torch

IS_LONG = os.environ.get("PQCACHED_TRANSFORMERS_LONG", "0") != "0"
PQ = {"index": Index.pq(4, 8), "index_tokens": 64}
FLAT = {"index": Index.flat(), "index_tokens": 64}


@needs_transformers
class Resources(HfTest):
    def decode(self, cache, count, batch=1):
        for ids in one_by_one(tokens(batch, count, seed=7)):
            self.run_pass(self.ours, cache, ids)

    def test_torch_keeps_no_rows(self):
        for selection, named in ((select(), {}), (select(ratio=0.2), PQ)):
            with self.subTest(selection=selection):
                cache = self.pqc_cache(selection, **named)
                self.run_pass(self.ours, cache, tokens(2, 500))
                self.assertEqual(torch_bytes(cache), 0)
                self.decode(cache, 4, batch=2)
                after_few = torch_bytes(cache)
                self.decode(cache, 4096 if IS_LONG else 512, batch=2)
                self.assertEqual(torch_bytes(cache), after_few)
                self.assertLess(after_few, 16 << 10)
        stock = self.stock_cache()
        self.run_pass(self.stock, stock, tokens(2, 500))
        self.assertEqual(torch_bytes(stock), 2 * 500 * 3 * 2 * 2 * 32 * 4)  # that the count sees what is there

    def test_decoding_waits_for_no_rpc(self):
        for selection, named in ((select(), {}), (select(ratio=0.2), PQ)):
            with self.subTest(selection=selection):
                cache = self.pqc_cache(selection, wait_for_index=True, **named)
                self.run_pass(self.ours, cache, tokens(2, 500))
                self.decode(cache, 2, batch=2)
                before = self.client.counts()
                self.decode(cache, 64, batch=2)
                after = self.client.counts()
                self.assertEqual(after.rpcs - before.rpcs, 0)
                self.assertLessEqual(after.background_rpcs - before.background_rpcs, 2 * 64)  # rows of each sequence

    def test_the_index_is_built_while_decoding_goes_on(self):
        cache = self.pqc_cache(select(ratio=0.2), **PQ)
        self.run_pass(self.ours, cache, tokens(1, 40))  # too short for an index
        end = time.monotonic() + 30
        while not cache.rows[0].indexed and time.monotonic() < end:
            self.decode(cache, 8)
        self.assertEqual(cache.rows[0].indexed, 1)
        self.assertGreaterEqual(cache.length, 4 + 8 + 64)
        self.assertEqual(cache.sequences[0].describe().index_count, 1)

    def test_clusters_are_built_behind_the_index(self):
        for prompt, named, count in ((40, PQ, 2), (500, PQ, 2), (500, FLAT, 1)):  # 40: too short for an index
            with self.subTest(prompt=prompt, index=named["index"].kind):
                cache = self.pqc_cache(select(ratio=0.2, tail_estimate=True), **named)
                self.run_pass(self.ours, cache, tokens(1, prompt))
                end = time.monotonic() + 30
                while cache.rows[0].indexed < count and time.monotonic() < end:
                    self.decode(cache, 8)
                self.assertEqual(cache.rows[0].indexed, count)
                self.assertEqual(cache.sequences[0].describe().index_count, count)
                self.decode(cache, 8)
                fork = cache.fork()
                self.addCleanup(fork.close)
                self.assertEqual(fork.sequences[0].describe().index_count, count)
                self.decode(fork, 8)

    def test_forks_have_the_index(self):
        cache = self.pqc_cache(select(ratio=0.2), **PQ)
        self.run_pass(self.ours, cache, tokens(1, 500))
        cache.batch_repeat_interleave(3)
        self.decode(cache, 1, batch=3)
        self.assertEqual([sequence.describe().index_count for sequence in cache.sequences], [1, 1, 1])
        self.assertEqual([row.indexed for row in cache.rows], [1, 1, 1])


@needs_transformers
class Identity(HfTest):
    """Each generation is that of its own prompt."""

    def test_8_sequences_that_join_and_leave_at_random_equal_their_solo_runs(self):
        order = random.Random(3)
        prompts = [tokens(1, order.randint(30, 300), seed=10 + i) for i in range(8)]
        follow = [tokens(1, order.randint(10, 40), seed=30 + i) for i in range(8)]

        def passes(i, cache):
            chunks = [prompts[i], *one_by_one(follow[i])]
            return ((i, each) for chunk in chunks for each in self.passes(self.ours, cache, [chunk]))

        for selection, named in ((select(), {}), (select(**ALL_BY_INDEX), PQ), (select(ratio=0.3), {"index": Index.flat()})):
            with self.subTest(selection=selection):
                solo = [[logits for _, logits in passes(i, self.pqc_cache(selection, **named))] for i in range(8)]
                caches = [self.pqc_cache(selection, **named) for _ in range(8)]
                runs, got = {i: passes(i, caches[i]) for i in range(8)}, [[] for _ in range(8)]
                while runs:
                    i = order.choice(list(runs))
                    for _, logits in itertools.islice(runs[i], order.randint(1, 3)):
                        got[i].append(logits)
                    if len(got[i]) == len(solo[i]):
                        del runs[i]
                        caches[i].close()
                for i in range(8):
                    self.assert_equal(got[i], solo[i])

    def test_rows_that_leave_a_batch_do_not_change_the_others(self):
        ids = tokens(8, 230)
        cache, order = self.pqc_cache(), random.Random(4)
        self.run_pass(self.ours, cache, ids[:, :200])
        left = list(range(8))
        for column in range(200, 230):
            if len(left) > 1 and order.random() < 0.3:
                kept = sorted(order.sample(range(len(left)), len(left) - 1), key=lambda _: order.random())
                cache.batch_select_indices(torch.tensor(kept))
                left = [left[i] for i in kept]
            got = self.run_pass(self.ours, cache, ids[left, column:column + 1])
            expected = self.stock(ids[left, :column + 1], use_cache=False).logits[:, -1:]
            self.assert_equal([got], [expected])


@needs_transformers
class Prompts(HfTest):
    """Prompts that the sidecar has already are not computed again."""

    def prompt_cache(self, **named):
        return self.pqc_cache(model_fingerprint="the weights of test", **named)

    def test_a_stored_prompt_is_not_computed_again(self):
        first = tokens(1, 300, seed=50)
        with self.prompt_cache() as cache:
            self.assertEqual(cache.begin(first), 0)
            answer = self.ours.generate(first, past_key_values=cache, max_new_tokens=100, do_sample=False)
            cache.name_tokens(answer)
        prompt = torch.cat([answer, tokens(1, 30, seed=51)], 1)
        expected = self.stock.generate(prompt, past_key_values=self.stock_cache(), max_new_tokens=10, do_sample=False,
                                       return_dict_in_generate=True, output_logits=True)
        cache, computed = self.prompt_cache(), []
        handle = self.ours.model.embed_tokens.register_forward_pre_hook(lambda _, arguments: computed.append(arguments[0].shape[1]))
        try:
            self.assertEqual(cache.begin(prompt), 384)  # 399 tokens of the first turn are stored, in steps of 128
            got = self.ours.generate(prompt, past_key_values=cache, max_new_tokens=10, do_sample=False, return_dict_in_generate=True,
                                     output_logits=True)
        finally:
            handle.remove()
        self.assertEqual(computed, [430 - 384] + [1] * 9)
        self.assertTrue(torch.equal(got.sequences, expected.sequences))
        for own, other in zip(got.logits, expected.logits, strict=True):
            self.assertLessEqual(float((own - other).abs().max()), TOLERANCE)

    def test_a_batch_continues_behind_what_all_of_its_rows_have(self):
        ids, mask = tokens(2, 400, seed=60), torch.ones(2, 400, dtype=torch.long)
        mask[1, :100] = 0
        with self.prompt_cache() as cache:
            cache.begin(ids, mask)
            self.run_pass(self.ours, cache, ids, mask)
        cache = self.prompt_cache()
        stored = cache.begin(ids, mask)
        self.assertEqual(stored, 100 + 256)  # row 0 has 384 tokens, and row 1 256 behind its padding
        got = self.run_pass(self.ours, cache, ids[:, stored:], mask)
        self.assert_equal([got], [self.run_pass(self.stock, self.stock_cache(), ids, mask)[:, stored:]])

    def test_other_weights_share_nothing(self):
        ids = tokens(1, 300, seed=70)
        with self.prompt_cache() as cache:
            cache.begin(ids)
            self.run_pass(self.ours, cache, ids)
        self.assertEqual(self.pqc_cache(model_fingerprint="other weights").begin(ids), 0)
        other = ids.clone()
        other[0, 5] += 1
        self.assertEqual(self.prompt_cache().begin(other), 0)

    def test_names_do_not_outlive_their_tokens(self):
        ids, other = tokens(1, 300, seed=90), tokens(1, 300, seed=91)
        other[:, :200] = ids[:, :200]
        with self.prompt_cache() as cache:
            cache.begin(ids)
            self.run_pass(self.ours, cache, ids)
            cache.crop(-100)
            self.run_pass(self.ours, cache, other[:, 200:])
            cache.name_tokens(other)
        cache = self.prompt_cache()
        self.assertEqual(cache.begin(other), 256)
        expected = self.stock(other, use_cache=False).logits[:, 256:]
        self.assert_equal([self.run_pass(self.ours, cache, other[:, 256:])], [expected])
        self.assertEqual(self.prompt_cache().begin(ids), 128)

    def test_the_last_token_is_always_computed(self):
        ids = tokens(1, 256, seed=80)
        with self.prompt_cache() as cache:
            cache.begin(ids)
            self.run_pass(self.ours, cache, ids)
        cache = self.prompt_cache()
        self.assertEqual(cache.begin(ids), 255)
        expected = self.stock(ids, use_cache=False).logits[:, -1:]
        self.assert_equal([self.run_pass(self.ours, cache, ids[:, 255:])], [expected])


def children_of(pid):
    """A sidecar's worker is a child of its supervisor."""
    return [int(each) for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@needs_transformers
class Failures(HfTest):
    """Of a sidecar in the middle of a generation: an error, or the right logits; never others."""

    TIMEOUT_MS = 5000

    def follow(self, cache, ids, before_layer):
        """Logits of the passes until one fails; and its error. before_layer(column, layer) runs before each layer's attention."""
        attend, column = hf.PqcCache.attend, [0]

        def hooked(cache, module, layer, *arguments):
            before_layer(column[0], layer)
            return attend(cache, module, layer, *arguments)

        made = []
        with unittest.mock.patch.object(hf.PqcCache, "attend", hooked):
            for chunk in one_by_one(ids):
                begin = time.monotonic()
                try:
                    made.append(self.run_pass(self.ours, cache, chunk))
                except pqcached.Error as error:
                    self.assertLess(time.monotonic() - begin, 3 * self.TIMEOUT_MS / 1000)
                    return made, error
                column[0] += 1
        return made, None

    def run_with_signals(self, victims, selection, **named):
        """Decodes 40 tokens; the victims of a new sidecar are killed in layer 1 of the 20th."""
        ids = tokens(1, 240)
        expected = self.passes(self.stock, self.stock_cache(), [ids[:, :200], *one_by_one(ids[:, 200:])])
        with running() as daemon, pqcached.Client(daemon.endpoint, timeout_ms=self.TIMEOUT_MS) as client:
            with hf.PqcCache(client, self.ours.config, selection=selection, **named) as cache:
                self.run_pass(self.ours, cache, ids[:, :200])

                def kill(column, layer):
                    if (column, layer) == (20, 1):
                        for pid in victims(daemon.process.pid):
                            os.kill(pid, signal.SIGKILL)

                got, error = self.follow(cache, ids[:, 200:], kill)
                self.assert_equal(got, expected[1:1 + len(got)])
                self.assertGreaterEqual(len(got), 20)
                return len(got), error

    def test_a_killed_worker_changes_nothing(self):
        for selection, named in ((select(), {}), (select(**ALL_BY_INDEX), PQ)):
            with self.subTest(selection=selection):
                count, error = self.run_with_signals(children_of, selection, **named)
                self.assertIsNone(error)
                self.assertEqual(count, 40)

    def test_a_killed_sidecar_gives_an_error(self):
        for selection, named in ((select(), {}), (select(**ALL_BY_INDEX), PQ)):
            with self.subTest(selection=selection):
                count, error = self.run_with_signals(lambda pid: [pid, *children_of(pid)], selection, **named)
                self.assertLess(count, 40)
                self.assertIsInstance(error, pqcached.Unavailable)

    def test_a_step_whose_rows_were_removed_meanwhile_gives_an_error(self):
        cache = self.pqc_cache(cache_name="shared rows")
        self.run_pass(self.ours, cache, tokens(1, 200))
        self.run_pass(self.ours, cache, tokens(1, 1))

        decode, decoded = pqcached.Step.decode, []

        def shorten(step, layer, prepared):
            result = decode(step, layer, prepared)
            decoded.append(layer)
            if len(decoded) == 4 * 3:  # the last layer of the 4th token: only the end of the step can notice it
                with pqcached.Client(self.daemon.endpoint) as client:
                    store = client.open_cache("shared rows", model_fingerprint=cache._fingerprint_of(), groups=[cache._group])
                    with store.attach(cache.sequences[0].id) as other:
                        other.truncate(50)
            return result

        with unittest.mock.patch.object(pqcached.Step, "decode", shorten):
            got, error = self.follow(cache, tokens(1, 8), lambda column, layer: None)
        self.assertEqual(len(got), 3)
        self.assertIsInstance(error, pqcached.Aborted)

    def test_a_pass_that_was_interrupted_can_be_repeated(self):
        ids = tokens(1, 330)
        chunks = [ids[:, :200], *one_by_one(ids[:, 200:210]), ids[:, 210:300], *one_by_one(ids[:, 300:])]
        expected = self.passes(self.stock, self.stock_cache(), chunks)
        for selection, named in ((select(), {}), (select(**ALL_BY_INDEX), PQ)):
            with self.subTest(selection=selection):
                cache, got = self.pqc_cache(selection, **named), []
                for place, chunk in enumerate(chunks):
                    if place in (0, 5, 11, 15):
                        wrong = tokens(*chunk.shape, seed=99)  # rows of another pass must not remain
                        with unittest.mock.patch.object(hf.PqcCache, "attend", self.failing_in(1)), self.assertRaises(KeyboardInterrupt):
                            self.run_pass(self.ours, cache, wrong)
                    got.append(self.run_pass(self.ours, cache, chunk))
                self.assert_equal(got, expected)

    @staticmethod
    def failing_in(layer):
        attend = hf.PqcCache.attend

        def fail(cache, module, number, *arguments):
            if number == layer:
                raise KeyboardInterrupt
            return attend(cache, module, number, *arguments)

        return fail


if __name__ == "__main__":
    unittest.main()
