#!/usr/bin/env python3
"""A real llama-server with 4 parallel requests that share a prefix of 32K tokens, with the plug-in beside plain llama.cpp.

server_slots.py BUILD [TOKENS]   prints the rows

SmolLM2-135M computes the prefix once with flash attention and once without, and the server saves it: all slots of later servers load it. Each request adds tokens of its own,
and the tokens are counted while all four requests are answered.
"""

import concurrent.futures
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent), str(HERE.parent.parent / "quality")]

import engine  # noqa: E402
import pretrained  # noqa: E402
import server  # noqa: E402
from daemon import Daemon  # noqa: E402
from perplexity import ROOT, TEXTS  # noqa: E402
from rows import row  # noqa: E402

TOKENS = 32 << 10
SLOTS = 4
OWN_TOKENS = 24  # of a request, behind the prefix
ANSWER_TOKENS = 64
THREADS = 2
ROUNDS = 3
SETTINGS = {"": "exact", "_k1024": "k=1024"}


class Slots:
    def __init__(self, build, folder, tokens):
        self._version = engine.TESTED[0]
        engine.build(self._version, ("llama-server",))
        self._plugin = build / "client/libggml-pqcached.so"
        self._model = pretrained.cache() / pretrained.FILE
        self._folder = pathlib.Path(folder)
        self._tokens = tokens
        for flash in ("on", "off"):  # values are stored differently
            with self._server(flash) as running:
                text = running.tokens_of("\n".join((ROOT / name).read_text() for name in TEXTS))
                self._prefix = (text * (tokens // len(text) + 1))[:tokens]
                self._own = [text[-OWN_TOKENS * (slot + 1):][:OWN_TOKENS] for slot in range(SLOTS)]
                running.complete(self._prefix, 1, id_slot=0, cache_prompt=True)
                running.post("/slots/0?action=save", filename=flash).close()

    def _server(self, flash, plugin=None, settings=None):
        words = ["--parallel", SLOTS, "--no-kv-unified", "--ctx-size", SLOTS * (self._tokens + 512), "--threads", THREADS, "--cache-ram", 0,
                 "--no-warmup", "--flash-attn", flash, "--slot-save-path", self._folder]
        return server.Server(self._version, self._model, words, plugin, settings)

    def run(self, flash, settings=None, pause=0):
        """Tokens per second of all requests together, and the 99th percentile of the milliseconds between tokens."""
        with self._server(flash, self._plugin if settings else None, settings) as running:
            for slot in range(SLOTS):
                running.post(f"/slots/{slot}?action=restore", filename="off" if flash == "off" else "on").close()
            if pause:  # the first token has the rows stored, and the sidecar builds their index
                self._answer(running, 4)
                time.sleep(pause)
            times = self._answer(running, ANSWER_TOKENS)
        if settings and running.computed() == 0:
            raise RuntimeError(f"the plug-in computed nothing: {running.messages[-2000:]}")
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        count = sum(begin < each <= end for request in times for each in request)
        gaps = [1000 * (later - earlier) for request in times for earlier, later in zip(request, request[1:]) if begin <= earlier < end]
        return count / (end - begin), statistics.quantiles(gaps, n=100)[98]

    def _answer(self, running, tokens):
        with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool:
            return list(pool.map(lambda slot: running.stream(self._prefix + self._own[slot], tokens, id_slot=slot, cache_prompt=True),
                                 range(SLOTS)))


def server_rows(build, folder, tokens=TOKENS):
    slots = Slots(build, folder, tokens)
    ratios = {name: [] for name in SETTINGS}
    gaps = {name: [] for name in ("plain", *SETTINGS)}
    for _ in range(ROUNDS):
        plain = max(slots.run(flash) for flash in ("off", "on"))
        gaps["plain"].append(plain[1])
        for name, settings in SETTINGS.items():
            with Daemon(build, pathlib.Path(folder, "v")) if name else contextlib.nullcontext() as daemon:
                words = f"{settings},min_tokens={min(4096, tokens // 2)}" + (f",endpoint={daemon.endpoint}" if daemon else "")
                speed, gap = slots.run("auto", words, pause=10 + tokens // 1024 if daemon else 0)
            ratios[name].append(speed / plain[0])
            gaps[name].append(gap)
    size = f"{tokens >> 10}k" if tokens >= 1024 else tokens
    rows = []
    for name, values in ratios.items():
        against = (f"plain llama-server, the faster of flash attention on and off, {THREADS} threads, SmolLM2-135M; {SETTINGS[name]}; p99 between "
                   f"tokens {statistics.median(gaps[name]):.0f} ms, plain {statistics.median(gaps['plain']):.0f} ms")
        rows.append(row(f"llama_server_4_slots{name}_over_plain_{size}", statistics.median(values), None if name else 1.6, against, ratios=values))
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as holder:
        for each in server_rows(pathlib.Path(sys.argv[1]).resolve(), holder, *map(int, sys.argv[2:])):
            print(each["name"], each["value"], each["unit"], "goal", each["goal"], each["against"])
