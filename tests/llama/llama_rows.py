#!/usr/bin/env python3
"""Figures of the llama.cpp plug-in: decoding at the end of long contexts, beside plain llama.cpp.

llama_rows.py BUILD --json FILE [--short] [--only NAME...]   --short leaves out 128K tokens, and all but the steps

NAME: steps, memory, perplexity, first-token, server or kills. The others than steps have modules of their own in figures/.

The model has two layers of the shape of Llama-3-8B (q4_0) with random weights, and keys and values of the context are random. Plain
llama.cpp is measured with flash attention on and off, and the faster one counts; its default is on. All run in turns on the same two
threads. A selection is measured once its index is ready; the sidecar has one thread for builds.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "figures"), str(HERE), str(HERE.parent)]

import engine  # noqa: E402
import gguf_model  # noqa: E402
from first_token import first_token_rows  # noqa: E402
from kills_rows import kills_rows  # noqa: E402
from memory import memory_rows  # noqa: E402
from perplexity import perplexity_rows  # noqa: E402
from rows import row  # noqa: E402
from server_slots import server_rows  # noqa: E402

MODEL = "--layers 2 --width 4096 --heads 32 --kv-heads 8 --head-dim 128 --hidden 14336 --vocabulary 512 --type q4_0".split()
THREADS = 2
ROUNDS = 3
COUNTED = 20  # last steps of a run
# With ratio, the other tokens are estimated unless tail is 0.
SELECTIONS = {"s10": "ratio=0.1", "s10_no_tail": "ratio=0.1,tail=0", "k1024": "k=1024"}
WAIT = re.compile(r"selected tokens in (\d+); the longest wait was ([\d.]+) ms(?:; estimated the rest in (\d+))?")


class Measurement:
    def __init__(self, build, folder):
        self.version = engine.TESTED[0]
        engine.build(self.version)
        self.program = engine.compile_program(self.version, "decode_speed", folder)
        self.plugin = build / "client/libggml-pqcached.so"
        self.daemon = build / "service/pqcached"
        self.folder = pathlib.Path(folder)
        self.model = self.folder / "model.gguf"
        gguf_model.random_model(self.model, gguf_model.arguments([str(self.model), *MODEL]))

    def run(self, tokens, steps, flash, settings=None, with_plugin=False, pause=()):
        """Milliseconds per token: the median of the last steps; what the program printed, and what the plug-in did."""
        ended = subprocess.run(
            [self.program, self.model, str(tokens), str(THREADS), str(steps), flash, *map(str, pause)], cwd=engine.binaries(self.version),
            env=engine.environment(self.plugin if with_plugin or settings else None, settings), capture_output=True, text=True, check=True)
        times = [float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("step_ms")]
        return statistics.median(times[-COUNTED:]), ended.stdout, ended.stderr

    def selecting(self, tokens, words):
        """Likewise with a sidecar, and the longest wait of a node in milliseconds."""
        socket = self.folder / "s"
        with subprocess.Popen([self.daemon, "--listen", f"unix://{socket}", "--threads", "1"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) as daemon:
            try:
                while "event=ready" not in daemon.stdout.readline():
                    pass
                time, _, messages = self.run(tokens, 4 * COUNTED, "auto", f"{words},endpoint=unix://{socket}", pause=[10 + tokens // 4096])
            finally:
                daemon.terminate()
        nodes, wait, estimated = WAIT.search(messages).groups()
        if int(nodes) < 4 * COUNTED:  # of twice as many
            raise RuntimeError(f"the index was not ready in time: {messages}")
        if estimated is not None and int(estimated) < 4 * COUNTED:
            raise RuntimeError(f"the clusters were not ready in time: {messages}")
        return time, float(wait)


def rows(measured, sizes):
    found = []
    ratios = {}
    waits = []

    def add(name, value):
        ratios.setdefault(name, []).append(value)

    for _ in range(ROUNDS):
        for label, tokens in sizes:
            plain = min(measured.run(tokens, 8, flash)[0] for flash in ("off", "on"))
            add(f"llama_exact_over_plain_{label}", plain / measured.run(tokens, COUNTED, "auto", "exact")[0])
            add(f"llama_exact_over_plain_{label}_avx2", plain / measured.run(tokens, COUNTED, "auto", "exact,kernel_level=avx2")[0])
            for name, words in SELECTIONS.items():
                time, wait = measured.selecting(tokens, words)
                add(f"llama_{name}_over_plain_{label}", plain / time)
                waits.append(wait)
        short = measured.run(256, 40, "auto")[0]
        add("llama_small_context_overhead", measured.run(256, 40, "auto", with_plugin=True)[0] / short)
    goals = {"llama_exact_over_plain_32k": 1.6, "llama_exact_over_plain_128k": 2.2, "llama_exact_over_plain_32k_avx2": 1.6,
             "llama_exact_over_plain_128k_avx2": 2.2, "llama_s10_over_plain_128k": 5, "llama_k1024_over_plain_128k": 9}
    faster = "plain llama.cpp, the faster of flash attention on and off, 2 threads"
    for name, values in ratios.items():
        if name == "llama_small_context_overhead":
            found.append(row(name, statistics.median(values), 1.02, "plain llama.cpp at 256 tokens", "ratio", "lower", values))
        else:
            selection = next((words for each, words in SELECTIONS.items() if name.startswith(f"llama_{each}_over")), None)
            index = "" if selection is None else f"; index pq m=4 b=8, {selection}"
            limit = "; our code limited to AVX2" if name.endswith("_avx2") else ""
            found.append(row(name, statistics.median(values), goals.get(name), faster + index + limit, ratios=values))
    found.append(row("llama_longest_wait_ms", max(waits), 5, "the longest time that a node waited for the client, with a healthy sidecar",
                     "ms", "lower"))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("steps", "memory", "perplexity", "first-token", "server", "kills"))
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    sizes = [("32k", 32 << 10)] + ([] if arguments.short else [("128k", 128 << 10)])
    with tempfile.TemporaryDirectory() as holder:
        measurements = {"steps": lambda: rows(Measurement(build, holder), sizes),
                        "memory": lambda: memory_rows(Measurement(build, holder), sizes),
                        "perplexity": lambda: perplexity_rows(build, holder),
                        "first-token": lambda: first_token_rows(build, holder), "server": lambda: server_rows(build, holder),
                        "kills": lambda: kills_rows(build)}
        names = arguments.only or (["steps"] if arguments.short else measurements)
        results = [each for name in names for each in measurements[name]()]
    arguments.json.write_text(json.dumps(results, indent=1))
    for each in results:
        print(each["name"], each["value"], each["unit"], "goal", each["goal"])
