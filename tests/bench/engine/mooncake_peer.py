#!/usr/bin/env python3
"""Rows that are stored and loaded by pqcached, and pages that are put and got, beside objects of Mooncake's store, on one machine.

mooncake_peer.py BUILD --json FILE [--scale S]: both from Python in one process, in turns; the owner of Mooncake's memory is
another process, as pqcached's sidecar is, and its transfers go by TCP over the loopback. An object is the keys and values of some
tokens of one layer (8 kv heads, dims 128, bf16): 64 MiB are 16384 tokens, 1 MiB 256, 128 KiB 32. As pages, an object is the bytes
alone, in pages of at most 16 MiB. The package of Mooncake
(mooncake-transfer-engine-non-cuda) is installed into a virtual environment in BUILD; where that fails, the rows say why they are
missing.
"""

import argparse
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGES = ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"]
HEADS, DIM = 8, 128
TOKEN_BYTES = 2 * HEADS * DIM * 2
SIZES = {"64m": (64 << 20, 6), "1m": (1 << 20, 40), "128k": (128 << 10, 100)}  # bytes, rounds
GOALS = {"64m": 4, "1m": 2, "128k": 1.5}
SEGMENT_BYTES = 1 << 30
PAGE_BYTES = 16 << 20
STORES = {"": "ingest load", "remote_": "ingest load", "page_": "put get", "remote_page_": "put get"}  # by prefix, names of put and get


def row(name, goal, against, ratios=None):
    if not ratios:
        return {"area": "engine", "name": name, "value": None, "unit": "ratio", "better": "higher", "goal": goal,
                "against": f"not run: {against}", "samples": None, "spread": None}
    quarters = statistics.quantiles(ratios, n=4)
    return {"area": "engine", "name": name, "value": statistics.median(ratios), "unit": "ratio", "better": "higher", "goal": goal,
            "against": against, "samples": len(ratios), "spread": quarters[2] - quarters[0]}


def names():
    """Names and goals of all rows."""
    for size in SIZES:
        for prefix, calls in STORES.items():
            put, get = calls.split()
            goal = GOALS[size] if not prefix else 1
            yield f"{prefix}{put}_vs_mooncake_put_{size}", goal
            yield f"{prefix}{get}_vs_mooncake_get_{size}", goal


def installed(folder):
    """The Python of an environment with Mooncake, or why there is none."""
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    done = subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None, "pip cannot install mooncake-transfer-engine-non-cuda"
    done = subprocess.run([python, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    return (python, None) if done.returncode == 0 else (None, done.stderr.strip().splitlines()[-1])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def child(command, ready, folder, name, end_with_parent):
    """A process that lives as long as the context; entered when a line of its output has `ready`."""
    log = pathlib.Path(folder) / name
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                                   preexec_fn=end_with_parent)
    try:
        deadline = time.monotonic() + 60
        while ready not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print("owner", store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2]), flush=True)
sys.stdin.read()
"""


class Mooncake:
    """A client of the store, with one buffer for puts and one for gets."""

    def __init__(self, master, source, target):
        from mooncake.store import MooncakeDistributedStore
        self.store = MooncakeDistributedStore()
        self.source, self.target, self.objects = source, target, 0
        self.expect(self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "", master), 0)
        for array in (source, target):
            self.expect(self.store.register_buffer(array.ctypes.data, array.nbytes), 0)

    @staticmethod
    def expect(result, wanted):
        if result != wanted:
            raise RuntimeError(f"Mooncake's store answers {result} in place of {wanted}")

    def put(self, size):
        self.objects += 1
        self.expect(self.store.put_from(f"object-{self.objects}", self.source.ctypes.data, size), 0)

    def get(self, size):
        self.expect(self.store.get_into(f"object-{self.objects}", self.target.ctypes.data, size), size)


class Ours:
    """A sequence of one client; objects follow each other in it."""

    def __init__(self, pqcached, endpoint, path, source, target, capacity):
        group = pqcached.LayerGroup([0], HEADS, 4 * HEADS, DIM, DIM, pqcached.DType.BF16)
        self.client = pqcached.Client(endpoint, path=path, timeout_ms=60000)
        self.cache = self.client.open_cache(f"peer-{path.name}", model_fingerprint="peer", groups=[group], capacity_bytes=capacity)
        self.sequence = self.cache.create_sequence()
        self.bf16, self.tensor, self.source, self.target, self.end = pqcached.DType.BF16, pqcached.Tensor, source, target, 0

    def halves(self, array, size):
        tokens = size // TOKEN_BYTES
        both = array[:size].view("uint16").reshape(2, tokens, HEADS, DIM)
        return self.tensor(both[0], self.bf16), self.tensor(both[1], self.bf16)

    def put(self, size):
        self.sequence.ingest(0, self.end, *self.halves(self.source, size))
        self.end += size // TOKEN_BYTES

    def get(self, size):
        self.sequence.load((self.end - size // TOKEN_BYTES, self.end), {0: self.halves(self.target, size)})


class OurPages:
    """A page cache of one client."""

    def __init__(self, pqcached, endpoint, path, source, target, capacity):
        self.client = pqcached.Client(endpoint, path=path, timeout_ms=60000)
        self.cache = self.client.open_page_cache(f"pages-{path.name}", capacity_bytes=capacity)
        self.source, self.target, self.objects = source, target, 0

    def pages(self, array, size):
        begins = range(0, size, PAGE_BYTES)
        return [(f"object {self.objects:06}, page {begin}".encode(), array[begin:min(size, begin + PAGE_BYTES)]) for begin in begins]

    def put(self, size):
        self.objects += 1
        self.cache.put(self.pages(self.source, size))

    def get(self, size):
        self.cache.get(self.pages(self.target, size))


def seconds(call, *arguments):
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def measure(numpy, stores, target, scale):
    """By row, the ratios of all rounds. `stores`: by prefix of the rows, and Mooncake's."""
    ratios = {name: [] for name, _ in names()}
    for label, (size, rounds) in SIZES.items():
        for number in range(-1, max(1, int(rounds * scale))):
            puts, gets = {}, {}
            for prefix, store in stores.items():
                puts[prefix] = seconds(store.put, size)
                target[:size] = 0
                gets[prefix] = seconds(store.get, size)
                if not numpy.array_equal(target[:size], stores["mooncake"].source[:size]):
                    raise RuntimeError(f"{prefix or 'local'}: other bytes came back than were stored")
            if number < 0:  # warms up
                continue
            for prefix, calls in STORES.items():
                put, get = calls.split()
                ratios[f"{prefix}{put}_vs_mooncake_put_{label}"].append(puts["mooncake"] / puts[prefix])
                ratios[f"{prefix}{get}_vs_mooncake_get_{label}"].append(gets["mooncake"] / gets[prefix])
            print(label, " ".join(f"{prefix or 'local'}: put {size / puts[prefix] / 1e9:.2f} get {size / gets[prefix] / 1e9:.2f} GB/s"
                                  for prefix in stores), flush=True)
    return ratios


def compare(build, scale):
    """Runs in the environment that has Mooncake."""
    sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests")]
    import numpy
    import children
    import pqcached

    largest = max(size for size, _ in SIZES.values())
    total = sum(size * (rounds + 1) for size, rounds in SIZES.values())
    # Random bf16 numbers of about 1: neither NaN nor infinity.
    floats = numpy.random.default_rng(1).standard_normal(largest // 2, numpy.float32)
    source = (floats.view(numpy.uint32) >> 16).astype(numpy.uint16).view(numpy.uint8)
    target = numpy.zeros(largest, numpy.uint8)
    master = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        def start(command, ready, name):
            stack.enter_context(child(command, ready, folder, name, children.end_with_parent))

        start([pathlib.Path(sys.executable).parent / "mooncake_master", f"--rpc_port={master.split(':')[1]}", "--rpc_address=127.0.0.1",
               f"--metrics_port={free_port()}"], "", "master")
        time.sleep(2)
        start([sys.executable, "-c", OWNER, str(SEGMENT_BYTES), master], "owner 0", "owner")
        start([build / "service/pqcached", "--listen", f"unix://{folder}/s", "--max-pool-bytes", "6gib", "--idle-reserve-bytes", "6gib"],
              "event=ready", "sidecar")
        endpoint = f"unix://{folder}/s"
        stores = {"": Ours(pqcached, endpoint, pqcached.PathChoice.ONLY_LOCAL, source, target, 2 * total),
                  "remote_": Ours(pqcached, endpoint, pqcached.PathChoice.ONLY_REMOTE, source, target, 2 * total),
                  "page_": OurPages(pqcached, endpoint, pqcached.PathChoice.ONLY_LOCAL, source, target, total),
                  "remote_page_": OurPages(pqcached, endpoint, pqcached.PathChoice.ONLY_REMOTE, source, target, total),
                  "mooncake": Mooncake(master, source, target)}
        ratios = measure(numpy, stores, target, scale)
        stores["mooncake"].store.close()
        for prefix in STORES:
            stores[prefix].client.close()
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--scale", type=float, default=1, help="of the numbers of rounds")
    parser.add_argument("--here", action="store_true", help="this Python has Mooncake")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    if arguments.here:
        against = "Mooncake's store 0.3.13, TCP over the loopback, its owner in another process; both from Python"
        ratios = compare(build, arguments.scale)
        rows = [row(name, goal, against, ratios[name]) for name, goal in names()]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        return
    python, reason = installed(build / "peers")
    if python:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(build / "client"), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([python, __file__, build, "--json", arguments.json.resolve(), "--scale", str(arguments.scale), "--here"], check=True,
                       env=environment)
        return
    arguments.json.write_text(json.dumps([row(name, goal, reason) for name, goal in names()], indent=1) + "\n")


if __name__ == "__main__":
    main()
