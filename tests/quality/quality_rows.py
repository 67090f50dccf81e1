"""Rows of the area `quality`: the trained model with its KV in the sidecar beside exact attention.

quality_rows.py BUILD --json FILE: asks all development questions of niah and mq (4K to 32K), var (4K to 16K) and freq (4K);
about 20 minutes on 2 cores.
"""

import argparse
import json
import pathlib

import sidecar
from paired import paired_difference

DATA = pathlib.Path(__file__).resolve().parents[2] / "tests/tinylm"
LENGTHS = [4096, 8192, 16384, 32768]
FULL, ORACLE, WINDOW = "full attention", "exact top-k, 1/10", "sink + window only"
PQ48, PQ26 = "pqcached m=4 b=8, 1/10", "pqcached m=2 b=6, 1/10"


def difference_row(outcomes, name, method, against, goal):
    found = paired_difference(outcomes, method, against)
    return {"area": "quality", "name": name, "value": found.mean, "unit": "share of questions", "better": "higher",
            "goal": goal, "against": against, "samples": found.question_count, "spread": found.half_width}


def accuracy_row(outcomes, name, method):
    right = [outcome["right"] for outcome in outcomes if outcome["method"] == method]
    return {"area": "quality", "name": name, "value": sum(right) / len(right), "unit": "share of questions",
            "better": "higher", "goal": None, "against": "all answers right", "samples": len(right), "spread": None}


def reference_rows(compared):
    not_ties = [m for m in compared["mismatches"] if not m["near_tie"]]
    return [
        {"area": "quality", "name": "tinylm_logit_max_abs_error", "value": compared["tinylm_logit_max_abs_error"],
         "unit": "logit", "better": "lower", "goal": 1e-3, "against": "PyTorch fp32", "samples": compared["logits"],
         "spread": None},
        {"area": "quality", "name": "tinylm_greedy_match", "value": compared["tinylm_greedy_match"],
         "unit": "share of questions", "better": "higher", "goal": 0.99,
         "against": f"PyTorch fp32; {len(compared['mismatches'])} differ, {len(not_ties)} of them no near tie",
         "samples": compared["questions"], "spread": None},
    ]


def rows(build):
    outcomes = sidecar.report(build, DATA, LENGTHS)["outcomes"]
    return reference_rows(sidecar.reference(build, DATA)) + [
        difference_row(outcomes, "pq48_minus_oracle_r10", PQ48, ORACLE, -0.01),
        difference_row(outcomes, "pq26_minus_oracle_r10", PQ26, ORACLE, -0.05),
        difference_row(outcomes, "pq48_minus_full_r10", PQ48, FULL, -0.02),
        difference_row(outcomes, "oracle_minus_window_r10", ORACLE, WINDOW, 0.3),
        accuracy_row(outcomes, "accuracy_full", FULL),
        accuracy_row(outcomes, "accuracy_oracle_r10", ORACLE),
        accuracy_row(outcomes, "accuracy_pq48_r10", PQ48),
        accuracy_row(outcomes, "accuracy_pq26_r10", PQ26),
        accuracy_row(outcomes, "accuracy_window", WINDOW),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    arguments.json.write_text(json.dumps(rows(arguments.build.resolve()), indent=1))


if __name__ == "__main__":
    main()
