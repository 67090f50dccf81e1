"""Small tables of a full run, to be kept beside the findings: DIRECTORY/summary/*.csv."""

import pathlib

from analysis import (accuracy, comparable, difference, iteration_curve, last, mean, values, where)
from model_study import write_csv

METRICS = ("mass", "mass_vs_oracle", "middle_mass_vs_oracle", "recall", "recall_per_query_head", "output_error")


def rounded(found, digits=4):
    return "" if found is None else round(found[0], digits)


def of_budgets(results):
    outcomes, rows = comparable(results), []
    for method in values(outcomes, "method"):
        side, _, budget = method.partition("@")
        against = "full" if side in ("full", "oracle") else f"oracle@{budget}"
        gap = difference(outcomes, method, against)
        share, count = accuracy(outcomes, method)
        rows.append({"method": side, "budget": budget, "questions": count, "right": round(share, 4), "against": against,
                     "difference": round(gap.mean, 4), "half_width_95": round(gap.half_width, 4)})
    return rows


def of_tasks(results):
    outcomes, rows = last(results), []
    for task in values(outcomes, "task"):
        for length in sorted(values(where(outcomes, task=task), "length")):
            facts = {"task": task, "length": length}
            found = {method: accuracy(outcomes, method, **facts) for method in values(outcomes, "method")}
            rows.append({**facts, "questions": found["full"][1],
                         **{method: round(share[0], 4) for method, share in found.items() if share}})
    return rows


def of_captured(results):
    rows = []
    for layer in sorted(values(results.captured, "layer")):
        for task in values(results.captured, "task"):
            for length in sorted(values(where(results.captured, task=task), "length")):
                for budget in values(results.captured, "budget"):
                    for method in ("oracle", "flat", "pq4x8", "pq2x6", "window"):
                        chosen = where(results.captured, layer=layer, task=task, length=length, budget=budget, method=method)
                        if chosen:
                            rows.append({"layer": layer, "task": task, "length": length, "budget": budget, "method": method,
                                         "effective_tokens": rounded(mean(chosen, "effective_tokens"), 1),
                                         **{metric: rounded(mean(chosen, metric)) for metric in METRICS},
                                         "bytes": rounded(mean(chosen, "bytes"), 0), "scanned": rounded(mean(chosen, "scanned"), 0)})
    return rows


def of_grid(results):
    rows = []
    for row in results.accounting:
        chosen = where(results.grid, method=f"pq{row['subspaces']}x{row['bits']}")
        found = {f"{metric}_{name}": rounded(mean(where(chosen, budget=budget), metric))
                 for name, budget in (("r10", "1/10"), ("256", "256"))
                 for metric in ("mass_vs_oracle", "recall", "output_error")}
        rows.append({**row, "index_over_keys": round(row["index_over_keys"], 5), **found})
    return rows


def of_generated(results):
    rows = []
    for axis in values(results.generated, "axis"):
        for place in values(where(results.generated, axis=axis), "at"):
            chosen = where(results.generated, axis=axis, at=place, budget="1/10")
            cell = lambda method, metric, digits=4: rounded(mean(where(chosen, method=method), metric), digits)
            rows.append({"axis": axis, "at": place, "seeds": len({row.get("context") for row in chosen}),
                         "effective_tokens": cell("oracle", "effective_tokens", 1),
                         "query_distance": round(sum(r["measured_distance"] for r in chosen) / len(chosen), 1),
                         "exact_covers": cell("oracle", "mass"),
                         **{f"mass_vs_oracle_{m}": cell(m, "mass_vs_oracle") for m in ("flat", "pq4x8", "pq2x6", "window", "random")},
                         **{f"recall_{m}": cell(m, "recall") for m in ("pq4x8", "pq2x6")},
                         **{f"needle_{m}": cell(m, "found") for m in ("oracle", "pq4x8", "pq2x6")}})
    return rows


def of_iterations(results):
    curves = {method: iteration_curve(results, method) for method in ("pq4x8", "pq2x6")}
    return [{"rounds": count, **{method: round(dict(curve)[count], 4) for method, curve in curves.items()}}
            for count, _ in curves["pq4x8"]]


def of_late(results):
    rows = []
    for suite, split in (("first", ("task", "length")), ("long", ("about",))):
        outcomes = where(results.model, suite=suite)
        for key in sorted({tuple(row[name] for name in split) for row in outcomes}):
            facts = dict(zip(split, key))
            rows.append({"suite": suite, "what": " ".join(map(str, key)), "questions": len(where(outcomes, method="full", **facts)),
                         **{method: round(accuracy(outcomes, method, **facts)[0], 4) for method in values(outcomes, "method")}})
    return rows


def of_epochs(results):
    return [{"method": method, "budget": budget, "codebook_tokens": epoch,
             "mass_vs_oracle": rounded(mean(where(results.epochs, method=method, budget=budget, codebook_tokens=epoch), "mass_vs_oracle"))}
            for method in ("pq4x8", "pq4x6", "pq2x6") for budget in values(results.epochs, "budget")
            for epoch in values(results.epochs, "codebook_tokens")]


def write(directory, results):
    folder = pathlib.Path(directory, "summary")
    folder.mkdir(exist_ok=True)
    for name, rows in {"budgets": of_budgets(results), "tasks": of_tasks(results), "captured": of_captured(results),
                       "grid": of_grid(results), "generated": of_generated(results), "iterations": of_iterations(results),
                       "late": of_late(results), "epochs": of_epochs(results) if results.epochs else []}.items():
        if rows:
            write_csv(folder / f"{name}.csv", rows)

