"""Rows of the area `systems`: the trained models with tokens that graphs select for each query head (RetrievalAttention).

ra_rows.py BUILD --json FILE [--quick]

Questions of niah, mq and var after contexts of up to 32K tokens (the model with rotary keys: niah, kv, mq and var of 1K) are asked
with the sidecar's graphs and with exact scores, a set of tokens for each query head. --quick: a few questions. Rows, by model, all
the share of right answers minus that of the exact tokens with the same budget, sink and window included:

    ra_minus_oracle_r10_*         a tenth of all tokens: so many that the index scores all keys, and walks no graph
    ra_minus_oracle_r50_tinylm    a fiftieth, of 8K tokens and more: graphs are walked
    ra_minus_oracle_n16_rope      16 tokens besides sink and window: graphs are walked
"""

import argparse
import json
import pathlib

import model_study
import sidecar
from paired import paired_difference

DATA = pathlib.Path(__file__).resolve().parents[1] / "tinylm"
GOAL = -0.01
# Model -> (data, name and budget of its second row, length -> task -> (contexts, questions per context); 0 = all).
MODELS = {
    "tinylm": (DATA, "r50", "1/50", "a fiftieth of all tokens; graphs are walked",
               {4096: {"niah": (5, 5), "var": (5, 5)}, 8192: {"niah": (5, 5), "mq": (3, 5), "var": (5, 5)},
                16384: {"niah": (3, 5), "mq": (2, 5), "var": (2, 5)}, 32768: {"niah": (2, 5), "mq": (1, 5)}}),
    "rope": (DATA / "rope", "n16", "96", "16 tokens besides sink and window; graphs are walked",
             {1024: {"niah": (0, 0), "kv": (0, 0), "mq": (0, 5), "var": (0, 5)}}),
}
LEAST_WALKED = {"r50": 8192, "n16": 0}  # tokens of the contexts of the second row


def ask(build, endpoint, data, budgets, lengths, quick):
    names = ["full", *(f"{kind}@{budget}" for budget in budgets for kind in ("graph", "heads", "oracle"))]
    outcomes = []
    for length, tasks in lengths.items():
        for task, (contexts, questions) in tasks.items():
            limits = (1, 3) if quick else (contexts, questions)
            outcomes += model_study.ask(build, data, endpoint, "last", task, length, *limits, names)["outcomes"]
    return outcomes


def share(outcomes, method):
    right = [outcome["right"] for outcome in outcomes if outcome["method"] == method]
    return sum(right) / len(right)


def row_of(model, name, budget, setting, outcomes):
    found = paired_difference(outcomes, f"graph@{budget}", f"heads@{budget}")
    graph, heads, oracle, full = (share(outcomes, name) for name in (f"graph@{budget}", f"heads@{budget}", f"oracle@{budget}", "full"))
    return {"area": "systems", "name": f"ra_minus_oracle_{name}_{model}", "value": found.mean, "unit": "share of questions",
            "better": "higher", "goal": GOAL if name == "r10" else None, "samples": found.question_count, "spread": found.half_width,
            "against": f"the best tokens of each query head by exact scores; {setting}. Right: {graph:.3f}, exact {heads:.3f}, exact with "
                       f"a set for each kv head {oracle:.3f}, full attention {full:.3f}"}


def rows_of(model, second, budget, setting, outcomes):
    walked = [outcome for outcome in outcomes if outcome["length"] >= LEAST_WALKED[second]]
    return [row_of(model, "r10", "1/10", "a tenth of all tokens, for which the index scores all keys and walks no graph", outcomes),
            row_of(model, second, budget, setting, walked)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for model, (data, second, budget, setting, lengths) in MODELS.items():
        with sidecar.running(arguments.build.resolve()) as endpoint:  # of its own, because caches have the model's name
            outcomes = ask(arguments.build.resolve(), endpoint, data, ("1/10", budget), lengths, arguments.quick)
        rows += rows_of(model, second, budget, setting, outcomes)
    arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
