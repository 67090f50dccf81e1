"""Writes traces of block touches for gpu_cache_study.

cache_traces.py captured DIRECTORY K OUT: from what tests/quality/tinylm_capture wrote for one context, all questions one after
    the other; exact top-K of the sum over the group of softmax, the first 4 and last 64 tokens left out.
cache_traces.py drift TOKENS STEPS KEPT K OUT: keys of tests/quality/generators.py (topic runs, RoPE), queries that look for a
    mixture of features which keeps KEPT of itself from step to step (0.98: slowly, 0.8: fast).
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "quality"))
import generators  # noqa: E402

SINK, WINDOW, BLOCK = 4, 64, 128


def touches(keys, queries, k):
    """keys [tokens, dim], queries [group, dim], scaled -> rows of each block among the top k."""
    logits = keys[SINK : len(keys) - WINDOW] @ queries.T
    weights = np.exp(logits - logits.max(axis=0))
    value = (weights / weights.sum(axis=0)).sum(axis=1)
    chosen = np.argpartition(-value, k)[:k] + SINK
    return np.bincount(chosen // BLOCK, minlength=(len(keys) + BLOCK - 1) // BLOCK)


def write(path, steps):
    array = np.array(steps, np.uint16)  # [step, lane, block]
    with open(path, "wb") as file:
        file.write(np.array([array.shape[1], array.shape[0], array.shape[2]], np.uint32).tobytes())
        file.write(array.tobytes())


def captured(directory, k):
    directory = pathlib.Path(directory)
    keys = np.load(directory / "k.npy")  # [layers, kv_heads, tokens, dim]
    layers, heads, _, dim = keys.shape
    steps = []
    for file in sorted(directory.glob("q_*.npy"), key=lambda p: int(p.stem[2:])):
        queries = np.load(file)  # [layers, steps, query_heads, dim]
        queries = queries.reshape(layers, queries.shape[1], heads, -1, dim)
        for step in range(queries.shape[1]):
            steps.append([touches(keys[l, h], queries[l, step, h], k) for l in range(layers) for h in range(heads)])
    return steps


def drift(tokens, count, kept, k):
    setting = generators.Setting(tokens=tokens, kv_heads=2, seed=3)
    random = np.random.default_rng(setting.seed)
    heads = []
    for _ in range(setting.kv_heads):
        head = generators.Head(setting, random)
        heads.append((head, head.keys().astype(np.float32)))
    wanted = [random.laplace(size=generators.FEATURES) for _ in heads]
    lengths = [None] * len(heads)
    steps = []
    for step in range(count):
        row = []
        for h, (head, keys) in enumerate(heads):
            wanted[h] = kept * wanted[h] + np.sqrt(1 - kept * kept) * random.laplace(size=generators.FEATURES)
            base = wanted[h] @ head.features / np.linalg.norm(wanted[h])
            group = base + 0.25 * generators.orthonormal(random, setting.group, head.weights)
            queries = generators.rotated(group, np.full(setting.group, tokens + step), setting.rope, setting.theta).astype(np.float32)
            if lengths[h] is None:  # once, for the entropy of the setting
                raw = keys[SINK : tokens - WINDOW] @ queries[0]
                lengths[h] = generators.bisect(
                    lambda x: generators.softmax_entropy(raw * x), np.log(setting.effective_tokens), 1e-2, 1e4)
            row.append(touches(keys, queries * np.float32(lengths[h]), k))
        steps.append(row)
    return steps


def main():
    kind, *rest = sys.argv[1:]
    if kind == "captured":
        steps = captured(rest[0], int(rest[1]))
    else:
        steps = drift(int(rest[0]), int(rest[1]), float(rest[2]), int(rest[3]))
    write(rest[-1], steps)


if __name__ == "__main__":
    main()
