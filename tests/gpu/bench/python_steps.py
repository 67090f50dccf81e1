"""Measures decode steps on a GPU through the Python client and a real sidecar, beside SDPA of torch over all rows in HBM.

Usage: python_steps.py BUILD LIBRARY [--tokens N] [--layers N] [--k N] [--steps N] [--cache N] [--profile]

BUILD is a build folder with service/pqcached and client/libpqcached_client.so; LIBRARY is its libpqcached_gpu.so. Needs a
GPU and torch. 8 kv heads, 32 query heads, head dim 128, fp16, index pq; keys are those of topics that change slowly, and
so are the queries. --profile prints the times of the kernels.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch

SOURCE = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(SOURCE / "client/python"), str(SOURCE / "tests")]

import children  # noqa: E402
import pqcached  # noqa: E402

KV_HEADS, GROUP, DIM = 8, 4, 128
SINK, WINDOW = 4, 64
WARM_STEPS = 8


def half(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


class Layer:
    """Rows of one layer on the device: keys are a topic of 32 to 64 tokens and noise."""

    def __init__(self, tokens):
        topics = half(tokens // 48 + 1, KV_HEADS, DIM).repeat_interleave(48, 0)[:tokens]
        self.keys = (topics + 0.5 * half(tokens, KV_HEADS, DIM)).contiguous()
        self.values = half(tokens, KV_HEADS, DIM)
        self.queries = half(1, KV_HEADS * GROUP, DIM)
        self.out = (torch.zeros(1, KV_HEADS * GROUP, DIM, device="cuda"), torch.zeros(1, KV_HEADS * GROUP, device="cuda"))
        self.new = half(1, KV_HEADS, DIM), half(1, KV_HEADS, DIM)

    def drift(self):
        self.queries = (0.98 * self.queries + 0.2 * half(1, KV_HEADS * GROUP, DIM)).contiguous()


def start(build, folder, pool_bytes):
    endpoint = f"unix://{folder}/s"
    process = subprocess.Popen([build / "service/pqcached", "--listen", endpoint, "--max-pool-bytes", str(pool_bytes)],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               preexec_fn=children.end_with_parent)
    for line in process.stdout:
        if "event=ready" in line:
            return process, endpoint
    raise RuntimeError("the sidecar did not start")


def seconds(work):
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def report(name, seconds_taken, extra=""):
    print(f"{name:44} {seconds_taken * 1e3:9.3f} ms {extra}", flush=True)


def measure(client, arguments):
    tokens, layers = arguments.tokens, [Layer(arguments.tokens) for _ in range(arguments.layers)]
    row_bytes = 2 * DIM * 2 * KV_HEADS * tokens
    group = pqcached.LayerGroup(list(range(arguments.layers)), KV_HEADS, KV_HEADS * GROUP, DIM, DIM, pqcached.DType.F16)
    stream = torch.cuda.current_stream().cuda_stream
    torch.cuda.synchronize()
    with client.open_cache("bench", model_fingerprint="bench", groups=[group],
                           capacity_bytes=2 * arguments.layers * row_bytes + (1 << 30)) as cache, \
            cache.create_sequence() as sequence, \
            cache.open_gpu(tokens + 1024, selected_capacity=arguments.k, cache_tokens=arguments.cache,
                           block_cache=arguments.cache > 0, gpu_library_path=arguments.library) as gpu:

        def ingest():
            for number, layer in enumerate(layers):
                gpu.ingest(sequence, number, 0, layer.keys, layer.values, stream=stream)
            sequence.flush()

        took = seconds(ingest)
        report(f"ingest of {arguments.layers} layers", took, f"{arguments.layers * row_bytes / took / 1e9:.1f} GB/s")
        report("index", seconds(lambda: sequence.build_index(sink_tokens=SINK)))
        loaded = {number: (torch.empty_like(layer.keys), torch.empty_like(layer.values))
                  for number, layer in enumerate(layers)}
        pinned = torch.empty(arguments.layers * row_bytes // 2, dtype=torch.float16, pin_memory=True)
        target = torch.empty_like(pinned, device="cuda")
        sequence.load((0, tokens), loaded, stream=stream)
        load = statistics.median(seconds(lambda: sequence.load((0, tokens), loaded, stream=stream)) for _ in range(3))
        copy = statistics.median(seconds(lambda: target.copy_(pinned, non_blocking=True)) for _ in range(3))
        report("load of all rows to the device", load,
               f"{arguments.layers * row_bytes / load / 1e9:.1f} GB/s, {copy / load:.2f} of a pinned copy")
        assert all(torch.equal(loaded[number][0], layer.keys) for number, layer in enumerate(layers))
        del loaded, pinned, target

        position = tokens
        selection = pqcached.Selection(retrieved_tokens=arguments.k, sink_tokens=SINK, window_tokens=WINDOW)

        def step():
            nonlocal position
            with gpu.begin_step([(sequence, position)], selection, stream=stream, decodes=True) as steps:
                for number, layer in enumerate(layers):
                    steps.decode(number, layer.queries, *layer.new, out=layer.out)
                steps.end()
            position += 1
            for layer in layers:
                layer.drift()

        def sdpa():
            for layer, (keys, values) in zip(layers, full):
                torch.nn.functional.scaled_dot_product_attention(layer.queries.view(1, KV_HEADS, GROUP, DIM), keys, values)

        for _ in range(WARM_STEPS):
            step()
        took = statistics.median(seconds(step) for _ in range(arguments.steps))
        report(f"step of {arguments.layers} layers", took, f"{took / arguments.layers * 1e6:.1f} us a layer")
        full = [(layer.keys.transpose(0, 1)[None].contiguous(), layer.values.transpose(0, 1)[None].contiguous())
                for layer in layers]
        sdpa()
        over_all = statistics.median(seconds(sdpa) for _ in range(arguments.steps))
        report("SDPA of torch over all rows in HBM", over_all, f"{over_all / took:.2f} of the step's time")
        print(gpu.count())
        if arguments.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(4):
                    step()
                torch.cuda.synchronize()
            print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("library")
    for name, default in (("tokens", 131072), ("layers", 4), ("k", 2048), ("steps", 24), ("cache", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch found no GPU")
    print(torch.cuda.get_device_name(), f"{arguments.tokens} tokens, k = {arguments.k}, cache {arguments.cache}")
    pool_bytes = 3 * arguments.layers * 2 * DIM * 2 * KV_HEADS * arguments.tokens + (2 << 30)
    with tempfile.TemporaryDirectory() as folder:
        process, endpoint = start(arguments.build, folder, pool_bytes)
        try:
            with pqcached.Client(endpoint, timeout_ms=60000) as client:
                measure(client, arguments)
        finally:
            process.terminate()
            process.wait(timeout=30)


if __name__ == "__main__":
    main()
