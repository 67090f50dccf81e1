#!/usr/bin/env python3
"""Memory of the pool over the content of one sequence: a prompt with an incremental index, and 16 decoded tokens.

content_memory.py BUILD --json FILE: prompts of 1,100, 4,200 and 33,000 tokens, whose ids the sidecar knows, ingested in pieces of 512
tokens as an engine with chunked prefill does, with layers of the shape of Llama-3-8B (8 kv heads of 128, 4 of the 32 layers).

Rows: used_over_content_1k, _4k and _32k = bytes that the sequence holds in the pool / (rows + codes and lists + codebooks), when the
sidecar has no work left on it; used_over_content_1k_open: as soon as the prompt is stored, while its prefill is open;
used_over_content_1k_unnamed: the same of a prompt whose tokens have no names.
used_over_content_1k_cached and _5k_cached: of the cached prefix of 1,024 and 4,992 tokens that is left of a sequence without an index,
whose names came with its rows.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests")]

import children  # noqa: E402
import pqcached  # noqa: E402
from mooncake_peer import child  # noqa: E402

PROMPTS = {"1k": (1100, 1.3), "4k": (4200, 1.25), "32k": (33000, 1.25)}  # tokens, goal
CACHED = {"1k": 1024, "5k": 4992}
CACHED_GOAL = 1.25
LAYERS, HEADS, QUERY_HEADS, DIM = 4, 8, 32, 128
CHUNK_TOKENS, DECODED_TOKENS = 512, 16
SETTLED_SECONDS = 2  # without a change of the bytes


def settled(sequence):
    """The description of the sequence when its memory does not change any more."""
    info, since = sequence.describe(), time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        time.sleep(0.1)
        newest = sequence.describe()
        if newest.used_bytes != info.used_bytes:
            info, since = newest, time.monotonic()
    return info


def measure(cache, tokens, named=True):
    random = np.random.default_rng(1)
    rows = random.standard_normal((tokens + DECODED_TOKENS, HEADS, DIM), np.float32).astype(np.float16)
    sequence = cache.create_sequence(token_ids=np.arange(tokens, dtype=np.uint32) if named else None, live_index=True)
    for first in range(0, tokens, CHUNK_TOKENS):
        piece = rows[first:min(first + CHUNK_TOKENS, tokens)]
        for layer in range(LAYERS):
            sequence.ingest(layer, first, piece, piece)
    begun = settled(sequence)
    for first in range(tokens, tokens + DECODED_TOKENS):
        sequence.append(first, {layer: (rows[first:first + 1],) * 2 for layer in range(LAYERS)})
    ratios = []
    for name, info in (("prefill open", begun), ("no work left", settled(sequence))):
        content = info.row_bytes + info.index_bytes + info.codebook_bytes
        ratios.append(info.used_bytes / content)
        print(f"{tokens} tokens, {name}: {info.used_bytes >> 10} KiB held, {content >> 10} KiB of content: {ratios[-1]:.3f}", flush=True)
    sequence.drop()
    return ratios


def measure_cached(client, cache, tokens):
    rows = np.random.default_rng(2).standard_normal((tokens, HEADS, DIM), np.float32).astype(np.float16)
    ids = np.arange(tokens, dtype=np.uint32) + (1 << 20)
    sequence = cache.create_sequence()
    for first in range(0, tokens, CHUNK_TOKENS):
        piece = slice(first, min(first + CHUNK_TOKENS, tokens))
        for layer in range(LAYERS):
            names = pqcached.TokenNames(first, ids[piece]) if layer == 0 else None
            sequence.ingest(layer, first, rows[piece], rows[piece], names=names)
    sequence.drop()
    held = [info for info in client.admin("ListSequences")["sequences"]
            if info.get("is_cached_prefix") and int(info["token_count"]) == tokens]
    used, content = int(held[-1]["used_bytes"]), int(held[-1]["row_bytes"])
    print(f"{tokens} tokens, cached: {used >> 10} KiB held, {content >> 10} KiB of content: {used / content:.3f}", flush=True)
    return used / content


def row(name, value, goal, against):
    return {"area": "engine", "name": name, "value": value, "unit": "ratio", "better": "lower", "goal": goal, "against": against,
            "samples": 1, "spread": None}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    group = pqcached.LayerGroup(list(range(LAYERS)), HEADS, QUERY_HEADS, DIM, DIM)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix://{folder}/s"
        command = [arguments.build.resolve() / "service/pqcached", "--listen", endpoint, "--max-pool-bytes", str(4 << 30)]
        with child(command, "event=ready", folder, "sidecar", children.end_with_parent), \
                pqcached.Client(endpoint, timeout_ms=60000) as client:
            cache = client.open_cache("content", model_fingerprint="content", groups=[group], capacity_bytes=2 << 30)
            for name, (tokens, goal) in PROMPTS.items():
                for suffix, ratio in zip(("_open", ""), measure(cache, tokens)):
                    if suffix and name != "1k":
                        continue
                    rows.append(row(f"used_over_content_{name}{suffix}", ratio, goal, f"rows, codes and codebooks of {tokens} tokens"))
            tokens, goal = PROMPTS["1k"]
            rows.append(row("used_over_content_1k_unnamed", measure(cache, tokens, named=False)[0], goal,
                            f"rows, codes and codebooks of {tokens} tokens"))
            cached = client.open_cache("cached", model_fingerprint="content", groups=[group], capacity_bytes=1 << 30)
            for name, tokens in CACHED.items():
                rows.append(row(f"used_over_content_{name}_cached", measure_cached(client, cached, tokens), CACHED_GOAL,
                                f"rows of {tokens} tokens"))
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
