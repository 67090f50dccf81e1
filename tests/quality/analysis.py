"""What the judge's CSV files say: the numbers of its report and of its rows."""

import collections
import dataclasses
import pathlib

from model_study import read_csv
from paired import mean_of_contexts, paired_difference

RETRIEVAL_TASKS = ("niah", "mq", "var", "kv")
INDEX_GOAL = 1 / 50
DEFAULT_EPOCH = 32768


@dataclasses.dataclass
class Results:
    model: list
    builds: list
    captured: list
    grid: list
    iterations: list
    generated: list
    accounting: list
    epochs: list


def load(directory):
    read = lambda name: read_csv(path) if (path := pathlib.Path(directory, name + ".csv")).exists() else []
    return Results(**{field.name: read(field.name) for field in dataclasses.fields(Results)})


def where(rows, **facts):
    """Rows with these values; a tuple means one of them."""
    fits = lambda row, name, value: row.get(name) in value if isinstance(value, tuple) else row.get(name) == value
    return [row for row in rows if all(fits(row, name, value) for name, value in facts.items())]


def values(rows, name):
    """Distinct values in the order of appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def mean(rows, metric):
    """Over contexts: (mean, half width of the 95 % interval, contexts); None without rows."""
    pairs = [((row.get("task"), row.get("length"), row.get("context")), row[metric])
             for row in rows if row.get(metric) is not None]
    if not pairs:
        return None
    return *mean_of_contexts(pairs), len({context for context, _ in pairs})


# ---- End to end

def accuracy(outcomes, method, **facts):
    """(share of right answers, questions)"""
    right = [row["right"] for row in where(outcomes, method=method, **facts)]
    return (sum(right) / len(right), len(right)) if right else None


def difference(outcomes, method, against, **facts):
    chosen = where(outcomes, **facts)
    if not where(chosen, method=method) or not where(chosen, method=against):
        return None
    return paired_difference(chosen, method, against)


def last(results):
    return where(results.model, suite="last")


def comparable(results):
    """Of `last` the contexts in which every budget is larger than sink + window: 1/20 of 1024 tokens is not."""
    return [row for row in last(results) if row["length"] >= 4096]


def attended(results):
    """(length, method) -> (sink, window, selected) at the last step of the last question."""
    return {(row["length"], row["method"]): (row["sink"], row["window"], row["selected"]) for row in last(results)}


def needle_cells(results, method, bins=10):
    """{(length, depth bin): (share of the needles that full attention finds, their number)} of niah."""
    outcomes = where(last(results), task="niah")
    key = lambda row: (row["length"], row["context"], row["question"])
    full = {key(row) for row in where(outcomes, method="full") if row["right"]}
    cells = collections.defaultdict(list)
    for row in where(outcomes, method=method):
        if row["depth"] is not None and (method == "full" or key(row) in full):
            cells[row["length"], min(bins - 1, int(row["depth"] * bins))].append(row["right"])
    return {cell: (sum(right) / len(right), len(right)) for cell, right in cells.items()}


def needles_found(results, method):
    """Of the needles that full attention finds: (share, number)."""
    cells = needle_cells(results, method).values()
    count = sum(number for _, number in cells)
    return (sum(share * number for share, number in cells) / count, count) if count else None


# ---- Vectors

def index_name(row):
    return f"pq{row['subspaces']}x{row['bits']}"


def best_index(results, codebook_tokens=None):
    """The accounting row of the index that covers most of the retrieval layer's attention within INDEX_GOAL; None
    when none does. Of one index with several epoch lengths, the shortest epoch that fits."""
    fitting = [row for row in results.accounting
               if row["index_over_keys"] <= INDEX_GOAL and codebook_tokens in (None, row["codebook_tokens"])]
    known = [(found[0], -row["codebook_tokens"], row) for row in fitting
             if (found := mean(where(results.grid, method=index_name(row), budget="1/10"), "mass_vs_oracle"))]
    return max(known, key=lambda item: item[:2])[2] if known else None


def default_epoch_row(results, best):
    found = where(results.accounting, subspaces=best["subspaces"], bits=best["bits"], codebook_tokens=DEFAULT_EPOCH)
    return found[0] if found else None


def iteration_curve(results, method):
    """[(k-means rounds, mass relative to exact top-k)] of the retrieval layer."""
    rows = where(results.iterations, method=method, budget="1/10")
    return [(count, mean(where(rows, iterations=count), "mass_vs_oracle")[0]) for count in sorted(values(rows, "iterations"))]


def rounds_to(curve, share=0.99):
    return next(count for count, mass in curve if mass >= share * curve[-1][1]) if curve else None


def figure_rows(results):
    """The rows of the area `judge`."""
    best = best_index(results)
    name = index_name(best)
    of_best = where(results.grid, method=name, budget="1/10")
    default = default_epoch_row(results, best)
    epoch = f"m={best['subspaces']} b={best['bits']}, codebook_tokens={best['codebook_tokens']}"
    standard = where(results.captured, layer=1, budget="1/10", task=RETRIEVAL_TASKS)

    def row(name, value, unit, better, goal, against, samples=None, spread=None):
        return {"area": "judge", "name": name, "value": value, "unit": unit, "better": better, "goal": goal,
                "against": against, "samples": samples, "spread": spread}

    mass, recall = mean(of_best, "mass_vs_oracle"), mean(of_best, "recall")
    found, curve = needles_found(results, f"{name}@1/10"), iteration_curve(results, name)
    rows = [
        row("mass_vs_oracle_r10", mass[0], "share", "higher", 0.97,
            f"exact top-k of the group; {epoch}; retrieval layer, niah and mq of 8K to 32K tokens, which one codebook covers",
            mass[2], mass[1]),
        row("recall_r10", recall[0], "share", "higher", None, f"exact top-k of the group; {epoch}", recall[2], recall[1]),
        row("needle_found_r10", found[0] if found else None, "share", "higher", 0.99,
            f"needles that full attention finds; m={best['subspaces']} b={best['bits']}" if found
            else f"{name} was not asked end to end", found[1] if found else None),
        row("index_bytes_over_keys", best["index_over_keys"], "share", "lower", INDEX_GOAL,
            f"{best['tokens']} tokens, d {best['dim']}, fp16 keys; {epoch}; {default['index_over_keys']:.4f} at the "
            f"default codebook_tokens={DEFAULT_EPOCH}" if default else epoch),
        row("iterations_to_99pct_of_final_mass", rounds_to(curve), "k-means rounds", "lower", None,
            f"mass after {curve[-1][0]} rounds" if curve else "not run"),
    ]
    plain = best_index(results, DEFAULT_EPOCH)
    value = mean(where(results.grid, method=index_name(plain), budget="1/10"), "mass_vs_oracle") if plain else None
    rows.append(row("mass_vs_oracle_r10_default_epoch", value[0] if value else None, "share", "higher", None,
                    f"best index within 1/50 at codebook_tokens={DEFAULT_EPOCH}: m={plain['subspaces']} b={plain['bits']}, "
                    f"{plain['index_over_keys']:.4f} of the keys" if plain else "no index fits",
                    value and value[2], value and value[1]))
    for method in ("pq4x8", "pq2x6"):
        value = mean(where(standard, method=method), "mass_vs_oracle")
        rows.append(row(f"mass_vs_oracle_r10_{method}_all_tasks", value[0] if value else None, "share", "higher", None,
                        "retrieval layer; niah, mq, var, kv at all lengths", value and value[2], value and value[1]))
    return rows

