"""Prefill, loads and steps with arrays on a GPU: a real daemon and the built client library.

Usage: gpu_test.py BUILD LIBRARY, a libpqcached_gpu on a machine with a GPU and torch, or the emulation of the device.
"""

import dataclasses
import sys
import unittest

import numpy as np

LIBRARY = sys.argv.pop(2)

from daemon import KV_HEADS, QUERY_HEADS, VALUE_DIM, DaemonTest, Layer, group  # noqa: E402

import pqcached  # noqa: E402
from device import open_device  # noqa: E402
from pqcached._load import layer_targets  # noqa: E402
from skip import skip_unless  # noqa: E402

LAYERS = (0, 1, 2)
TOKENS, SINK, WINDOW = 500, 4, 16

device, why_not = open_device(LIBRARY)
DeviceArray = device and device.array


@skip_unless("gpu", device, why_not)
class GpuTest(DaemonTest):
    def test_prefill_and_steps_are_attention_over_what_is_selected(self):
        layers = [Layer(TOKENS + 8, seed) for seed in LAYERS]
        cache = self.cache(LAYERS)
        stream = device.stream()
        with cache.create_sequence() as sequence, cache.open_gpu(
                2048, selected_capacity=512, cache_tokens=256, gpu_library_path=LIBRARY) as gpu:
            for number, layer in enumerate(layers):
                gpu.ingest(sequence, number, 0, DeviceArray(layer.keys[:TOKENS]), DeviceArray(layer.values[:TOKENS]),
                           stream=stream)
                sequence.flush()  # the arrays go
            sequence.build_index(iterations=3, sink_tokens=SINK)
            selection = pqcached.Selection(ratio=0.2, sink_tokens=SINK, window_tokens=WINDOW)
            for position in range(TOKENS, TOKENS + 8):
                with gpu.begin_step([pqcached.StepItem(sequence, position)], selection, stream=stream) as step:
                    for number, layer in enumerate(layers):
                        self.check(step, number, layer)
                    step.end({number: (DeviceArray(layer.keys[position:position + 1]),
                                       DeviceArray(layer.values[position:position + 1]))
                              for number, layer in enumerate(layers)})
            counts = gpu.count()
            self.assertGreater(counts.device_bytes, 0)
            self.assertEqual(counts.resident_layers, len(LAYERS))

    def check(self, step, number, layer):
        queries = DeviceArray(layer.queries[None])
        output = DeviceArray(np.zeros((1, QUERY_HEADS, VALUE_DIM), np.float32))
        lse = DeviceArray(np.zeros((1, QUERY_HEADS), np.float32))
        positions = DeviceArray(np.zeros((1, KV_HEADS, 512), np.int32))
        counts = DeviceArray(np.zeros((1, KV_HEADS), np.uint32))
        step.topk_on_gpu(number, queries, positions, counts)
        attention = step.attend(number, queries, out=(output, lse))
        self.assertTrue((counts.numpy()[0] == attention.counts[0]).all())
        self.assertGreater(attention.counts[0], 60)
        selected = [positions.numpy()[0, head, :counts.numpy()[0, head]] for head in range(KV_HEADS)]
        right_output, right_lse = layer.attend(selected)
        np.testing.assert_allclose(output.numpy()[0], right_output, atol=1e-4)
        np.testing.assert_allclose(lse.numpy()[0], right_lse, atol=1e-4)

    def test_pages_are_those_of_the_cpu(self):
        layer = Layer(TOKENS + 1)
        stream = device.stream()
        cache = self.cache(LAYERS)
        with cache.create_sequence() as sequence, cache.open_gpu(
                2048, selected_capacity=512, gpu_library_path=LIBRARY) as gpu:
            for number in LAYERS:
                sequence.ingest(number, 0, layer.keys[:TOKENS], layer.values[:TOKENS])
            sequence.build_index(iterations=3, sink_tokens=SINK)
            selection = pqcached.Selection(ratio=0.2, sink_tokens=SINK, window_tokens=WINDOW)
            items = [pqcached.StepItem(sequence, TOKENS)]
            terms = {"heads": pqcached.HeadRule.SUM, "with_window": True}
            with self.client.begin_step(items, selection) as step:
                right = [step.topk_pages(1, layer.queries[None], 16),
                         step.topk_pages(1, layer.queries[None], 32, **terms)]
            with gpu.begin_step(items, selection, stream=stream) as step:
                queries = DeviceArray(layer.queries[None])
                lengths = DeviceArray(np.zeros(1, np.uint32))
                for found, lists, page_tokens, others in ((right[0], KV_HEADS, 16, {}), (right[1], 1, 32, terms)):
                    capacity = step.topk_pages_on_gpu(1, queries, page_tokens, None, lengths, **others)
                    self.assertEqual(capacity, found.pages.shape[-1])
                    pages = DeviceArray(np.zeros((1, lists, capacity), np.int32))
                    step.topk_pages_on_gpu(1, queries, page_tokens, pages, lengths, **others)
                    np.testing.assert_array_equal(pages.numpy(), found.pages)
                    np.testing.assert_array_equal(lengths.numpy(), found.lengths)
                with self.fails(pqcached.InvalidArgument, "pages: shape"):
                    step.topk_pages_on_gpu(1, queries, 16, pages, lengths)

    def test_stored_rows_are_loaded_to_the_device(self):
        layers = [Layer(TOKENS, seed) for seed in LAYERS]
        cache = self.cache(LAYERS)
        stream = device.stream()
        key_dim = layers[0].keys.shape[2]

        def empty(tokens):
            return (DeviceArray(np.zeros((tokens, KV_HEADS, key_dim), np.float32)),
                    DeviceArray(np.zeros((tokens, KV_HEADS, VALUE_DIM), np.float16)))

        with cache.create_sequence() as sequence, cache.open_gpu(2048, gpu_library_path=LIBRARY):
            for number, layer in enumerate(layers):
                sequence.ingest(number, 0, layer.keys, layer.values)
            arrays = {2: empty(300), 0: empty(300)}
            for row in layer_targets(arrays, stream)[0]:
                self.assertEqual((row.keys.stream, row.values.stream), (stream, stream))
            sequence.load((150, 450), arrays, stream=stream)
            for number, (keys, values) in arrays.items():
                np.testing.assert_array_equal(keys.numpy(), layers[number].keys[150:450])
                np.testing.assert_array_equal(values.numpy(), layers[number].values[150:450].astype(np.float16))

            memory = DeviceArray(np.zeros((40, 16, KV_HEADS, key_dim), np.float32))
            blocks = np.random.default_rng(3).permutation(40)[:TOKENS // 16 + 1]
            values = empty(TOKENS)[1]
            with sequence.begin_load((0, TOKENS), {1: (pqcached.Paged(memory, blocks, TOKENS), values)}) as load:
                load.wait_layers(1)
                loaded = memory.numpy()[blocks].reshape(-1, KV_HEADS, key_dim)[:TOKENS]
                np.testing.assert_array_equal(loaded, layers[1].keys)
            with self.fails(pqcached.InvalidArgument, "layers[0].values.device"):
                sequence.load((0, 10), {0: (empty(10)[0], np.zeros((10, KV_HEADS, VALUE_DIM), np.float32))})
            with self.fails(pqcached.OutOfRange, "tokens"):
                sequence.load((0, TOKENS + 1), {0: empty(TOKENS + 1)})

    def test_complete_attention_needs_no_rows_at_the_end(self):
        layer = Layer(TOKENS + 3)
        stream = device.stream()
        cache = self.cache(LAYERS)
        with cache.create_sequence() as sequence, cache.open_gpu(
                2048, selected_capacity=512, gpu_library_path=LIBRARY) as gpu:
            for number in LAYERS:
                sequence.ingest(number, 0, layer.keys[:TOKENS], layer.values[:TOKENS])
            sequence.build_index(iterations=3, sink_tokens=SINK)
            selection = pqcached.Selection(ratio=1.0, sink_tokens=SINK, window_tokens=WINDOW)
            queries = DeviceArray(layer.queries[None])
            for position in range(TOKENS, TOKENS + 3):
                keys, values = (DeviceArray(rows[position:position + 1]) for rows in (layer.keys, layer.values))
                right_output, right_lse = layer.attend([range(position + 1)] * KV_HEADS)
                with gpu.begin_step([(sequence, position)], selection, stream=stream, decodes=True) as step:
                    for number in LAYERS:
                        output = DeviceArray(np.zeros((1, QUERY_HEADS, VALUE_DIM), np.float32))
                        lse = DeviceArray(np.zeros((1, QUERY_HEADS), np.float32)) if number else None
                        found = step.decode(number, queries, keys, values, out=(output, lse))
                        np.testing.assert_allclose(output.numpy()[0], right_output, atol=1e-4)
                        if lse is not None:
                            np.testing.assert_allclose(lse.numpy()[0], right_lse, atol=1e-4)
                        self.assertEqual(found.counts[0], position + 1 - SINK - WINDOW)
                    step.end()
            with gpu.begin_step([(sequence, TOKENS)], selection, stream=stream) as step:
                with self.assertRaisesRegex(pqcached.FailedPrecondition, "PQC_STEP_DECODES"):
                    step.decode(0, queries, keys, values, out=(output, lse))
                with self.assertRaisesRegex(pqcached.InvalidArgument, "out.lse"):
                    step.attend(0, queries, out=(output, None))

    def test_positions_of_an_indexer_on_the_device_are_attended_to(self):
        layer = Layer(TOKENS + 1)
        stream = device.stream()
        cache = self.cache(LAYERS)
        with cache.create_sequence() as sequence, cache.open_gpu(
                2048, selected_capacity=512, cache_tokens=256, gpu_library_path=LIBRARY) as gpu:
            for number in LAYERS:
                sequence.ingest(number, 0, layer.keys[:TOKENS], layer.values[:TOKENS])
            queries = DeviceArray(layer.queries[None])
            output = DeviceArray(np.zeros((1, QUERY_HEADS, VALUE_DIM), np.float32))
            lse = DeviceArray(np.zeros((1, QUERY_HEADS), np.float32))
            each = np.full((1, KV_HEADS, 9), -1, np.int32)
            for head in range(KV_HEADS):
                each[0, head, :4] = 7, TOKENS - 1, head, 7
            per_head = [[head, 7, TOKENS - 1] for head in range(KV_HEADS)]
            with gpu.begin_step([pqcached.StepItem(sequence, TOKENS)], stream=stream) as step:
                for positions, lengths, right in (
                        (each, None, per_head),
                        (each, np.full((1, KV_HEADS), 1, np.uint32), [[7]] * KV_HEADS),
                        (each[:, 0], None, per_head[:1] * KV_HEADS),
                        (each[:, 0], np.full(1, 2, np.uint32), [[7, TOKENS - 1]] * KV_HEADS)):
                    found = step.attend_positions(1, queries, DeviceArray(positions), lengths=(
                        None if lengths is None else DeviceArray(lengths)), out=(output, lse))
                    right_output, right_lse = layer.attend([np.asarray(chosen) for chosen in right])
                    np.testing.assert_allclose(output.numpy()[0], right_output, atol=1e-4)
                    np.testing.assert_allclose(lse.numpy()[0], right_lse, atol=1e-4)
                    self.assertEqual(found.counts.size, 0)
                step.attend_range(1, queries, DeviceArray(np.array([[3, TOKENS]])), out=(output, lse))
                right_output, right_lse = layer.attend([range(3, TOKENS)] * KV_HEADS)
                np.testing.assert_allclose(output.numpy()[0], right_output, atol=1e-4)
                np.testing.assert_allclose(lse.numpy()[0], right_lse, atol=1e-4)
                with self.fails(TypeError, "ranges: dtype"):
                    step.attend_range(1, queries, DeviceArray(np.array([[3, 4]], np.int32)), out=(output, lse))
                with self.fails(pqcached.InvalidArgument, "out: must be arrays on the device"):
                    step.attend_range(1, queries, DeviceArray(np.array([[3, 4]])))
                with self.fails(TypeError, "positions: ndarray; must be" if not hasattr(np.ndarray, "__dlpack__")
                                else "positions: on DLPack device 1"):
                    step.attend_positions(1, queries, each, out=(output, lse))
                with self.fails(pqcached.InvalidArgument, "lists.positions.shape"):
                    step.attend_positions(1, queries, DeviceArray(np.zeros((2, 9), np.int32)), out=(output, lse))
                with self.fails(pqcached.InvalidArgument, "out: must be arrays on the device"):
                    step.attend_positions(1, queries, DeviceArray(each))
                with self.fails(pqcached.InvalidArgument, "queries"):
                    step.attend_positions(1, None, DeviceArray(each), out=(output, lse))
                chosen = np.array([[3, 7, 50]], np.int32)
                logits = layer.logits()[None][:, :, chosen[0]].astype(np.float32)
                step.attend_positions(1, None, DeviceArray(chosen), logits=DeviceArray(logits), out=(output, lse))
                right_output, right_lse = layer.attend([chosen[0]] * KV_HEADS)
                np.testing.assert_allclose(output.numpy()[0], right_output, atol=1e-4)
                np.testing.assert_allclose(lse.numpy()[0], right_lse, atol=1e-4)
                step.attend_positions(1, queries, DeviceArray(np.full((1, 3), TOKENS, np.int32)), out=(output, lse))
                with self.fails(pqcached.InvalidArgument, "lists.positions"):
                    step.end({number: (layer.keys[TOKENS:], layer.values[TOKENS:]) for number in LAYERS})

    def test_query_tokens_select_for_themselves(self):
        layer, other = Layer(TOKENS + 2), Layer(TOKENS + 2)
        other.queries = -layer.queries
        stream = device.stream()
        cache = self.cache(LAYERS)
        with cache.create_sequence() as sequence, cache.open_gpu(
                2048, selected_capacity=512, query_length=2, gpu_library_path=LIBRARY) as gpu:
            for number in LAYERS:
                sequence.ingest(number, 0, layer.keys[:TOKENS], layer.values[:TOKENS])
            sequence.build_index(iterations=3, sink_tokens=SINK)
            selection = pqcached.Selection(ratio=0.2, sink_tokens=SINK, window_tokens=WINDOW)
            with gpu.begin_step([pqcached.StepItem(sequence, TOKENS, 2)], selection, stream=stream,
                                select_per_token=True) as step:
                queries = DeviceArray(np.stack([layer.queries, other.queries]))
                output = DeviceArray(np.zeros((2, QUERY_HEADS, VALUE_DIM), np.float32))
                lse = DeviceArray(np.zeros((2, QUERY_HEADS), np.float32))
                positions = DeviceArray(np.zeros((2, KV_HEADS, 512), np.int32))
                counts = DeviceArray(np.zeros((2, KV_HEADS), np.uint32))
                step.topk_on_gpu(0, queries, positions, counts)
                step.attend(0, queries, out=(output, lse))
                selected = [[positions.numpy()[token, head, :counts.numpy()[token, head]] for head in range(KV_HEADS)]
                            for token in range(2)]
                self.assertFalse((selected[0][0] == selected[1][0]).all())
                for token, queried in enumerate((layer, other)):
                    right_output, right_lse = queried.attend(selected[token])
                    np.testing.assert_allclose(output.numpy()[token], right_output, atol=1e-4)
                    np.testing.assert_allclose(lse.numpy()[token], right_lse, atol=1e-4)

    def test_layers_without_an_index_attend_to_all_candidates_or_to_none(self):
        layer = Layer(TOKENS + 1)
        stream = device.stream()
        groups = [group([0]), dataclasses.replace(group([1]), kind=pqcached.LayerKind.FULL),
                  dataclasses.replace(group([2]), kind=pqcached.LayerKind.WINDOW, window_tokens=8)]
        with self.client.open_cache("kinds", model_fingerprint="kinds", groups=groups, capacity_bytes=16 << 20) as cache:
            with cache.create_sequence() as sequence, cache.open_gpu(
                    2048, selected_capacity=512, gpu_library_path=LIBRARY) as gpu:
                for number in range(3):
                    sequence.ingest(number, 0, layer.keys[:TOKENS], layer.values[:TOKENS])
                sequence.build_index(iterations=3, sink_tokens=SINK)
                selection = pqcached.Selection(ratio=0.2, sink_tokens=SINK, window_tokens=WINDOW)
                with gpu.begin_step([pqcached.StepItem(sequence, TOKENS)], selection, stream=stream) as step:
                    self.check(step, 0, layer)
                    queries = DeviceArray(layer.queries[None])
                    for number, seen in ((1, range(SINK, TOKENS + 1 - WINDOW)), (2, ())):
                        output = DeviceArray(np.ones((1, QUERY_HEADS, VALUE_DIM), np.float32))
                        lse = DeviceArray(np.ones((1, QUERY_HEADS), np.float32))
                        found = step.attend(number, queries, out=(output, lse))
                        right_output, right_lse = layer.attend([seen] * KV_HEADS)
                        np.testing.assert_allclose(output.numpy()[0], right_output, atol=1e-4)
                        np.testing.assert_allclose(lse.numpy()[0], right_lse, atol=1e-4)
                        self.assertEqual(found.counts[0], len(seen))

    def test_merges_on_the_device_are_those_of_the_host(self):
        random = np.random.default_rng(5)
        stream = device.stream()
        with self.cache(LAYERS).open_gpu(2048, gpu_library_path=LIBRARY) as gpu:
            for dtype, sinks in ((np.float32, None), (np.float16, random.normal(size=6).astype(np.float32))):
                output_a, output_b = (random.normal(size=(3, 6, 40)).astype(dtype) for _ in range(2))
                lse_a, lse_b = (random.normal(size=(3, 6)).astype(np.float32) for _ in range(2))
                lse_a[0, 0] = lse_b[1, 1] = -np.inf
                a, b = (DeviceArray(output_a), DeviceArray(lse_a)), (DeviceArray(output_b), DeviceArray(lse_b))
                logits = None if sinks is None else DeviceArray(sinks)
                gpu.merge_tensors(*a, *b, stream=stream, log_base_a=pqcached.LogBase.BASE2, sink_logits=logits)
                natural = lse_a * np.float32(np.log(2))
                pqcached.merge_tensors(output_a, natural, output_b, lse_b, sink_logits=sinks)
                np.testing.assert_allclose(a[0].numpy(), output_a, rtol=1e-3 if dtype is np.float16 else 1e-5, atol=1e-6)
                np.testing.assert_allclose(a[1].numpy() * np.log(2), natural, rtol=1e-5, atol=1e-6)
                with self.fails(TypeError, "lse_a: on the CPU; must be on a GPU"):
                    gpu.merge_tensors(a[0], lse_a, *b, stream=stream)
                with self.fails(pqcached.InvalidArgument, "b.output.device"):
                    gpu.merge_tensors(*a, output_b, lse_b, stream=stream)
                with self.fails(pqcached.InvalidArgument, "lse_a.shape"):
                    gpu.merge_tensors(a[0], logits or b[0], *b, stream=stream)

    def test_what_is_wrong_is_said_by_name(self):
        cache = self.cache(LAYERS)
        with self.fails(pqcached.InvalidArgument, "token_capacity"):
            cache.open_gpu(0, gpu_library_path=LIBRARY)
        with self.fails(pqcached.FailedPrecondition, "no device support"):
            cache.open_gpu(2048, gpu_library_path="/nonexistent/libpqcached_gpu.so")
        layer = Layer(TOKENS)
        stream = device.stream()
        with cache.create_sequence() as sequence, cache.open_gpu(2048, gpu_library_path=LIBRARY) as gpu:
            keys, values = DeviceArray(layer.keys), DeviceArray(layer.values)
            with self.fails(pqcached.InvalidArgument, "keys.device"):
                gpu.ingest(sequence, 0, 0, layer.keys, layer.values, stream=stream)
            for number in LAYERS:
                gpu.ingest(sequence, number, 0, keys, values, stream=stream)
            gpu.ingest(sequence, 0, TOKENS + 1, keys, values, stream=stream)  # a gap: the sidecar's to say
            with self.fails(pqcached.InvalidArgument, "rows of an earlier pqc_gpu_ingest"):
                sequence.flush()
            sequence.build_index(iterations=1)
            selection = pqcached.Selection(ratio=0.2, sink_tokens=SINK, window_tokens=WINDOW)
            with gpu.begin_step([(sequence, TOKENS - 1)], selection, stream=stream) as step:
                output = DeviceArray(np.zeros((1, QUERY_HEADS, VALUE_DIM + 1), np.float32))
                lse = DeviceArray(np.zeros((1, QUERY_HEADS), np.float32))
                queries = DeviceArray(layer.queries[None])
                with self.fails(pqcached.InvalidArgument, "out: must be arrays on the device"):
                    step.attend(0, queries)
                with self.fails(pqcached.InvalidArgument, "output: shape"):
                    step.attend(0, queries, out=(output, lse))
                with self.fails(TypeError, "lse: ndarray; must be" if not hasattr(np.ndarray, "__dlpack__")
                                else "lse: on DLPack device 1"):
                    step.attend(0, queries, out=(DeviceArray(np.zeros((1, QUERY_HEADS, VALUE_DIM), np.float32)),
                                                 np.zeros((1, QUERY_HEADS), np.float32)))


if __name__ == "__main__":
    unittest.main()
