#!/usr/bin/env python3
"""The first token after a real prefill of 32K tokens, with the plug-in and a sidecar beside plain llama.cpp.

first_token.py BUILD [TOKENS]   prints the rows

The model has two layers with random weights, narrower than those of an 8B model: a prefill takes minutes all the same. While it runs,
the sidecar stores the rows and builds their index.
"""

import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import engine  # noqa: E402
import gguf_model  # noqa: E402
from daemon import Daemon  # noqa: E402
from rows import row, selected  # noqa: E402

MODEL = "--layers 2 --width 1024 --heads 8 --kv-heads 2 --head-dim 128 --hidden 2816 --vocabulary 512 --type q4_0".split()
TOKENS = 32 << 10
THREADS = 2
STEPS = 4
ROUNDS = 3
TIMES = re.compile(r"(prefill|step)_ms ([\d.]+)")


def run(program, model, tokens, plugin=None, settings=None):
    """Milliseconds of the prefill and of the first step, and what the plug-in printed."""
    ended = subprocess.run([program, model, str(tokens), str(THREADS), str(STEPS), "auto", "prefill"], env=engine.environment(plugin, settings),
                           cwd=engine.binaries(engine.TESTED[0]), capture_output=True, text=True, check=True)
    times = TIMES.findall(ended.stdout)
    return float(times[0][1]), float(times[1][1]), ended.stderr


def first_token_rows(build, folder, tokens=TOKENS):
    engine.build(engine.TESTED[0])
    program = engine.compile_program(engine.TESTED[0], "decode_speed", folder)
    model = pathlib.Path(folder, "first_token.gguf")
    gguf_model.random_model(model, gguf_model.arguments([str(model), *MODEL]))
    added, ratios, waits = [], [], []
    for _ in range(ROUNDS):
        plain_prefill, plain_step, _ = run(program, model, tokens)
        with Daemon(build, pathlib.Path(folder, "f")) as daemon:
            prefill, step, messages = run(program, model, tokens, build / "client/libggml-pqcached.so",
                                          f"k=1024,min_tokens={min(4096, tokens // 2)},endpoint={daemon.endpoint}")
        added.append(step - plain_step)
        ratios.append(prefill / plain_prefill)
        waits.append(selected(messages)[2])
    size = f"{tokens >> 10}k" if tokens >= 1024 else tokens
    against = (f"plain llama.cpp: the first step after a prefill of {tokens} tokens with k=1024; 2 layers of width 1024, {THREADS} threads; the "
               f"longest wait of a node was {max(waits):.2f} ms")
    return [row(f"llama_ttft_added_ms_{size}", statistics.median(added), 20, against, "ms", "lower", added),
            row(f"llama_prefill_over_plain_{size}", statistics.median(ratios), None, "the time of that prefill in plain llama.cpp", "ratio",
                "lower", ratios)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as holder:
        for each in first_token_rows(pathlib.Path(sys.argv[1]).resolve(), holder, *map(int, sys.argv[2:])):
            print(each["name"], each["value"], each["unit"], "goal", each["goal"], each["against"])
