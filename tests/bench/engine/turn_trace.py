#!/usr/bin/env python3
"""Time to the first token of a turn of a long conversation: with the stored prefix, and without.

turn_trace.py BUILD --json FILE [--tokens N]: a made-up trace of the shape that agents have, with the numbers of
tests/bench/agent_trace.h, which eviction_study includes. Turn t of 33 has a prompt of N / 30 * t tokens (N is 80000), of which all
but the last N / 30 were in the turn before: 94 % of all input tokens are prefix hits. One token in 131 is an answer's. The trained
model (tests/tinylm) runs in numpy and keeps its KV in arrays. After each turn the rows of all of its layers are ingested, and the
sequence is dropped: a cached prefix remains. At turn 30 three ways to the first token are timed:

  recompute  the whole prompt is computed
  load       the sequence is created with the prompt's token ids, its stored rows are loaded into the arrays, and the rest is computed
  copy       as load, but the rows are copied from other arrays of this process

Rows: ttft_turn_n_vs_recompute = recompute / load; ttft_turn_n_over_copy = load / copy.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests"), str(ROOT / "tests/tinylm/python")]

import children  # noqa: E402
import pqcached  # noqa: E402
from mooncake_peer import child  # noqa: E402
from tinylm import TinyLM  # noqa: E402

TRACE = {name: int(value) for name, value in
         re.findall(r"^inline constexpr uint32_t (k\w+) = (\d+);", (ROOT / "tests/bench/agent_trace.h").read_text(), re.MULTILINE)}
TURNS, TURN = TRACE["kTurns"], TRACE["kTimedTurn"]
INPUT_TOKENS_PER_OUTPUT_TOKEN = TRACE["kInputTokensPerOutputToken"]
PASS = 512  # tokens per pass of the model
ROUNDS = 3
STEP = 128  # prefixes are shared in steps of this many tokens


class Engine(TinyLM):
    """The model with its KV in arrays [kv_heads, capacity, dim], which are written in place."""

    def __init__(self, capacity):
        super().__init__(ROOT / "tests/tinylm/model")
        self.layers = range(len(self.is_full))
        self.kv = [tuple(np.zeros((self.kv_heads, capacity, self.dim), np.float32) for _ in "kv") for _ in self.layers]

    def kv_rows(self, begin, end):
        """Keys and values [tokens, kv_heads, dim] of some tokens, by layer."""
        return {layer: tuple(array[:, begin:end].transpose(1, 0, 2) for array in self.kv[layer]) for layer in self.layers}

    def run(self, tokens, begin):
        """Computes tokens [begin, ...) behind the rows of those before; returns the logits of the last one."""
        self.position = begin
        logits = None
        for first in range(begin, len(tokens), PASS):
            logits = self._forward(tokens[first:first + PASS],
                                   lambda layer, queries, keys, values: self._attend_rows(layer, queries, keys, values, None))
        return logits

    def _attend_rows(self, layer, queries, keys, values, window):
        begin, count = self.position, queries.shape[1]
        all_keys, all_values = self.kv[layer]
        all_keys[:, begin:begin + count], all_values[:, begin:begin + count] = keys, values
        first = max(0, begin + 1 - window) if window else 0
        logits = queries.reshape(self.kv_heads, -1, self.dim) @ all_keys[:, first:begin + count].transpose(0, 2, 1)
        scores = logits.reshape(self.kv_heads, -1, count, begin + count - first)
        own, others = np.arange(begin, begin + count)[:, None], np.arange(first, begin + count)
        if window:
            scores[..., (others > own) | (others <= own - window)] = -np.inf
        else:
            scores[..., begin:][..., others[begin:] > own] = -np.inf
        logits -= logits.max(axis=2, keepdims=True)
        np.exp(logits, out=logits)
        output = logits @ all_values[:, first:begin + count]
        output /= logits.sum(axis=2, keepdims=True)
        return output.reshape(-1, count, self.dim)


class Conversation:
    """The prompts of the turns."""

    def __init__(self, tokens):
        self.step = tokens // TURN
        self.tokens = np.random.default_rng(1).integers(5, 512, self.step * TURNS).astype(np.uint32)

    def prompt(self, turn):
        return self.tokens[:self.step * turn]

    def answer_tokens(self, turn):
        return len(self.prompt(turn)) // INPUT_TOKENS_PER_OUTPUT_TOKEN


def create(cache, engine, prompt):
    """Creates the sequence of a prompt, and loads what is stored of it; returns it with the number of tokens."""
    sequence = cache.create_sequence(prompt)
    stored = min(sequence.shared_tokens, len(prompt) - 1)
    if stored:
        sequence.load((0, stored), engine.kv_rows(0, stored))
    return sequence, stored


def play(cache, engine, talk, turn):
    """Plays a turn, and returns how many of its tokens were stored. The next prompt holds its answer."""
    tokens = np.concatenate([talk.prompt(turn), talk.tokens[len(talk.prompt(turn)):][:talk.answer_tokens(turn)]])
    sequence, stored = create(cache, engine, talk.prompt(turn))
    with sequence:
        engine.run(tokens, stored)
        names = pqcached.TokenNames(len(talk.prompt(turn)), tokens[len(talk.prompt(turn)):])
        for layer, (keys, values) in engine.kv_rows(stored, len(tokens)).items():
            sequence.ingest(layer, stored, keys, values, names=names if layer == 0 else None)
    return stored


def seconds(call):
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure(cache, engine, talk):
    """Plays the turns before, and times the three ways; returns their times in seconds."""
    hits = [play(cache, engine, talk, turn) for turn in range(1, TURN)]
    prompt = talk.prompt(TURN)
    copy = [tuple(np.array(array[:, :len(prompt)]) for array in pair) for pair in engine.kv]

    def load():
        sequence, stored = create(cache, engine, prompt)
        with sequence:
            return engine.run(prompt, stored), stored

    def copied():
        for pair, kept in zip(engine.kv, copy):
            for array, rows in zip(pair, kept):
                array[:, :stored] = rows[:, :stored]
        return engine.run(prompt, stored)

    times = {"recompute": [], "load": [], "copy": []}
    for number in range(ROUNDS):
        for pair in engine.kv:
            for array in pair:
                array[:] = 0
        taken, (logits, stored) = seconds(load)
        times["load"].append(taken)
        taken, other = seconds(copied)
        times["copy"].append(taken)
        if number == 0:
            taken, exact = seconds(lambda: engine.run(prompt, 0))
            times["recompute"].append(taken)
        for each in (logits, other):
            if np.abs(each - exact).max() > 0.02 * np.abs(exact).max():  # the stored rows are fp16
                raise RuntimeError("the logits differ from those of a prompt that is recomputed")
    hits.append(stored)
    prompts = sum(len(talk.prompt(turn)) for turn in range(1, TURN + 1))
    print(f"turn {TURN}: {len(prompt)} tokens, {stored} stored; {sum(hits) / prompts:.3f} of all input tokens were stored; seconds: "
          + ", ".join(f"{way} {statistics.median(each):.2f}" for way, each in times.items()), flush=True)
    if stored < len(prompt) - talk.step - STEP:
        raise RuntimeError(f"turn {TURN}: only {stored} tokens of the turn before are stored")
    return times


def rows_of(times):
    median = {way: statistics.median(each) for way, each in times.items()}
    common = {"area": "engine", "unit": "ratio", "spread": None}
    return [{**common, "name": "ttft_turn_n_vs_recompute", "value": median["recompute"] / median["load"], "better": "higher", "goal": 5,
             "against": f"computing the whole prompt of turn {TURN} of a made-up trace again; TinyLM in numpy", "samples": 1},
            {**common, "name": "ttft_turn_n_over_copy", "value": median["load"] / median["copy"], "better": "lower", "goal": 1.5,
             "against": "the same with rows that are copied from other arrays of the process", "samples": ROUNDS}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=TRACE["kPromptTokens"], help="of the prompt of turn 30")
    arguments = parser.parse_args()
    talk = Conversation(arguments.tokens)
    engine = Engine(len(talk.tokens))
    group = pqcached.LayerGroup(list(engine.layers), engine.kv_heads, engine.heads, engine.dim, engine.dim)
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix://{folder}/s"
        command = [arguments.build.resolve() / "service/pqcached", "--listen", endpoint, "--max-pool-bytes", "2gib"]
        with child(command, "event=ready", folder, "sidecar", children.end_with_parent), pqcached.Client(endpoint, timeout_ms=60000) as client:
            cache = client.open_cache("trace", model_fingerprint="tinylm", groups=[group], capacity_bytes=1 << 30)
            times = measure(cache, engine, talk)
    arguments.json.write_text(json.dumps(rows_of(times), indent=1) + "\n")


if __name__ == "__main__":
    main()
