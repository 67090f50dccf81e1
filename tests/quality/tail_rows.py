"""The row `tail_estimate_error_gain` of the area systems: what estimating the tokens that are not selected gains on SmolLM2-135M.

tail_rows.py BUILD --json FILE

SmolLM2-135M (pretrained.py) reads 8K tokens of this project's documentation; in eight layers, every 16th of the last 512 tokens attends
to sink, window and selected tokens, a twentieth of the context, through the sidecar. The error is |o - o'| / |o|, o the full attention
of one query head. The row is its mean without the tail estimate over its mean with it. A minute on 2 cores.
"""

import argparse
import contextlib
import json
import pathlib
import tempfile

import numpy as np

import pretrained_rows
import sidecar
from methods import SINK, WINDOW, Rows, load_client

ROW = {"area": "systems", "name": "tail_estimate_error_gain", "unit": "ratio", "better": "higher", "goal": 1.2}
RATIO, CLUSTER_TOKENS = 1 / 20, 32


def attention(query, keys, values, scale, tokens):
    """Output and lse of each query head over the tokens of its kv head; query [heads, dim], keys and values [kv_heads, tokens, dim]."""
    group = len(query) // len(keys)
    outputs, sums = [], []
    for head, one in enumerate(query):
        logits = keys[head // group][tokens] @ one * scale
        weights = np.exp(logits - logits.max())
        outputs.append(weights @ values[head // group][tokens] / weights.sum())
        sums.append(logits.max() + np.log(weights.sum()))
    return np.array(outputs), np.array(sums)


def merged(parts):
    outputs, sums = (np.array(each) for each in zip(*parts))
    weights = np.exp(sums - sums.max(axis=0))
    return (weights[..., None] * outputs).sum(axis=0) / weights.sum(axis=0)[..., None]


def errors(pqcached, rows, problem):
    """The errors of all steps and query heads: {(index, with tail): [...]}."""
    turn = problem.turns[0]
    keys, values = (np.concatenate(parts, axis=1) for parts in ((problem.keys, turn.keys), (problem.values, turn.values)))
    indexes = {"pq m=4 b=8": pqcached.Index.pq(4, 8), "flat": pqcached.Index.flat()}
    for index in (indexes["pq m=4 b=8"], pqcached.Index.make("clusters", tokens=CLUSTER_TOKENS)):
        rows.sequence.build_index(index, iterations=10, sink_tokens=SINK)
    rows.begin_turn(turn)
    found = {}
    for query, position in zip(turn.queries, map(int, turn.positions)):
        everything = np.arange(position + 1)
        full, _ = attention(query, keys, values, problem.scale, everything)
        own = attention(query, keys, values, problem.scale,
                        np.concatenate([everything[:SINK], everything[position + 1 - WINDOW:]]))
        for name, index in indexes.items():
            for tail in (False, True):
                selection = pqcached.Selection(ratio=RATIO, sink_tokens=SINK, window_tokens=WINDOW, index=index, tail_estimate=tail)
                answer = rows.sequence.attend(0, position, query, selection)
                output = merged([own, (answer.output, answer.lse)])
                found.setdefault((name, tail), []).extend(np.linalg.norm(output - full, axis=1) / np.linalg.norm(full, axis=1))
    return found


def measured(build):
    pqcached = load_client(build)
    gains, found = {}, {}
    with tempfile.TemporaryDirectory() as folder, sidecar.running(build) as endpoint:
        layers = pretrained_rows.LAYERS["systems"]
        for problem in pretrained_rows.captured(pathlib.Path(folder), layers):
            with contextlib.closing(Rows(pqcached, endpoint, problem)) as rows:
                of_layer = errors(pqcached, rows, problem)
            for key, values in of_layer.items():
                found.setdefault(key, []).extend(values)
            for name in {name for name, _ in of_layer}:
                gains.setdefault(name, []).append(np.mean(of_layer[name, False]) / np.mean(of_layer[name, True]))
            print(f"{problem.name}:", ", ".join(f"{name} {values[-1]:.2f}" for name, values in sorted(gains.items())), flush=True)
    mean = {key: float(np.mean(values)) for key, values in found.items()}
    ratio = {name: mean[name, False] / mean[name, True] for name in gains}
    name = "pq m=4 b=8"
    return [{**ROW, "value": ratio[name], "samples": len(found[name, True]),
             "spread": float(np.subtract(*np.quantile(gains[name], [0.75, 0.25]))),
             "against": f"no estimate, whose mean error is {mean[name, False]:.4f}; with it {mean[name, True]:.4f}; {name}, "
                        f"a twentieth of the tokens, clusters of {CLUSTER_TOKENS}; exact top-k gains {ratio['flat']:.2f}; "
                        f"{len(layers)} layers of SmolLM2, {pretrained_rows.TOKENS} tokens"}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    reason = pretrained_rows.absent()
    if reason:
        rows = [{**ROW, "value": None, "samples": None, "spread": None, "against": reason}]
    else:
        rows = measured(arguments.build.resolve())
    arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
