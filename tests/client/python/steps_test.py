"""Steps and decoder against a real daemon, over both paths. Usage: steps_test.py BUILD"""

import gc
import threading
import unittest

import numpy as np

from daemon import KEY_DIM, KV_HEADS, QUERY_HEADS, VALUE_DIM, DaemonTest  # finds pqcached: first

import pqcached
from pqcached import Index, PathChoice, Selection, StepItem
from one_path import ALL, INDEX, SOME, TOKENS, OnePath, new_rows

try:
    import torch
except ImportError:
    torch = None


class StepsOverOnePath(OnePath):
    def test_a_batch_gives_what_each_sequence_gives_alone(self):
        items, queries = self.batch()
        with self.client.begin_step(items, SOME) as step:
            chosen = step.topk(0, queries)
            together = step.attend(0, queries)
            step.attend_begin(0, queries)
            beside = step.attend_wait()
        for i, item in enumerate(items):
            alone = item.sequence.topk(0, item.query_position, queries[i], SOME)
            np.testing.assert_array_equal(chosen[i], alone.positions)
            attention = item.sequence.attend(0, item.query_position, queries[i], SOME)
            for result in (together, beside):
                self.assertEqual(result.counts[i], alone.count)
                np.testing.assert_allclose(result.output[i], attention.output, atol=1e-5)
                np.testing.assert_allclose(result.lse[i], attention.lse, atol=1e-5)

    def test_a_step_that_does_not_wait_begins_when_the_sequence_is_ready(self):
        sequence = self.filled()
        keys, values = new_rows(1, seed=5)
        while True:
            try:
                step = self.client.begin_step([(sequence, TOKENS)], SOME, no_wait=True)
                break
            except pqcached.DeadlineExceeded as error:
                self.assertGreater(error.retry_ms, 0)
        with step:
            step.attend(0, self.layer.queries[None])
            step.end({0: (keys, values)})
        sequence.flush()

    def test_enqueued_rows_are_stored_and_their_errors_raised_by_flush(self):
        sequence = self.sequence()
        for begin in range(0, TOKENS, 200):
            end = begin + 200
            sequence.enqueue_rows(begin, {0: (self.layer.keys[begin:end], self.layer.values[begin:end])})
        sequence.flush()
        np.testing.assert_array_equal(sequence.fetch_blocks(0, (0, TOKENS), pqcached.RowPart.KEY),
                                      self.layer.keys[:TOKENS].transpose(1, 0, 2))
        keys, values = new_rows(10, seed=4)
        keys[3, 0, 0] = np.inf
        sequence.enqueue_rows(TOKENS, {0: (keys, values)})
        with self.assertRaisesRegex(pqcached.InvalidArgument, f"token {TOKENS + 3}") as raised:
            sequence.flush()
        self.assertEqual(raised.exception.field, "layers[0].keys")

    def test_beams_are_reordered(self):
        first = self.filled()
        beams = pqcached.Sequence.reorder([first], [0, 0, 0])
        self.assertIs(beams[0], first)
        self.assertEqual([beam.describe().token_count for beam in beams], [TOKENS] * 3)
        reordered = pqcached.Sequence.reorder(beams, [1, 1, 0])
        self.assertIs(reordered[0], beams[1])
        self.assertIs(reordered[2], first)
        self.assertTrue(beams[2].closed)
        with self.assertRaises(pqcached.FailedPrecondition):
            beams[2].describe()
        with self.assertRaisesRegex(pqcached.InvalidArgument, "from"):
            pqcached.Sequence.reorder(reordered, [0, 7])
        keys, values = new_rows(1, seed=8)
        for beam in reordered:
            with self.client.begin_step([(beam, TOKENS)], SOME) as step:
                step.attend(0, self.layer.queries[None])
                step.end({0: (keys, values)})
            beam.flush()

    def test_progress_and_threads(self):
        sequence = self.filled()
        progress = sequence.progress()
        self.assertEqual((progress.stored_tokens, progress.passed_tokens), (TOKENS, TOKENS))
        self.assertEqual((progress.is_lost, progress.row_status), (0, pqcached.Status.OK))
        self.client.set_threads(1)
        with self.client.begin_step([(sequence, TOKENS)], SOME) as step:
            step.attend(0, self.layer.queries[None])
        self.client.set_threads(0)

    def test_rows_of_finished_steps_are_stored_and_selected_from(self):
        sequence = self.filled()
        keys, values = new_rows(80, seed=3)
        for i in range(80):  # the first ones leave the window
            with self.client.begin_step([(sequence, TOKENS + i)], SOME) as step:
                step.attend(0, self.layer.queries[None])
                step.end({0: (keys[i:i + 1], values[i:i + 1])})
                self.assertTrue(step.closed)
        sequence.flush()
        self.assertEqual(sequence.describe().token_count, TOKENS + 80)
        fetched = sequence.fetch_blocks(0, (TOKENS, TOKENS + 80))
        np.testing.assert_array_equal(fetched[:, :, :KEY_DIM], keys.transpose(1, 0, 2))
        np.testing.assert_array_equal(fetched[:, :, KEY_DIM:], values.transpose(1, 0, 2))

    def test_a_speculation_keeps_what_was_accepted(self):
        sequence = self.filled()
        keys, values = new_rows(3, seed=4)
        queries = np.stack([self.layer.queries] * 3)
        with self.client.begin_step([StepItem(sequence, TOKENS, 3)], SOME) as step:
            self.assertEqual(step.query_tokens, 3)
            self.assertEqual(step.attend(0, queries).output.shape, (3, QUERY_HEADS, VALUE_DIM))
            self.assertEqual(len(step.topk(0, queries)), 1)
            step.end({0: (keys, values)}, accepted=[2])
        sequence.flush()
        self.assertEqual(sequence.describe().token_count, TOKENS + 2)
        with self.client.begin_step([StepItem(sequence, TOKENS + 1)], SOME) as step:  # one more goes back
            step.end({0: (keys[:1], values[:1])})
        sequence.flush()
        np.testing.assert_array_equal(sequence.fetch_blocks(0, (TOKENS, TOKENS + 2), pqcached.RowPart.KEY),
                                      keys[[0, 0]].transpose(1, 0, 2))

    def test_each_token_of_a_speculation_may_have_a_selection_of_its_own(self):
        first, second = self.filled(), self.filled(TOKENS - 150)
        random = np.random.default_rng(1)
        queries = random.standard_normal((5, QUERY_HEADS, KEY_DIM), dtype=np.float32)
        items = [StepItem(first, TOKENS, 3), StepItem(second, TOKENS - 150, 2)]
        with self.client.begin_step(items, SOME, select_per_token=True) as step:
            chosen = step.topk(0, queries)
            attention = step.attend(0, queries)
            step.attend_begin(0, queries)
            np.testing.assert_allclose(step.attend_wait().output, attention.output, atol=1e-6)
        token = 0
        for i, item in enumerate(items):
            self.assertEqual(chosen[i].shape, (item.query_length, KV_HEADS, attention.counts[i]))
            self.assertFalse(np.array_equal(chosen[i][0], chosen[i][1]))
            for own in chosen[i]:
                alone = item.sequence.topk(0, item.query_position, queries[token], SOME)
                np.testing.assert_array_equal(own, alone.positions)
                expected = item.sequence.attend(0, item.query_position, queries[token], SOME)
                np.testing.assert_allclose(attention.output[token], expected.output, atol=1e-5)
                np.testing.assert_allclose(attention.lse[token], expected.lse, atol=1e-5)
                token += 1

    def test_arguments_that_are_prepared_once_serve_many_steps(self):
        sequence, twin = self.filled(TOKENS - 10), self.filled(TOKENS - 10)
        random = np.random.default_rng(2)
        queries = np.empty((1, QUERY_HEADS, KEY_DIM), np.float32)
        keys, values = np.empty((1, KV_HEADS, KEY_DIM), np.float32), np.empty((1, KV_HEADS, VALUE_DIM), np.float32)
        output = np.empty((1, QUERY_HEADS, VALUE_DIM), np.float16)
        # The library writes to these arrays, and the test has no other reference to `lse`.
        prepared = pqcached.PreparedAttention(queries, (output, np.empty((1, QUERY_HEADS), np.float32)), keys=keys,
                                              values=values, log_base=pqcached.LogBase.BASE2)
        gc.collect()
        for i in range(5):
            position = TOKENS - 10 + i
            queries[:] = random.standard_normal(queries.shape)
            keys[0], values[0] = self.layer.keys[position], self.layer.values[position]
            with self.client.begin_step([(sequence, position)], SOME) as step, \
                    self.client.begin_step([(twin, position)], SOME) as other:
                listed = np.arange(20)[None]

                def begin_and_wait(layer, given):
                    step.attend_begin(layer, given)
                    return step.attend_wait()

                for mine, expected in ((step.attend, other.attend(0, queries)),
                                       (begin_and_wait, other.attend(0, queries)),
                                       (lambda *given: step.attend(*given, ALL), other.attend(0, queries, ALL)),
                                       (lambda *given: step.attend_range(*given, [(3, 90)]),
                                        other.attend_range(0, queries, [(3, 90)])),
                                       (lambda *given: step.attend_positions(*given, listed),
                                        other.attend_positions(0, queries, listed)),
                                       (step.decode, other.decode(0, queries, keys, values))):
                    output[:] = np.nan
                    found = mine(0, prepared)
                    self.assertIs(found, prepared.attention)
                    self.assertIs(found.output, output)
                    np.testing.assert_allclose(output, expected.output, atol=2e-3)
                    np.testing.assert_allclose(found.lse * np.log(2), expected.lse, atol=1e-4)
                    np.testing.assert_array_equal(found.counts, expected.counts)
                step.end()
                other.end()
        sequence.flush()
        self.assertEqual(sequence.describe().token_count, TOKENS - 5)

    def test_prepared_arguments_that_do_not_fit_are_named(self):
        items, queries = self.batch()

        def prepared(count=2, heads=QUERY_HEADS, dim=VALUE_DIM, **named):
            return pqcached.PreparedAttention(queries, (np.empty((count, heads, dim), np.float32),
                                                        np.empty((count, heads), np.float32)), **named)

        with self.client.begin_step(items, SOME) as step:
            step.attend(0, prepared(item_count=2))
            for given, field in ((prepared(), "item_count"), (prepared(item_count=3), "item_count"),
                                 (prepared(1, item_count=2), "output.shape"), (prepared(3, item_count=2), "output.shape"),
                                 (prepared(2, QUERY_HEADS // 2, 2 * VALUE_DIM, item_count=2), "output.shape")):
                with self.fails(pqcached.InvalidArgument, field):
                    step.attend(0, given)
            good = prepared(item_count=2)
            for fails, field in ((lambda: step.attend(0, good, out=(None, None)), "out"),
                                 (lambda: step.attend(0, good, log_base=pqcached.LogBase.BASE2), "log_base"),
                                 (lambda: step.decode(0, good), "keys"),
                                 (lambda: step.decode(0, good, queries), "keys"),
                                 (lambda: step.decode(0, good, None, queries), "values"),
                                 (lambda: step.decode(0, queries, queries), "values")):
                with self.fails(pqcached.InvalidArgument, field):
                    fails()
        with self.fails(pqcached.InvalidArgument, "output.shape"):
            pqcached.PreparedAttention(queries, (np.empty((2, VALUE_DIM), np.float32), None))
        with self.fails(pqcached.InvalidArgument, "lse.shape"):
            pqcached.PreparedAttention(queries, (np.empty((2, QUERY_HEADS, VALUE_DIM), np.float32),
                                                 np.empty((2, 1), np.float32)))
        frozen = np.empty((2, QUERY_HEADS, VALUE_DIM), np.float32)
        frozen.flags.writeable = False
        with self.fails(pqcached.InvalidArgument, "output"):
            pqcached.PreparedAttention(queries, (frozen, None))

    def test_results_are_written_where_the_caller_wants_them(self):
        items, queries = self.batch()
        output = np.empty((2, QUERY_HEADS, VALUE_DIM), np.float32)
        lse = np.empty((2, QUERY_HEADS), np.float32)
        with self.client.begin_step(items) as step:
            found = step.attend(0, queries, SOME, out=(output, lse))
            self.assertIs(found.output, output)
            with self.fails(pqcached.InvalidArgument, "output.shape"):
                step.attend(0, queries, SOME, out=(output[:1], lse))
            if torch is not None:
                held = torch.empty(output.shape), torch.empty(lse.shape)
                step.attend(0, torch.from_numpy(queries), SOME, out=held)
                np.testing.assert_array_equal(held[0].numpy(), output)

    def test_wrong_items_are_named_and_nothing_changes(self):
        sequence = self.filled()
        for error, part, items in (
                (pqcached.InvalidArgument, "items", []),
                (pqcached.InvalidArgument, "listed twice", [(sequence, TOKENS), (sequence, TOKENS)]),
                (pqcached.InvalidArgument, "beyond the sequence's end", [(sequence, TOKENS + 1)]),
                (pqcached.InvalidArgument, "query_length", [(sequence, TOKENS, 9)]),
                (pqcached.InvalidArgument, "items[0].query_position", [(sequence, -1)])):
            with self.fails(error, part):
                self.client.begin_step(items, SOME)
        sequence.suspend()
        with self.fails(pqcached.FailedPrecondition, "suspended"):
            self.client.begin_step([(sequence, TOKENS)], SOME)
        sequence.resume()
        with self.client.begin_step([(sequence, TOKENS)], SOME):
            with self.fails(pqcached.Aborted, "another step"):
                self.client.begin_step([(sequence, TOKENS)], SOME)
        self.client.begin_step([(sequence, TOKENS)], SOME).close()
        self.assertEqual(sequence.describe().token_count, TOKENS)

    def test_wrong_ends_close_the_step_and_hand_in_nothing(self):
        sequence = self.filled()
        keys, values = new_rows(1, seed=5)
        for error, part, rows, accepted in (
                (pqcached.InvalidArgument, "layer_count", {}, None),
                (pqcached.InvalidArgument, "accepted: 2 numbers", {0: (keys, values)}, [1, 1]),
                (pqcached.InvalidArgument, "accepted[0]", {0: (keys, values)}, [2]),
                (TypeError, "layers[0].keys", {0: ("no array", values)}, None)):
            step = self.client.begin_step([(sequence, TOKENS)], SOME)
            with self.fails(error, part):
                step.end(rows, accepted)
            with self.fails(pqcached.FailedPrecondition, "step: it is closed"):
                step.end({0: (keys, values)})
            with self.fails(pqcached.FailedPrecondition, "step: it is closed"):
                step.attend(0, self.layer.queries[None])
        sequence.flush()
        self.assertEqual(sequence.describe().token_count, TOKENS)

    def test_waiting_without_a_beginning_is_refused(self):
        sequence = self.filled()
        with self.client.begin_step([(sequence, TOKENS)], SOME) as step:
            with self.fails(pqcached.FailedPrecondition, "attend_begin"):
                step.attend_wait()
            step.check()
            step.attend_begin(0, self.layer.queries[None])
            with self.fails(pqcached.FailedPrecondition, "attend_wait"):
                step.check()
            with self.fails(pqcached.FailedPrecondition, "attend_wait"):
                step.end({0: new_rows(1, seed=6)})

    def test_a_step_that_nobody_holds_lets_its_sequence_go(self):
        sequence = self.filled()
        step = self.client.begin_step([(sequence, TOKENS)], SOME)
        step.attend_begin(0, self.layer.queries[None])
        del step
        gc.collect()
        self.client.begin_step([(sequence, TOKENS)], SOME).close()

    def test_steps_of_several_threads_run_at_once(self):
        sequences = [self.filled(TOKENS - 40 * i) for i in range(3)]
        failed = []

        def decode(number):
            try:
                sequence, tokens = sequences[number], TOKENS - 40 * number
                keys, values = new_rows(10, seed=number)
                for i in range(10):
                    step = self.client.begin_step([(sequence, tokens + i)], SOME)
                    step.attend(0, self.layer.queries[None])
                    step.end({0: (keys[i:i + 1], values[i:i + 1])})
                sequence.flush()
            except BaseException as error:  # told by the main thread
                failed.append(error)

        threads = [threading.Thread(target=decode, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        for number, sequence in enumerate(sequences):
            self.assertEqual(sequence.describe().token_count, TOKENS - 40 * number + 10)

    def test_a_live_index_needs_no_build(self):
        sequence = self.cache().create_sequence(live_index=True, index=INDEX, sink_tokens=4)
        self.addCleanup(sequence.close)
        sequence.ingest(0, 0, self.layer.keys, self.layer.values)
        keys, values = new_rows(5, seed=9)
        for i in range(5):
            with self.client.begin_step([(sequence, TOKENS + i)], ALL) as step:
                middle = step.attend(0, self.layer.queries[None])
                step.end({0: (keys[i:i + 1], values[i:i + 1])})
            output, _ = self.layer.attend([np.arange(4, TOKENS + i + 1 - 32)] * KV_HEADS)
            np.testing.assert_allclose(middle.output[0], output, atol=1e-4)
        sequence.flush()

    # ---- Complete attention

    def test_decoded_steps_give_full_attention_and_need_no_rows(self):
        counts = [TOKENS - 100, 20]
        items = [StepItem(self.filled(count), count, 2) for count in counts]
        for i in range(20):
            rows = [slice(count + 2 * i, count + 2 * i + 2) for count in counts]
            keys = np.concatenate([self.layer.keys[of_item] for of_item in rows])
            values = np.concatenate([self.layer.values[of_item] for of_item in rows])
            queries = np.stack([self.layer.queries] * 4)
            items = [StepItem(item.sequence, count + 2 * i, 2) for item, count in zip(items, counts)]
            output = np.empty((4, QUERY_HEADS, VALUE_DIM), np.float16)
            with self.client.begin_step(items, ALL) as step:
                found = step.decode(0, queries, keys, values, out=(output, None) if i % 2 else None)
                step.end()
            for token in range(4):
                position = counts[token // 2] + 2 * i + token % 2
                expected, lse = self.layer.attend([np.arange(position + 1)] * KV_HEADS)
                np.testing.assert_allclose(found.output[token], expected, atol=2e-3 if i % 2 else 1e-4)
                if i % 2 == 0:
                    np.testing.assert_allclose(found.lse[token], lse, atol=1e-4)
        for item, count in zip(items, counts):
            item.sequence.flush()
            self.assertEqual(item.sequence.describe().token_count, count + 40)

    def test_decode_names_what_is_wrong(self):
        sequence = self.filled(TOKENS - 1)
        queries, keys, values = self.layer.queries, self.layer.keys[-1], self.layer.values[-1]
        with self.client.begin_step([(sequence, TOKENS - 1)], ALL) as step:
            with self.fails(pqcached.InvalidArgument, "values.shape"):
                step.decode(0, queries, keys, keys)
            step.decode(0, queries, keys, values)
            with self.fails(pqcached.InvalidArgument, "layer: 0 was decoded"):
                step.decode(0, queries, keys, values)
            with self.fails(pqcached.InvalidArgument, "layers"):
                step.end({0: (keys[None], values[None])})
        self.assertEqual(sequence.describe().token_count, TOKENS - 1)

    # ---- Decoder

    def test_the_decoder_at_ratio_one_is_full_attention(self):
        sequence = self.sequence()
        with sequence.decoder(ALL) as decoder:
            decoder.prefill(0, self.layer.keys[:400], self.layer.values[:400])
            decoder.prefill(0, self.layer.keys[400:500], self.layer.values[400:500])
            for token in range(500, 560):
                output = decoder.decode(0, self.layer.queries, self.layer.keys[token], self.layer.values[token])
                expected, _ = self.layer.attend([np.arange(token + 1)] * KV_HEADS)
                np.testing.assert_allclose(output, expected, atol=1e-4)
            with self.fails(pqcached.FailedPrecondition, "prefill is over"):
                decoder.prefill(0, self.layer.keys[560:], self.layer.values[560:])
        sequence.flush()
        self.assertEqual(sequence.describe().token_count, 560)

    def test_a_decoder_names_what_is_wrong_and_goes_on(self):
        sequence = self.sequence()
        with self.fails(pqcached.InvalidArgument, "window_tokens"):
            sequence.decoder(Selection(ratio=0.5, sink_tokens=4))
        decoder = sequence.decoder(ALL)
        decoder.prefill(0, self.layer.keys, self.layer.values)
        token = self.layer.queries, self.layer.keys[0], self.layer.values[0]
        with self.fails(pqcached.InvalidArgument, "layer"):
            decoder.decode(7, *token)
        with self.fails(pqcached.InvalidArgument, "key.shape"):
            decoder.decode(0, token[0], self.layer.keys[:3], token[2])
        out = np.empty((QUERY_HEADS, VALUE_DIM), np.float32)
        self.assertIs(decoder.decode(0, *token, out=out), out)
        sequence.close()
        with self.fails(pqcached.FailedPrecondition, "sequence: it is closed"):
            decoder.decode(0, *token)
        decoder.close()
        with self.fails(pqcached.FailedPrecondition, "closed"):
            decoder.decode(0, *token)

    # ---- Block tables

    def test_retrieved_tokens_do_not_count_the_ends(self):
        sequence = self.filled()
        for count, expected in ((50, 50), (10 * TOKENS, TOKENS - 36)):
            chosen = sequence.topk(0, TOKENS - 1, self.layer.queries,
                                   Selection(retrieved_tokens=count, sink_tokens=4, window_tokens=32))
            self.assertEqual(chosen.count, expected)
        with self.fails(pqcached.InvalidArgument, "retrieved_tokens"):
            sequence.topk(0, TOKENS - 1, self.layer.queries, Selection(retrieved_tokens=0, window_tokens=32))

    def test_re_ranking_keeps_the_best_of_what_the_index_proposes(self):
        sequence = self.filled()
        ends = {"sink_tokens": 4, "window_tokens": 32, "index": INDEX}
        queries = self.layer.queries

        def top_k(count, **terms):
            return sequence.topk(0, TOKENS - 1, queries, Selection(retrieved_tokens=count, **{**ends, **terms}))

        flat = top_k(40, index=Index.flat()).positions
        np.testing.assert_array_equal(top_k(TOKENS // 8, rerank_factor=8).positions,
                                      top_k(TOKENS // 8, index=Index.flat()).positions)
        found = [sum(len(np.intersect1d(*heads)) for heads in zip(top_k(40, rerank_factor=factor).positions, flat))
                 for factor in (1, 2, 4)]
        self.assertEqual(found, sorted(found))
        self.assertGreater(found[2], found[0])
        reranked = Selection(retrieved_tokens=40, rerank_factor=4, **ends)
        with self.client.begin_step([StepItem(sequence, TOKENS - 1)], reranked) as step:
            np.testing.assert_array_equal(step.topk(0, queries[None])[0], top_k(40, rerank_factor=4).positions)
            output = step.attend(0, queries[None])
        alone = sequence.attend(0, TOKENS - 1, queries, reranked)
        np.testing.assert_allclose(output.output[0], alone.output, atol=1e-5)

    def test_a_budget_can_be_a_share_of_the_attention(self):
        sequence = self.filled()
        ends = {"sink_tokens": 16, "window_tokens": 32, "index": INDEX}
        queries = self.layer.queries
        counts = [sequence.topk(0, TOKENS - 1, queries, Selection(attention_mass=mass, **ends)).count for mass in (0.3, 0.6, 0.9)]
        self.assertEqual(counts, sorted(set(counts)))
        by_mass = Selection(attention_mass=0.6, **ends)
        alone = sequence.topk(0, TOKENS - 1, queries, by_mass)
        with self.client.begin_step([StepItem(sequence, TOKENS - 1)], by_mass) as step:
            np.testing.assert_array_equal(step.topk(0, queries[None])[0], alone.positions)
        capped = Selection(attention_mass=0.9, most_tokens=counts[0], **ends)
        self.assertEqual(sequence.topk(0, TOKENS - 1, queries, capped).count, counts[0])
        with self.fails(pqcached.InvalidArgument, "selection.attention_mass"):
            sequence.topk(0, TOKENS - 1, queries, Selection(attention_mass=1.5, **ends))
        with self.assertRaises(pqcached.InvalidArgument):
            Selection(attention_mass=0.5, ratio=0.5)

    def test_a_tail_is_estimated_by_clusters(self):
        sequence = self.filled()
        queries = self.layer.queries
        ends = {"sink_tokens": 16, "window_tokens": 32, "index": Index.flat()}
        estimated = Selection(ratio=0.1, tail_estimate=True, **ends)
        with self.fails(pqcached.FailedPrecondition, "selection.tail_estimate"):
            sequence.attend(0, TOKENS - 1, queries, estimated)
        sequence.build_index(Index.make("clusters", tokens=8))
        full = sequence.attend(0, TOKENS - 1, queries, Selection(ratio=1, **ends)).output
        plain = sequence.attend(0, TOKENS - 1, queries, Selection(ratio=0.1, **ends)).output
        alone = sequence.attend(0, TOKENS - 1, queries, estimated).output
        self.assertLess(np.linalg.norm(alone - full), 0.7 * np.linalg.norm(plain - full))
        with self.client.begin_step([StepItem(sequence, TOKENS - 1)], estimated) as step:
            np.testing.assert_allclose(step.attend(0, queries[None]).output[0], alone, atol=1e-5)

    # ---- Ranks

    def test_ranks_of_a_model_have_a_cache_each(self):
        group = pqcached.LayerGroup([0], 1, QUERY_HEADS // KV_HEADS, KEY_DIM, VALUE_DIM, pqcached.DType.F32)
        name = f"ranks {self.path.name}"
        caches = [self.client.open_cache(name, model_fingerprint="ranks", groups=[group], capacity_bytes=4 << 20,
                                         rank=pqcached.Rank(name, rank, 3, kv_head_begin=rank)) for rank in range(2)]
        for cache in caches:
            self.addCleanup(cache.close)
        with self.fails(pqcached.FailedPrecondition, "kv_head_begin"):
            self.client.open_cache(name, model_fingerprint="ranks", groups=[group], capacity_bytes=4 << 20,
                                   rank=pqcached.Rank(name, 2, 3, kv_head_begin=1))
        output, lse = self.layer.attend([np.arange(4, TOKENS - 32)] * KV_HEADS)
        heads = QUERY_HEADS // KV_HEADS
        for rank, cache in enumerate(caches):
            sequence = cache.create_sequence()
            self.addCleanup(sequence.close)
            sequence.ingest(0, 0, self.layer.keys[:, rank:rank + 1], self.layer.values[:, rank:rank + 1])
            own = slice(rank * heads, (rank + 1) * heads)
            part = sequence.attend(0, TOKENS - 1, self.layer.queries[own],
                                   Selection(ratio=1.0, sink_tokens=4, window_tokens=32, index=Index.flat()))
            np.testing.assert_allclose(part.output, output[own], atol=1e-4)
            np.testing.assert_allclose(part.lse, lse[own], atol=1e-4)


class LocalStepsTest(StepsOverOnePath, DaemonTest):
    path = PathChoice.ONLY_LOCAL

    def test_no_step_waits_for_a_call(self):
        sequence = self.filled()
        keys, values = new_rows(20, seed=8)
        self.client.begin_step([(sequence, TOKENS)], SOME).close()  # attaches
        before = self.client.counts().rpcs
        for i in range(20):
            with self.client.begin_step([(sequence, TOKENS + i)], SOME) as step:
                step.attend(0, self.layer.queries[None])
                step.end({0: (keys[i:i + 1], values[i:i + 1])})
        self.assertEqual(self.client.counts().rpcs, before)


class RemoteStepsTest(StepsOverOnePath, DaemonTest):
    path = PathChoice.ONLY_REMOTE


if __name__ == "__main__":
    unittest.main()
