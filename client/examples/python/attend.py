"""The smallest engine in Python: stores one layer's keys and values in a running pqcached, and
attends to a tenth of them. Usage: attend.py ENDPOINT, for example
unix:///run/pqcached/pqcached.sock.
"""

import sys

import numpy as np
import pqcached

TOKENS, SINK, WINDOW = 4096, 16, 64
HEADS, QUERY_HEADS, DIM = 2, 8, 64


def numbers(*shape, frequency):
    i = np.arange(np.prod(shape))
    return np.sin(np.float32(frequency) * (i * i % 9973).astype(np.float32)).reshape(shape)


def attend_own(keys, values, queries):
    """Returns output and log-sum-exp of the engine's own part: one query over sink and window."""
    own = np.r_[0:SINK, TOKENS - WINDOW:TOKENS]
    logits = np.einsum("hgd,thd->hgt", queries.reshape(HEADS, -1, DIM), keys[own]) / np.sqrt(DIM)
    lse = np.logaddexp.reduce(logits, axis=2)
    output = np.einsum("hgt,thd->hgd", np.exp(logits - lse[..., None]), values[own])
    return output.reshape(QUERY_HEADS, DIM).astype(np.float32), lse.reshape(QUERY_HEADS).astype(np.float32)


def main(endpoint):
    keys, values = numbers(TOKENS, HEADS, DIM, frequency=1.0), numbers(TOKENS, HEADS, DIM, frequency=0.3)
    queries = numbers(QUERY_HEADS, DIM, frequency=0.7)
    layers = pqcached.LayerGroup([0], kv_heads=HEADS, query_heads=QUERY_HEADS, key_dim=DIM, value_dim=DIM)
    with pqcached.Client(endpoint) as client:
        cache = client.open_cache("demo", model_fingerprint="demo-1", groups=[layers], capacity_bytes=64 << 20)
        with cache.create_sequence() as sequence:
            sequence.ingest(0, 0, keys, values)  # [tokens, heads, dim]: numpy, torch or DLPack
            sequence.build_index(sink_tokens=SINK)
            attention = sequence.attend(0, TOKENS - 1, queries, pqcached.Selection(
                ratio=0.1, sink_tokens=SINK, window_tokens=WINDOW))
            attention.merge(*attend_own(keys, values, queries))  # the part of sink and window
    print(f"attended {SINK} sink + {WINDOW} window + {attention.selected.count} selected of {TOKENS} tokens; "
          f"output[0] = {attention.output[0, 0]:.4f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} ENDPOINT")
    main(sys.argv[1])
