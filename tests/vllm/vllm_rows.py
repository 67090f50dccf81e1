#!/usr/bin/env python3
"""Figures of pqcached in vLLM: engines with our plug-in beside stock vLLM, with one thread each, taking turns.

vllm_rows.py BUILD --json FILE [--short] [--only NAME...]
    --short: short contexts and few repetitions; its figures are for tests only. --only: some of the parts equal, kills, prefix, decode,
    held, batch.

Times are those of SmolLM2 in bfloat16; equal tokens are those of a random Llama in float32.
"""

import argparse
import contextlib
import json
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time

import engines  # first
from engines import INSTALLED, Engine, environment
from equality_test import mixed_requests, next_turns, tokens_of

from daemon import BUILD, Daemon, children

import pqcached

ROW_BYTES = 30 * 2 * 3 * 64 * 2  # of a token of SmolLM2 in bfloat16
SELECTING = {"decode": "select", "min_tokens": 1024}
METHOD = "index pq m=4 b=8, a tenth of the tokens with sink 16 and window 64, re-ranking by 2"
LMCACHE = "LMCache's server is not started by this program"

ROWS = (
    ("vllm_equal_tokens_ratio1", 1, "share", "higher"),
    ("vllm_tokens_changed_by_kills", 0, "count", "lower"),
    ("vllm_ttft_prefix_hit_vs_recompute_4k", 0.02, "x", "lower"),
    ("vllm_ttft_over_local_hit_ms_4k", 35, "ms", "lower"),
    ("vllm_ttft_prefix_hit_vs_example_connector", 1, "x", "lower"),
    ("vllm_ttft_prefix_hit_vs_lmcache", 0.6, "x", "lower"),
    ("vllm_prefill_slowdown_by_ingest", 1.01, "x", "lower"),
    ("vllm_decode_over_stock_exact_7k", 1.05, "x", "lower"),
    ("vllm_decode_over_stock_r10_7k", 0.75, "x", "lower"),
    ("vllm_decode_over_stock_r10_7k_batch2", 0.65, "x", "lower"),
    ("vllm_held_over_row_bytes_1k", 1.1, "x", "lower"),
    ("vllm_16_requests_8k_vs_stock", 1, "x", "higher"),
    ("vllm_16_requests_8k_p99_between_tokens_ms", None, "ms", "lower"),
)
PARTS = {
    "equal": ("vllm_equal_tokens_ratio1",),
    "kills": ("vllm_tokens_changed_by_kills",),
    "prefix": ("vllm_ttft_prefix_hit_vs_recompute_4k", "vllm_ttft_over_local_hit_ms_4k", "vllm_ttft_prefix_hit_vs_example_connector",
               "vllm_ttft_prefix_hit_vs_lmcache", "vllm_prefill_slowdown_by_ingest"),
    "decode": ("vllm_decode_over_stock_exact_7k", "vllm_decode_over_stock_r10_7k", "vllm_decode_over_stock_r10_7k_batch2"),
    "held": ("vllm_held_over_row_bytes_1k",),
    "batch": ("vllm_16_requests_8k_vs_stock", "vllm_16_requests_8k_p99_between_tokens_ms"),
}


class Sizes:
    """Tokens and repetitions of each measurement."""

    def __init__(self, is_short):
        self.kills = 1 if is_short else 40
        self.prefix = 512 if is_short else 4096
        self.hits, self.prefills = (2, 1) if is_short else (12, 3)
        self.context, self.rounds, self.passes = (600, 2, 3) if is_short else (7040, 16, 4)
        self.shared, self.batch_tokens = (640, 4) if is_short else (7936, 24)


def row(name, value, against, samples=None, spread=None):
    goal, unit, better = next(each[1:] for each in ROWS if each[0] == name)
    return {"area": "transformers", "name": name, "value": None if value is None else float(f"{value:.4g}"), "unit": unit, "better": better,
            "goal": goal, "against": against, "samples": samples, "spread": spread}


def ratio(name, ours, stock, against):
    """A row of the ratio of medians, with both in milliseconds."""
    mine, others = statistics.median(ours), statistics.median(stock)
    low, high = (statistics.quantiles(ours, n=4)[0], statistics.quantiles(ours, n=4)[2]) if len(ours) > 1 else (mine, mine)
    return row(name, mine / others, f"{against}; {mine * 1000:.1f} ms against {others * 1000:.1f}", len(ours), round((high - low) / others, 4))


@contextlib.contextmanager
def sidecar():
    """The endpoint of a sidecar with the options that are the default."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix://{folder}/s"
        with subprocess.Popen([BUILD / "service/pqcached", "--listen", endpoint], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              preexec_fn=children.end_with_parent) as daemon:
            try:
                while "event=ready" not in daemon.stdout.readline():
                    pass
                yield endpoint
            finally:
                daemon.terminate()


def smollm2(ours, **more):
    """An engine whose prompts are computed in one pass."""
    return Engine(environment.smollm2(), ours, **{"dtype": "bfloat16", "max_model_len": 8192, "max_num_batched_tokens": 8192, **more})


def settings(endpoint, **more):
    return {"endpoint": endpoint, "timeout_ms": 20000, "threads": 1, **more}


def tokens(count, seed):
    made = random.Random(seed)
    return [made.randrange(100, 40000) for _ in range(count)]


# ---- Parts


def equal(sizes):
    requests = mixed_requests(16, seed=11)
    with sidecar() as endpoint, engines.running(Engine(environment.tiny()), Engine(environment.tiny(), settings(endpoint))) as (stock, ours):
        expected = stock.run(requests)
        turns = next_turns(requests, expected["requests"])
        right = tokens_of(expected) + tokens_of(stock.run(turns))
        got = tokens_of(ours.run(requests)) + tokens_of(ours.run(turns))
    same = sum(mine == other for mine, other in zip(got, right))
    return [row("vllm_equal_tokens_ratio1", same / len(right), f"requests with the greedy tokens of stock vLLM {INSTALLED[0]}: 16 that run together, of "
                "1 to 940 tokens, and their second turns", len(right))]


def kills(sizes):
    requests, made, changed = mixed_requests(8, seed=12), random.Random(13), 0
    with tempfile.TemporaryDirectory() as folder:
        ours = settings(f"unix://{folder}/s", timeout_ms=300, retry_ms=1)
        with engines.running(Engine(environment.tiny()), Engine(environment.tiny(), ours, enable_prefix_caching=False)) as (stock, engine):
            right = tokens_of(stock.run(requests))
            for _ in range(sizes.kills):
                daemon = Daemon(folder)
                begin = time.monotonic()
                answers = [tokens_of(engine.run(requests))]
                engine.send(requests)
                time.sleep(made.random() * 0.8 * (time.monotonic() - begin))
                daemon.stop(signal.SIGKILL)
                answers.append(tokens_of(engine.receive()))
                changed += sum(mine != other for answer in answers for got, expected in zip(answer, right, strict=True)
                               for mine, other in zip(got, expected, strict=True))
    return [row("vllm_tokens_changed_by_kills", changed, f"tokens of stock vLLM {INSTALLED[0]}; the sidecar was killed at random instants of 8 requests "
                "that run together, whose prefixes it had", sizes.kills)]


def prefix(sizes):
    """First tokens of prompts whose prefix an earlier engine has stored, or that are new."""
    known = tokens(sizes.prefix, 21)

    def prompt(number, ids=known):
        return [{"ids": ids + tokens(10, 1000 + number), "tokens": 2}]

    with sidecar() as endpoint, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        example = {"connector": "ExampleConnector", "module": None, "shared_storage_path": shared}
        with engines.running(smollm2(settings(endpoint)), smollm2(None), smollm2(example)) as (storing, stock, other):
            for engine in (storing, stock, other):
                engine.run([{"ids": tokens(300, 22), "tokens": 2}])  # warm
                engine.run(prompt(0))
            new = {"ours": [], "stock": []}
            for number in range(sizes.prefills):
                turns = [("ours", storing), ("stock", stock)]
                for name, engine in turns if number % 2 else turns[::-1]:
                    new[name].append(engine.run(prompt(0, tokens(sizes.prefix, 30 + number)))["requests"][0]["first"])
        with engines.running(smollm2(settings(endpoint), enable_prefix_caching=False), smollm2(example, enable_prefix_caching=False),
                             smollm2(None)) as (ours, other, stock):
            for engine in (ours, other, stock):
                engine.run([{"ids": tokens(300, 22), "tokens": 2}])
            stock.run(prompt(0))
            hits = {ours: [], other: [], stock: []}
            for number in range(1, sizes.hits + 2):
                for engine in (ours, other, stock) if number % 2 else (stock, other, ours):
                    hits[engine].append(engine.run(prompt(number))["requests"][0]["first"])
            loaded = ours.run()["counts"]["loaded_tokens"]
    if loaded < sizes.hits * sizes.prefix:
        raise RuntimeError(f"{loaded} tokens were loaded")
    mine, others, local = (hits[engine][1:] for engine in (ours, other, stock))
    what = f"prefix of {sizes.prefix} tokens and 10 more, in a second engine"
    return [
        ratio("vllm_ttft_prefix_hit_vs_recompute_4k", mine, new["stock"], f"stock vLLM that computes the prompt; {what}"),
        row("vllm_ttft_over_local_hit_ms_4k", (statistics.median(mine) - statistics.median(local)) * 1000,
            f"a hit in the prefix cache of a running stock vLLM, {statistics.median(local) * 1000:.1f} ms; {what}", len(mine)),
        ratio("vllm_ttft_prefix_hit_vs_example_connector", mine, others, f"vLLM's ExampleConnector on tmpfs; {what}"),
        row("vllm_ttft_prefix_hit_vs_lmcache", None, f"not run: {LMCACHE}"),
        ratio("vllm_prefill_slowdown_by_ingest", new["ours"], new["stock"], f"stock vLLM; first token of new prompts of {sizes.prefix + 10} tokens"),
    ]


def decode(sizes):
    contexts = [tokens(sizes.context, 41), tokens(sizes.context, 42)]

    def rounds(made, requests):
        """Times between tokens by engine; all go on with the same requests, in turns."""
        found = {engine: [] for engine in made}
        for engine in made:
            engine.run([{"ids": ids + [7], "tokens": 6 + sizes.rounds * sizes.passes} for ids in requests], passes=6)
        for number in range(sizes.rounds):
            for engine in made if number % 2 else made[::-1]:
                answer = engine.run(passes=sizes.passes)
                found[engine] += answer["requests"][0]["between"][1 - sizes.passes:]
        for engine in made:
            engine.run()
        return found

    with sidecar() as endpoint, engines.running(
            smollm2(None), smollm2(settings(endpoint)), smollm2(settings(endpoint, **SELECTING))) as (stock, exact, select):
        alone = rounds([stock, exact, select], contexts[:1])
        both = rounds([stock, select], contexts)
        counts = [engine.run()["counts"] for engine in (exact, select)]
    if any(each["failed_calls"] or not each["steps"] for each in counts):
        raise RuntimeError(f"not decoded by steps alone: {counts}")
    what = f"stock vLLM, a token behind {sizes.context}"
    return [ratio("vllm_decode_over_stock_exact_7k", alone[exact], alone[stock], what),
            ratio("vllm_decode_over_stock_r10_7k", alone[select], alone[stock], f"{what}; {METHOD}"),
            ratio("vllm_decode_over_stock_r10_7k_batch2", both[select], both[stock], f"{what} each, a batch of two; {METHOD}")]


def held(sizes):
    with sidecar() as endpoint, engines.running(smollm2(settings(endpoint))) as (engine,), pqcached.Client(endpoint, timeout_ms=20000) as client:
        def used():
            engine.run([{"ids": tokens(20, 50), "tokens": 1}])  # a pass, with which the worker learns that the last request has ended
            engine.run([{"ids": tokens(20, 51), "tokens": 1}])
            return int(client.admin("Stats")["pool_used_bytes"])

        before = used()
        engine.run([{"ids": tokens(1024, 52), "tokens": 1}])
        after = used()
    return [row("vllm_held_over_row_bytes_1k", (after - before) / (1024 * ROW_BYTES), "bytes of the pool that a stored prompt of 1,024 tokens takes, over "
                "those of its rows", 1)]


def batch(sizes):
    shared = tokens(sizes.shared, 61)
    requests = [{"ids": shared + tokens(40, 100 + number), "tokens": sizes.batch_tokens} for number in range(16)]
    with sidecar() as endpoint, engines.running(smollm2(None), smollm2(settings(endpoint, **SELECTING))) as (stock, ours):
        found = {}
        for engine in (stock, ours):
            engine.run([{"ids": shared + [5], "tokens": 1}])
            between = [each["between"] for each in engine.run(requests)["requests"]]
            found[engine] = [seconds for each in between for seconds in each]
    p99 = {engine: statistics.quantiles(each, n=100)[98] for engine, each in found.items()}
    rate = {engine: 16 * len(each) / sum(each) for engine, each in found.items()}
    what = f"stock vLLM; 16 requests that share {sizes.shared} tokens, {sizes.batch_tokens} new tokens each; {METHOD}"
    return [row("vllm_16_requests_8k_vs_stock", rate[ours] / rate[stock], f"{what}; {rate[ours]:.1f} tokens/s against {rate[stock]:.1f}", len(found[ours])),
            row("vllm_16_requests_8k_p99_between_tokens_ms", p99[ours] * 1000, f"{what}: {p99[stock] * 1000:.0f} ms", len(found[ours]))]


def measure(parts, is_short):
    found = []
    for part in parts:
        if INSTALLED:
            found += globals()[part](Sizes(is_short))
        else:
            found += [row(name, None, "not run: vLLM is not installed: tests/vllm/environment.py") for name in PARTS[part]]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    results = measure(options.only, options.short)
    options.json.write_text(json.dumps(results, indent=1))
    for each in results:
        print(each["name"], each["value"], each["unit"], "goal", each["goal"])
