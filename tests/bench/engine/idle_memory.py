#!/usr/bin/env python3
"""Memory of a daemon's pool 10 s after its last large sequence was dropped.

idle_memory.py BUILD --json FILE [--bytes N]: N bytes of rows (4 GiB) are stored in one sequence and a sixteenth of that in another,
and the first is dropped. 10 s later the pages of the pool are counted as the kernel counts them, and the rows of the other sequence
are compared.

Row: rss_over_allowed_idle = pages of the pool / (1.2 * bytes in use + idle_reserve_bytes, which is the default of 256 MiB).
"""

import argparse
import json
import os
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

RESERVE_BYTES = 256 << 20
SPARE = 1.2  # bytes that may be present per byte in use
WAIT_SECONDS = 10
HEADS, DIM = 8, 128
TOKEN_BYTES = 2 * HEADS * DIM * 2
CHUNK_TOKENS = 8192


def pool_bytes(daemon):
    """Bytes of all pages of the pools that the daemon's worker has."""
    worker = pathlib.Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()[0]
    files = {}
    for descriptor in pathlib.Path(f"/proc/{worker}/fd").iterdir():
        if "pool" in os.readlink(descriptor):
            status = os.stat(descriptor)
            files[status.st_ino] = status.st_blocks * 512
    if not files:
        raise RuntimeError("the worker has no pool")
    return sum(files.values())


def fill(cache, keys, values, size_bytes):
    sequence = cache.create_sequence()
    for first in range(0, size_bytes // TOKEN_BYTES, CHUNK_TOKENS):
        sequence.ingest(0, first, keys, values)
    return sequence


def measure(cache, daemon, size_bytes):
    random = np.random.default_rng(1)
    keys, values = (random.standard_normal((CHUNK_TOKENS, HEADS, DIM), np.float32).astype(np.float16) for _ in "kv")
    kept = fill(cache, keys, values, size_bytes // 16)
    dropped = fill(cache, keys, values, size_bytes)
    before = pool_bytes(daemon)
    if before < size_bytes:
        raise RuntimeError(f"{before} bytes are present, fewer than were stored")
    dropped.drop()
    time.sleep(WAIT_SECONDS)
    used, present = kept.describe().used_bytes, pool_bytes(daemon)
    ratio = present / (SPARE * used + RESERVE_BYTES)
    print(f"{before >> 20} MiB present before the drop, {present >> 20} MiB {WAIT_SECONDS} s later, {used >> 20} MiB in use: "
          f"{ratio:.3f} of what is allowed", flush=True)
    for first in range(0, kept.describe().token_count, CHUNK_TOKENS):
        stored = [np.empty((CHUNK_TOKENS, HEADS, DIM), np.float16) for _ in "kv"]
        kept.load((first, first + CHUNK_TOKENS), {0: (stored[0], stored[1])})
        if not all(np.array_equal(have, want) for have, want in zip(stored, (keys, values))):
            raise RuntimeError("rows in use have changed")
    return ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--bytes", type=int, default=4 << 30, help="of the rows that are dropped")
    arguments = parser.parse_args()
    group = pqcached.LayerGroup([0], HEADS, HEADS, DIM, DIM)
    capacity = 2 * arguments.bytes
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix://{folder}/s"
        command = [arguments.build.resolve() / "service/pqcached", "--listen", endpoint, "--max-pool-bytes", str(capacity)]
        with child(command, "event=ready", folder, "sidecar", children.end_with_parent) as daemon, \
                pqcached.Client(endpoint, timeout_ms=60000) as client:
            cache = client.open_cache("idle", model_fingerprint="idle", groups=[group], capacity_bytes=capacity)
            ratio = measure(cache, daemon.pid, arguments.bytes)
    arguments.json.write_text(json.dumps([{
        "area": "engine", "name": "rss_over_allowed_idle", "value": ratio, "unit": "ratio", "better": "lower", "goal": 1,
        "against": f"1.2 x bytes in use + 256 MiB, {WAIT_SECONDS} s after a drop of {arguments.bytes >> 20} MiB of rows", "samples": 1,
        "spread": None}], indent=1) + "\n")


if __name__ == "__main__":
    main()
