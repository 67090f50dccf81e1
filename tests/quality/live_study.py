#!/usr/bin/python3
"""How recall and attention mass at equal budget depend on the sizes of segments and epochs of a live index.

    tests/quality/live_study.py BUILD [--only NAME,...] [--csv FILE] [--seeds COUNT]

Rows arrive in chunks of a segment, as in a prefill, and each is indexed as it comes. Keys: captured from the trained
model (no RoPE), and generated ones (RoPE, base 5e5) whose theme changes every 20K tokens, several seeds. Prints one line
per setting: means over problems, steps and kv heads. NAME: sizes, boundary, bytes, sample; default: all.
"""

import argparse
import csv
import pathlib
import sys
import time

import numpy as np

import sidecar
from generators import Setting, generate
from judge import DATA
from methods import SINK, Pq, Rows, load_client
from problems import captured
from vector_study import study

BUDGETS = ["1/10", "1024"]
K = 1024
NEVER = 100  # a drift ratio that no keys reach
THEME = 20 * K
ITERATIONS = 10


class LiveRows(Rows):
    """Rows that arrive chunk by chunk, their index kept up by the sidecar."""

    def __init__(self, pqcached, endpoint, problem, index, chunk):
        self.index, self.chunk = index, chunk
        super().__init__(pqcached, endpoint, problem)

    def store(self, keys, values):
        self.sequence.close()
        self.sequence = self.cache.create_sequence(live_index=True, index=self.index, iterations=ITERATIONS, sink_tokens=SINK)
        for first in range(0, len(keys), self.chunk):
            self.sequence.ingest(0, first, keys[first:first + self.chunk], values[first:first + self.chunk])
            self.wait()
        self.sequence.build_index(self.index, sink_tokens=SINK)
        self.wait()

    def wait(self):
        while self.client.admin("Stats").get("builds_in_flight"):
            time.sleep(0.005)


class LivePq(Pq):
    """The live index of LiveRows; there is nothing to build."""

    def prepare(self, problem):
        super(Pq, self).prepare(problem)
        info = self.rows.sequence.describe()
        self.codebook_bytes = info.codebook_bytes
        self.index_bytes = info.index_bytes + info.codebook_bytes


def captured_problems(build):
    return [problem for task in ("niah", "mq")
            for problem in captured(build, DATA, task, 32768, 0, 4, steps=4)]


def generated_problems(seeds, theme_tokens):
    return [generate(f"themes of {theme_tokens}, seed {seed}",
                     Setting(tokens=64 * K, steps=16, kv_heads=1, theme_tokens=theme_tokens, seed=seed))
            for seed in range(1, seeds + 1)]


def size_settings():
    for segment in (2 * K, 8 * K, 32 * K):
        for epoch in (8 * K, 32 * K, 128 * K):
            for ratio in (1.25, NEVER):
                yield {"segment_tokens": segment, "codebook_tokens": epoch, "drift_ratio": ratio}


# What is tried, as settings of the sidecar, the bits of the index, and the themes' lengths.
DEFAULT = {"segment_tokens": 8 * K, "codebook_tokens": 32 * K, "drift_ratio": 1.25}
SMALL = {**DEFAULT, "segment_tokens": 2 * K}
STUDIES = {
    "sizes": [(setting, 6, THEME) for setting in size_settings()],
    # Do chunks that span two themes lose it?
    "boundary": [(setting, 6, theme) for theme in (16 * K, 20 * K) for setting in (SMALL, DEFAULT)],
    # Is it the bytes? m=2 b=8 has four times the centroids.
    "bytes": [(SMALL, 6, THEME), (DEFAULT, 6, THEME), (DEFAULT, 8, THEME)],
    # Is it the sample that codebooks are trained on?
    "sample": [({**DEFAULT, "train_tokens": sample}, 6, THEME) for sample in (2 * K, 8 * K, 32 * K)],
}


def measure(build, pqcached, setting, bits, problems):
    """Metrics by budget: means over problems, and the bytes of the index per token and kv head."""
    flags = [part for name, value in setting.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    index = pqcached.Index.pq(2, bits)
    rows = []
    with sidecar.running(build, *flags) as endpoint:
        for problem in problems:
            live = LiveRows(pqcached, endpoint, problem, index, setting["segment_tokens"])
            try:
                found = study(problem, [LivePq(live, 2, bits)], BUDGETS)
            finally:
                live.close()
            rows += [{**row, "bytes": row["index_bytes"] / problem.tokens} for row in found]
    means = {}
    for budget in BUDGETS:
        of_budget = [row for row in rows if row["budget"] == budget]
        means[budget] = {name: float(np.mean([row[name] for row in of_budget]))
                         for name in ("recall", "mass_vs_oracle", "bytes")}
    return means


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(STUDIES))
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    pqcached = load_client(build)
    kept, lines = {}, []

    def problems(source, theme):
        key = source, theme
        if key not in kept:
            kept[key] = captured_problems(build) if source == "captured" else generated_problems(arguments.seeds, theme)
        return kept[key]

    print("study     keys       theme segment   epoch drift bits sample |" +
          "".join(f" {budget:>5}: recall   mass |" for budget in BUDGETS) + " B/token/head")
    for name in arguments.only.split(","):
        for setting, bits, theme in STUDIES[name]:
            for source in ("generated",) if name == "boundary" else ("captured", "generated"):
                means = measure(build, pqcached, setting, bits, problems(source, theme))
                line = {"study": name, "keys": source, "theme": theme, **DEFAULT, "train_tokens": 8 * K, **setting,
                        "bits": bits}
                lines += [{**line, "budget": budget, **means[budget]} for budget in BUDGETS]
                print(f"{name:9s} {source:10s} {theme // K:4d}K {line['segment_tokens'] // K:6d}K "
                      f"{line['codebook_tokens'] // K:6d}K {line['drift_ratio']:5.4g} {bits:4d} {line['train_tokens'] // K:5d}K |" +
                      "".join(f"        {means[budget]['recall']:.3f}  {means[budget]['mass_vs_oracle']:.3f} |"
                              for budget in BUDGETS) + f" {means[BUDGETS[0]]['bytes']:8.2f}", flush=True)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    sys.exit(main())
