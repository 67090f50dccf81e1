"""Memory of llama.cpp whose stored rows were given back, and prefills of prompts that are longer than the context."""

import contextlib
import re
import statistics
import subprocess

import engine
from rows import row

SERVED = re.compile(r"served_kib (\d+)")
GAVE_BACK = re.compile(r"gave back (\d+) KiB")
PREFILL = re.compile(r"prefill_s ([\d.]+)")
TOKEN_BYTES = 2 * 2 * 8 * 128 * 2  # layers, keys and values, kv heads, dims, f16
PROMPT = 8192
ROUNDS = 2


@contextlib.contextmanager
def sidecar(measured):
    socket = measured.folder / "memory"
    with subprocess.Popen([measured.daemon, "--listen", f"unix://{socket}", "--threads", "1"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as daemon:
        try:
            while "event=ready" not in daemon.stdout.readline():
                pass
            yield f"endpoint=unix://{socket}"
        finally:
            daemon.terminate()


def kv_share(measured, tokens):
    """The part of the KV cache that is in memory at the end of a long context."""
    with sidecar(measured) as endpoint:
        _, output, messages = measured.run(tokens, 80, "auto", f"k=1024,drop,{endpoint}", pause=[10 + tokens // 4096])
    if int(GAVE_BACK.search(messages)[1]) == 0:
        raise RuntimeError(f"no memory was given back: {messages}")
    return int(SERVED.search(output)[1]) * 1024 / (tokens * TOKEN_BYTES)


def prefill_seconds(measured, program, cells, flash, words=(), settings=None):
    ended = subprocess.run([program, measured.model, str(PROMPT), "2", str(cells), flash, *words], cwd=engine.binaries(measured.version),
                           env=engine.environment(measured.plugin if settings else None, settings), capture_output=True, text=True,
                           check=True)
    return float(PREFILL.search(ended.stdout)[1])


def offloaded_prefill(measured):
    """Seconds of a prefill in a quarter of the cells over those of plain llama.cpp, for each round."""
    program = engine.compile_program(measured.version, "application/prefill_speed", measured.folder, measured.plugin.parent)
    ratios = []
    for _ in range(ROUNDS):
        with sidecar(measured) as endpoint:
            own = prefill_seconds(measured, program, PROMPT // 4, "auto", ["offload"], f"offload,min_tokens=512,deadline_ms=60000,{endpoint}")
        ratios.append(own / min(prefill_seconds(measured, program, PROMPT, flash) for flash in ("off", "on")))
    return ratios


def memory_rows(measured, sizes):
    found = [row(f"llama_engine_kv_share_{label}", kv_share(measured, tokens), 0.02 if label == "128k" else None,
                 "bytes of the KV cache in memory over all of its bytes; k=1024 with the word drop", "ratio", "lower") for label, tokens in sizes]
    ratios = offloaded_prefill(measured)
    found.append(row("llama_prefill_offloaded_over_plain", statistics.median(ratios), 0.8,
                     f"seconds of plain llama.cpp, the faster of flash attention on and off, {PROMPT} tokens, 2 threads; ours has a quarter "
                     "of the cells", "ratio", "lower", ratios))
    return found
