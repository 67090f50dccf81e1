"""What selection is tried on: keys, values and queries of one layer, captured from the trained model or generated.

Keys and values are rounded to fp16 first, as the sidecar stores them, so that references see the same numbers.
"""

import dataclasses
import json
import pathlib
import subprocess
import tempfile

import numpy as np


@dataclasses.dataclass
class Turn:
    """Rows that come after the index was built, and the queries that are asked with them stored."""

    keys: np.ndarray  # [kv_heads, rows, dim]; rows may be 0
    values: np.ndarray
    queries: np.ndarray  # [steps, query_heads, dim]; q . k * scale is the logit
    positions: np.ndarray  # [steps], absolute; a query sees the tokens up to its own position
    targets: np.ndarray = None  # [steps, kv_heads]: a position that has to be found, or None


@dataclasses.dataclass
class Problem:
    name: str
    facts: dict  # what tells it from others: task, length, context, layer, or the generator's settings
    keys: np.ndarray  # [kv_heads, tokens, dim]: the prefill
    values: np.ndarray
    turns: list
    scale: float
    rotary_dim: int = 0  # the first dims, rotated in pairs (i, i + rotary_dim / 2)
    samples: tuple = ()  # queries of the prefill for the training of indexes: positions, and [positions, query_heads, dim]

    @property
    def kv_heads(self):
        return self.keys.shape[0]

    @property
    def tokens(self):
        return self.keys.shape[1]

    @property
    def dim(self):
        return self.keys.shape[2]

    @property
    def query_heads(self):
        return self.turns[0].queries.shape[1]


def stored(array):
    return np.ascontiguousarray(array.astype(np.float16).astype(np.float32))


def captured(build, data, task, length, context, questions, layers=(1, 3), steps=None):
    """Problems, one per full-attention layer, of one context of the prompt files and its first questions.

    layers: what the model calls them. steps: no more than this many of each question, spread evenly.
    """
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([build / "tests/quality/tinylm_capture", "--model", data / "model", "--prompts",
                        data / "prompts_dev", "--task", task, "--length", str(length), "--context", str(context),
                        "--questions", str(questions), "--out", directory], check=True)
        load = lambda name: np.load(pathlib.Path(directory, name + ".npy"))
        keys, values = load("k"), load("v")
        asked = [(load(f"q_{i}"), load(f"k_{i}"), load(f"v_{i}"))
                 for i in range(questions) if pathlib.Path(directory, f"q_{i}.npy").exists()]
    problems = []
    for number, layer in enumerate(layers):
        turns = []
        for q, k, v in asked:
            count = q.shape[1]
            chosen = np.arange(count) if steps is None else np.unique(np.linspace(0, count - 1, steps).astype(int))
            turns.append(Turn(stored(k[number]), stored(v[number]), q[number][chosen],
                              keys.shape[2] + chosen))
        facts = {"source": "captured", "task": task, "length": length, "context": context, "layer": layer}
        problems.append(Problem(f"{task} {length} context {context} layer {layer}", facts, stored(keys[number]),
                                stored(values[number]), turns, scale=1.0))
    return problems


def depths(data, task, length):
    """Where the asked statement stands: (context, question) -> share of the context before it. niah, kv, mq, var."""
    found = {}
    for context, line in enumerate((data / "prompts_dev" / f"{task}_{length}.jsonl").read_text().splitlines()):
        prompt = json.loads(line)
        tokens = prompt["context"]
        marks = {}
        for i in range(len(tokens) - 3):
            marks.setdefault((tokens[i], tokens[i + 1], tokens[i + 2]), i)
        for question, asked in enumerate(prompt["questions"]):
            first = asked["segments"][0]["input"]
            opening = {5: 2, 8: 6}.get(first[0])  # Q asks for KEY, QVAR for SET
            place = marks.get((opening, first[1], first[2])) if len(first) > 2 else None
            if place is not None:
                found[context, question] = place / len(tokens)
    return found
