#!/usr/bin/env python3
"""Figures of pqcached.transformers: SmolLM2 in Transformers with our cache, beside its own cache with SDPA.

hf_rows.py BUILD --json FILE [--short] [--only NAME...]
    --short: contexts of 500 tokens in place of 7,040, and few tokens; its figures are for tests only. --only: some of the parts
    logits, resources, answers, calls, long.

Rows are stored in float32. torch and the client have one thread each while decoding is timed, and both take turns, token by token.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import models  # first
import trained
from models import Index, Selection, hf, one_by_one, pqcached, select, tokens, torch_bytes

from daemon import BUILD, children  # noqa: E402

if models.is_installed():
    import torch
    import transformers
    from transformers import DynamicCache

SINK, WINDOW, RATIO, INDEX = 16, 64, 0.1, (4, 8)
BETTER = {"rerank_factor": 2.0, "tail_estimate": True}
ALONE = "index pq m=4 b=8, rotary pairs together, a tenth of the tokens with sink 16 and window 64"
METHOD = ALONE + ", re-ranking by 2 and tail estimate"
STOCK = "SmolLM2 in Transformers with DynamicCache and SDPA, 1 thread each"


class Sizes:
    """Tokens of each measurement."""

    def __init__(self, is_short):
        self.context = 500 if is_short else 7040  # a multiple of 128 is shared as a whole
        self.perplexity = 32 if is_short else 512
        self.timed = 6 if is_short else 48
        self.grown = 64 if is_short else 4096
        self.logits = 300 if is_short else 2048
        self.lines = 1 if is_short else None


def row(name, value, goal, against, unit, better="lower", samples=None, spread=None):
    return {"area": "transformers", "name": name, "value": None if value is None else float(f"{value:.4g}"), "unit": unit, "better": better,
            "goal": goal, "against": against, "samples": samples, "spread": spread}


def absent(names, reason):
    goals = {name: (goal, unit, better) for name, goal, unit, better in ROWS}
    return [row(name, None, goals[name][0], f"not run: {reason}", *goals[name][1:]) for name in names]


ROWS = (
    ("hf_logit_max_abs_error_ratio1", 1e-4, "logit", "lower"),
    ("hf_cache_bytes_growth", 0, "bytes", "lower"),
    ("hf_rpcs_per_token", 0, "count", "lower"),
    ("hf_answers_rope_equal_ratio1", 1, "share", "higher"),
    ("hf_python_us_per_layer", 50, "us", "lower"),
    ("hf_decode_over_stock_7k_exact", 1, "x", "lower"),
    ("hf_decode_over_stock_7k_r10", 0.5, "x", "lower"),
    ("hf_decode_over_stock_7k_r10_codes_alone", None, "x", "lower"),
    ("hf_first_token_extra_ms_7k", 200, "ms", "lower"),
    ("hf_ppl_ratio_r10", 1.01, "ratio", "lower"),
    ("hf_ppl_ratio_r10_codes_alone", None, "ratio", "lower"),
)
PARTS = {
    "resources": ("hf_cache_bytes_growth", "hf_rpcs_per_token"),
    "answers": ("hf_answers_rope_equal_ratio1",),
    "calls": ("hf_python_us_per_layer",),
    "logits": ("hf_logit_max_abs_error_ratio1",),
    "long": ("hf_decode_over_stock_7k_exact", "hf_decode_over_stock_7k_r10", "hf_decode_over_stock_7k_r10_codes_alone",
             "hf_first_token_extra_ms_7k", "hf_ppl_ratio_r10", "hf_ppl_ratio_r10_codes_alone"),
}
NEED_SMOLLM2 = ("logits", "long")


def made(name, value, against, **more):
    goal, unit, better = next(each[1:] for each in ROWS if each[0] == name)
    return row(name, value, goal, against, unit, better, **more)


def forward(model, cache, ids):
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()


# ---- Parts


def resources(client, sizes):
    model = models.with_implementation(models.llama(), hf.NAME)
    with hf.PqcCache(client, model.config, selection=select(ratio=0.2), index=Index.pq(4, 8), index_tokens=64,
                     wait_for_index=True) as cache:
        forward(model, cache, tokens(1, 500))
        for ids in one_by_one(tokens(1, 4)):
            forward(model, cache, ids)
        bytes_before, before = torch_bytes(cache), client.counts().rpcs
        for ids in one_by_one(tokens(1, sizes.grown)):
            forward(model, cache, ids)
        rpcs = client.counts().rpcs - before
        growth = torch_bytes(cache) - bytes_before
    what = f"{sizes.grown} tokens of a random Llama of 3 layers, a fifth of the tokens selected"
    return [made("hf_cache_bytes_growth", growth, f"bytes of torch that the cache holds, over {what}", samples=1),
            made("hf_rpcs_per_token", rpcs / sizes.grown, f"RPCs that a call waits for, over {what}", samples=1)]


def answers(client, sizes):
    model, right, count = models.with_implementation(trained.tiny_rope(), hf.NAME), 0, 0
    for task in ("niah", "kv", "mq", "var"):
        for context, asked in trained.questions(task, 1024, sizes.lines):
            with hf.PqcCache(client, model.config, selection=select()) as cache:
                forward(model, cache, torch.tensor([context]))
                for segments, outputs in asked:
                    right += trained.answer(model, cache, segments, [len(each) for each in outputs]) == outputs
                    count += 1
    return [made("hf_answers_rope_equal_ratio1", right / count,
                 "questions of four tasks about 1,024 tokens that the rotary test model answers as its reference does, token for token",
                 samples=count)]


class TimedLibrary:
    """The client library, with the time that the calls of steps take."""

    STEP_CALLS = ("pqc_step_begin", "pqc_step_decode", "pqc_step_end_with")

    def __init__(self, library):
        self._library, self.seconds = library, 0.0

    def __getattr__(self, name):
        call = getattr(self._library, name)
        if name not in self.STEP_CALLS:
            return call

        def timed(*arguments):
            begin = time.perf_counter()
            status = call(*arguments)
            self.seconds += time.perf_counter() - begin
            return status

        setattr(self, name, timed)
        return timed


def calls(client, sizes):
    """Time of update() and of the attention function for decoded tokens, less that of the library's calls, with the shape of SmolLM2."""
    config = transformers.LlamaConfig(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576)
    config._attn_implementation = hf.NAME
    module, times = torch.nn.Module(), []
    module.num_key_value_groups = 3
    client._library = library = TimedLibrary(client._library)

    def run(cache, rows):
        cache.expect_pass(1, rows[0][0].shape[2], None)
        for layer, (query, key, value) in enumerate(rows):
            key, value = cache.update(key, value, layer)
            hf.attention_forward(module, query, key, value, None, scaling=0.125)

    def rows_of(count):
        return [tuple(torch.randn(1, heads, count, 64) for heads in (9, 3, 3)) for _ in range(30)]

    with hf.PqcCache(client, config, selection=select(SINK, WINDOW, ratio=RATIO), index=Index.pq(*INDEX), wait_for_index=True) as cache:
        run(cache, rows_of(600))
        rows = rows_of(1)
        for _ in range(20 + 4 * sizes.timed):
            library.seconds, begin = 0.0, time.perf_counter()
            run(cache, rows)
            times.append((time.perf_counter() - begin - library.seconds) / len(rows) * 1e6)
    times = sorted(times[20:])
    return [made("hf_python_us_per_layer", statistics.median(times), "Python and torch of a decoded token, by layer, without the calls of the "
                 "C library; SmolLM2's shape, batch 1", samples=len(times), spread=round(times[len(times) * 3 // 4] - times[len(times) // 4], 2))]


def logits(client, sizes):
    stock, tokenizer = trained.load(trained.SMOLLM2)
    ours, stock = models.with_implementation(stock, hf.NAME), models.with_implementation(stock, "sdpa")
    ids = trained.text_tokens(tokenizer, sizes.logits + 200)
    chunks = [ids[:, :sizes.logits], *one_by_one(ids[:, sizes.logits:sizes.logits + 64]), ids[:, sizes.logits + 64:sizes.logits + 190],
              ids[:, sizes.logits + 190:sizes.logits + 195]]
    largest, theirs = 0.0, DynamicCache(config=stock.config)
    with hf.PqcCache(client, ours.config, selection=select(SINK, WINDOW)) as cache:
        for chunk in chunks:
            largest = max(largest, float((forward(ours, cache, chunk) - forward(stock, theirs, chunk)).abs().max()))
    return [made("hf_logit_max_abs_error_ratio1", largest,
                 f"SDPA in float32: SmolLM2, a prompt of {sizes.logits} tokens, 64 tokens, a second turn of 126 and a block of 5", samples=67)]


class Long:
    """A long context of SmolLM2, prefilled once by our implementation; other caches get it from the sidecar."""

    def __init__(self, client, sizes):
        self.client, self.sizes = client, sizes
        model, tokenizer = trained.load(trained.SMOLLM2)
        self.ours, self.stock = models.with_implementation(model, hf.NAME), models.with_implementation(model, "sdpa")
        end = sizes.context + max(sizes.perplexity, sizes.timed + 1)
        self.ids = trained.text_tokens(tokenizer, end + 1)
        self.context = self.ids[:, :sizes.context]

    def cache(self, **named):
        return hf.PqcCache(self.client, self.ours.config, model_fingerprint="SmolLM2 in float32", dtype=torch.float32, **named)

    def selecting(self, **named):
        selection = Selection(ratio=RATIO, sink_tokens=SINK, window_tokens=WINDOW, **BETTER)
        return self.cache(selection=selection, index=Index.pq(*INDEX), index_tokens=128, **named)

    def stock_cache(self, cache):
        """The engine's own cache with the rows that the sidecar has."""
        count, made_cache = cache.length, DynamicCache(config=self.stock.config)
        sequence = cache.sequences[0]
        sequence.flush()
        for layer in range(len(cache.layers)):
            rows = [torch.empty(count, 3, 64) for _ in range(2)]
            sequence.load((0, count), {layer: tuple(rows)})
            made_cache.update(*(each.transpose(0, 1).unsqueeze(0).contiguous() for each in rows), layer)
        return made_cache

    @staticmethod
    def seconds(model, cache, token):
        begin = time.perf_counter()
        forward(model, cache, token)
        return time.perf_counter() - begin

    def rows(self):
        torch.set_num_threads(os.cpu_count() or 1)
        first = self.selecting()
        first.begin(self.context)
        forward(self.ours, first, self.context)
        torch.set_num_threads(1)
        follow = one_by_one(self.ids[:, self.sizes.context:])
        first_token = self.seconds(self.ours, first, follow[0])
        first.crop(-1)
        stock = self.stock_cache(first)
        exact = self.cache(selection=Selection(ratio=1.0, sink_tokens=SINK, window_tokens=WINDOW))
        exact.begin(torch.cat([self.context, follow[0]], 1))
        if exact.length != self.sizes.context // 128 * 128:
            raise RuntimeError(f"the sidecar has {exact.length} tokens of the context")
        if exact.length < self.sizes.context:
            forward(self.ours, exact, self.context[:, exact.length:])
        first.rows[0].complete_indexes(first.indexes, SINK)
        alone = first.fork()
        alone.step_selection = dataclasses.replace(first.step_selection, rerank_factor=1.0, tail_estimate=False)
        found = self.timings(follow, {"stock": (self.stock, stock), "exact": (self.ours, exact), "r10": (self.ours, first),
                                      "r10_codes_alone": (self.ours, alone)})
        extra = (first_token - statistics.median(found["stock"])) * 1000
        timed = [self.ratio(f"hf_decode_over_stock_7k_{name}", found, name) for name in ("exact", "r10", "r10_codes_alone")]
        timed.append(made("hf_first_token_extra_ms_7k", extra, f"the first token after the prefill over a median token of {STOCK}; {METHOD}, "
                          "indexed in the background", samples=1))
        return [*timed, *self.perplexities(stock, follow, {"hf_ppl_ratio_r10": first, "hf_ppl_ratio_r10_codes_alone": alone})]

    def timings(self, follow, contenders):
        times = {name: [] for name in contenders}
        for place in range(self.sizes.timed):
            for name in sorted(contenders, key=lambda each: (hash(each) + place) % 7):  # no fixed order
                times[name].append(self.seconds(*contenders[name], follow[place]))
        for _, cache in contenders.values():
            cache.crop(-self.sizes.timed)
        return {name: each[self.sizes.timed // 6:] for name, each in times.items()}

    def ratio(self, row_name, found, name):
        ratios = sorted(own / other for own, other in zip(found[name], found["stock"]))
        quarter = len(ratios) // 4
        milliseconds = f"{statistics.median(found[name]) * 1000:.0f} ms a token against {statistics.median(found['stock']) * 1000:.0f}"
        return made(row_name, statistics.median(ratios), f"{STOCK}, {self.sizes.context} tokens; {milliseconds}"
                    + {"r10": f"; {METHOD}", "r10_codes_alone": f"; {ALONE}"}.get(name, ""), samples=len(ratios), spread=round(ratios[-1 - quarter] - ratios[quarter], 3))

    def perplexities(self, stock, follow, selecting):
        count = self.sizes.perplexity
        targets = self.ids[0, self.sizes.context + 1:self.sizes.context + count]
        ids = self.ids[:, self.sizes.context:self.sizes.context + count - 1]
        full = self.stock(ids, past_key_values=stock, use_cache=True).logits[0].float().log_softmax(-1)
        own = {name: torch.cat([forward(self.ours, cache, each) for each in follow[:count - 1]]).log_softmax(-1)
               for name, cache in selecting.items()}
        return [self.perplexity(name, full, each, targets) for name, each in own.items()]

    def perplexity(self, name, full, own, targets):
        chosen = [each[torch.arange(len(targets)), targets] for each in (full, own)]
        difference = chosen[0] - chosen[1]
        value, error = math.exp(float(difference.mean())), 1.96 * float(difference.std()) / math.sqrt(len(targets))
        return made(name, value, f"full attention, perplexity {math.exp(-float(chosen[0].mean())):.3f}: {len(targets)} tokens of the project's "
                    f"documents one by one behind {self.sizes.context}; {ALONE if name.endswith('alone') else METHOD}",
                    samples=len(targets), spread=round(error, 4))


def long(client, sizes):
    return Long(client, sizes).rows()


@contextlib.contextmanager
def sidecar():
    """A client of a sidecar with the options that are the default."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix://{folder}/s"
        with subprocess.Popen([BUILD / "service/pqcached", "--listen", endpoint], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              preexec_fn=children.end_with_parent) as daemon:
            try:
                while "event=ready" not in daemon.stdout.readline():
                    pass
                with pqcached.Client(endpoint, timeout_ms=60000, thread_count=1) as client:
                    yield client
            finally:
                daemon.terminate()


def measure(parts, is_short):
    if not models.is_installed():
        return [each for part in parts for each in absent(PARTS[part], "torch and transformers are not installed")]
    hf.register()
    found = []
    for part in parts:
        if part in NEED_SMOLLM2 and not trained.SMOLLM2.exists():
            found += absent(PARTS[part], "SmolLM2 is not fetched: tests/quality/pretrained.py --model")
            continue
        with sidecar() as client:
            found += globals()[part](client, Sizes(is_short))
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
