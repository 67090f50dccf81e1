"""The trained model end to end: which questions it answers right when a method chooses what it attends to."""

import csv
import json
import pathlib
import subprocess
import tempfile

import sidecar
from problems import depths
from vector_study import BUDGETS

# Length -> task -> (contexts, questions per context); 0 = all. Every prompt file of the model is here.
FULL = {
    1024: {"niah": (0, 0), "kv": (0, 0), "mq": (0, 5), "var": (0, 5)},
    4096: {"niah": (0, 0), "mq": (0, 5), "var": (0, 5), "freq": (0, 0)},
    8192: {"niah": (0, 0), "mq": (0, 5), "var": (0, 0)},
    16384: {"niah": (0, 0), "mq": (3, 5), "var": (0, 5)},
    32768: {"niah": (0, 0), "mq": (3, 5)},
}
QUICK = {1024: {"niah": (2, 5), "kv": (1, 4), "var": (1, 4)}, 4096: {"niah": (2, 5), "mq": (1, 2), "freq": (4, 0)}}
SIDES = ["oracle", "pq4x8", "pq2x6", "window"]


def methods(full):
    budgets = BUDGETS if full else ["1/10", "256"]
    extra = ["flat@1/10", "random@1/10"] + (["pq4x6@1/10", "pq4x4@1/10"] if full else [])
    return ["full"] + [f"{side}@{budget}" for budget in budgets for side in SIDES] + extra


def ask(build, data, endpoint, suite, task, length, contexts, questions, names):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([build / "tests/quality/tinylm_judge", "--model", data / "model", "--prompts", data / "prompts_dev",
                        "--endpoint", endpoint, "--suite", suite, "--tasks", task, "--lengths", str(length), "--contexts",
                        str(contexts), "--questions", str(questions), "--methods", ",".join(names), "--json", out.name],
                       check=True)
        return json.loads(pathlib.Path(out.name).read_text())


def run(build, data, full):
    """(outcomes, builds): dicts with suite, task, length, context, question, method, right, ..."""
    outcomes, builds = [], []

    def add(suite, task, length, contexts, questions, names):
        found = ask(build, data, endpoint, suite, task, length, contexts, questions, names)
        outcomes.extend({"suite": suite, **outcome} for outcome in found["outcomes"])
        builds.extend(found["builds"] if suite == "last" else [])

    some = ["full", "oracle@1/10", "pq4x8@1/10", "pq2x6@1/10", "window@1/10"]
    with sidecar.running(build) as endpoint:
        for length, tasks in (FULL if full else QUICK).items():
            for task, (contexts, questions) in tasks.items():
                add("last", task, length, contexts, questions, methods(full))
        # One prefill per question. freq has one question per context.
        for task, length, contexts in [("niah", 1024, 10), ("var", 1024, 10), ("freq", 4096, 50)][:3 if full else 1]:
            add("first", task, length, contexts if full else 1, 2, some)
        add("long", "niah", 4096, 5 if full else 1, 5 if full else 2, some)
    for outcome in outcomes:
        outcome["depth"] = ""
    for task, length in {(o["task"], o["length"]) for o in outcomes if o["suite"] == "last"}:
        where = depths(data, task, length)
        for outcome in outcomes:
            if (outcome["suite"], outcome["task"], outcome["length"]) == ("last", task, length):
                outcome["depth"] = where.get((outcome["context"], outcome["question"]), "")
    return outcomes, builds


def write_csv(path, rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as out:
        writer = csv.DictWriter(out, names)
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path):
    """Rows as dicts; numbers as numbers, nothing as None; a budget stays as it was said."""
    def value(name, text):
        if name == "budget":
            return text
        if text == "":
            return None
        if text in ("True", "False"):
            return text == "True"
        try:
            return int(text)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            return text
    with open(path, newline="") as source:
        return [{name: value(name, text) for name, text in row.items()} for row in csv.DictReader(source)]
