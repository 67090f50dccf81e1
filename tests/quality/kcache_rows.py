"""Rows of the area `systems`: the trained models with their keys in the engine and their values in the sidecar (KCache).

kcache_rows.py BUILD --json FILE [--grid FILE] [--quick]

All questions of niah, mq, var, freq and kv after contexts of up to 32K tokens (the model with rotary keys: of 1K) are asked with
full attention and with the N best tokens of each query head, for N = 32, 64, 128, the values of the first L = 1, 2, 3 layers of the
model in the engine, and the weights renormalised or not. --grid: the share of right answers of each, as JSON. --quick: a few
questions. Rows, all with N = 64 and L = 1 and without renormalisation, by model:

    kcache_minus_full_n64_l1_*     = share of right answers minus that of full attention
    kcache_engine_bytes_share_*    = bytes of K and V in the engine / those of full attention, after the longest context
    kcache_tokens_per_s_vs_full_*  = tokens/s / those of full attention, after the longest contexts
"""

import argparse
import itertools
import json
import pathlib

import model_study
import sidecar
from paired import paired_difference

DATA = pathlib.Path(__file__).resolve().parents[1] / "tinylm"
TOKENS, LAYERS = (32, 64, 128), (1, 2, 3)
METHODS = [f"kcache{n}x{layers}{norm}" for n, layers, norm in itertools.product(TOKENS, LAYERS, ("", "r"))]
ROW = "kcache64x1"
# Length -> task -> (contexts, questions per context); 0 = all.
MODELS = {
    "tinylm": (DATA, {1024: {"kv": (0, 0)}, 4096: {"niah": (0, 5), "mq": (0, 5), "var": (0, 5), "freq": (0, 0)},
                      16384: {"niah": (3, 5), "mq": (3, 5), "var": (3, 5)}, 32768: {"niah": (2, 5), "mq": (2, 5)}}),
    "rope": (DATA / "rope", {1024: {"niah": (0, 0), "kv": (0, 0), "mq": (0, 5), "var": (0, 5)}}),
}


def ask(build, endpoint, data, lengths, quick):
    outcomes = []
    for length, tasks in lengths.items():
        for task, (contexts, questions) in tasks.items():
            limits = (2, 3) if quick else (contexts, questions)
            outcomes += model_study.ask(build, data, endpoint, "last", task, length, *limits, ["full", *METHODS])["outcomes"]
    return outcomes


def rows_of(model, outcomes):
    longest = max(outcome["length"] for outcome in outcomes)
    last = {name: [o for o in outcomes if o["method"] == name and o["length"] == longest] for name in ("full", ROW)}
    engine_bytes = {name: max(outcome["engine_bytes"] for outcome in of) for name, of in last.items()}
    speed = {name: sum(o["steps"] for o in of) / sum(o["seconds"] for o in of) for name, of in last.items()}
    found = paired_difference(outcomes, ROW, "full")
    row = {"area": "systems", "samples": found.question_count, "spread": None}
    setting = "N = 64, L = 1, not renormalised"
    return [
        {**row, "name": f"kcache_minus_full_n64_l1_{model}", "value": found.mean, "unit": "share of questions", "better": "higher",
         "goal": -0.01, "against": f"full attention; {setting}", "spread": found.half_width},
        {**row, "name": f"kcache_engine_bytes_share_{model}", "value": engine_bytes[ROW] / engine_bytes["full"], "unit": "ratio",
         "better": "lower", "goal": 0.52, "samples": 1, "against":
         f"K and V of {longest} tokens in the engine; the values are in the sidecar, of {max(o['sidecar_bytes'] for o in last[ROW])} "
         "bytes with K, in fp16"},
        {**row, "name": f"kcache_tokens_per_s_vs_full_{model}", "value": speed[ROW] / speed["full"], "unit": "ratio",
         "better": "higher", "goal": None, "samples": sum(o["steps"] for o in last[ROW]),
         "against": f"full attention in the engine, {speed['full']:.0f} tokens/s after {longest} tokens; {setting}"},
    ]


def shares(outcomes):
    """The share of right answers by method."""
    right = {name: [o["right"] for o in outcomes if o["method"] == name] for name in ("full", *METHODS)}
    return {name: sum(of) / len(of) for name, of in right.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--grid", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rows, grid = [], {}
    for model, (data, lengths) in MODELS.items():
        with sidecar.running(arguments.build.resolve()) as endpoint:  # of its own, because caches have the model's name
            outcomes = ask(arguments.build.resolve(), endpoint, data, lengths, arguments.quick)
        rows += rows_of(model, outcomes)
        grid[model] = shares(outcomes)
    arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.grid:
        arguments.grid.write_text(json.dumps(grid, indent=1))


if __name__ == "__main__":
    main()
