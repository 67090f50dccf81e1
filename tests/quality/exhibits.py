"""The tables and charts of the judge's report, each from the results to markup."""

import html
import math

import charts
from analysis import (INDEX_GOAL, RETRIEVAL_TASKS, accuracy, attended, comparable, difference, iteration_curve, last, mean,
                      needle_cells, needles_found, values, where)
from vector_study import BUDGETS

SIDES = ["oracle", "pq4x8", "pq2x6", "window"]


def escape(words):
    return html.escape(str(words))


def table(head, rows, left=()):
    """Cells may hold markup; `left` are columns that are words."""
    mark = lambda i: " class='left'" if i in left else ""
    cells = lambda tag, row: "".join(f"<{tag}{mark(i)}>{cell}</{tag}>" for i, cell in enumerate(row))
    return (f"<div class='scroll'><table><thead><tr>{cells('th', head)}</tr></thead><tbody>"
            + "".join(f"<tr>{cells('td', row)}</tr>" for row in rows) + "</tbody></table></div>")


def share(value, digits=3):
    return "–" if value is None else f"{value:.{digits}f}"


def with_interval(found, digits=3):
    if not found:
        return "–"
    return f"{found[0]:.{digits}f}" + (f"<small>± {found[1]:.{digits}f}</small>" if math.isfinite(found[1]) else "")


def gap(found):
    """A paired difference and its interval."""
    if found is None:
        return ""
    half = f" ± {found.half_width:.3f}" if math.isfinite(found.half_width) else ""
    return f"{found.mean:+.3f}{half}"


def label(method):
    return charts.LABELS.get(method.split("@")[0], method)


def cards(rows):
    made = []
    for row in rows:
        value = "not run" if row["value"] is None else charts.short(row["value"]) if row["unit"] != "share" else (
            f"1/{1 / row['value']:.1f}" if "bytes" in row["name"] else f"{row['value']:.3f}")
        goal = ""
        if row["goal"] is not None and row["value"] is not None:
            met = row["value"] >= row["goal"] if row["better"] == "higher" else row["value"] <= row["goal"]
            wanted = f"1/{1 / row['goal']:.0f}" if "bytes" in row["name"] else f"{row['goal']:g}"
            goal = f"<span class='{'good' if met else 'bad'}'>goal {'≥' if row['better'] == 'higher' else '≤'} {wanted}: " \
                   f"{'met' if met else 'missed'}</span>"
        made.append(f"<div class='card'><code>{row['name']}</code><b>{value}</b>{goal}<br><small>{escape(row['against'])}"
                    f"</small></div>")
    return f"<div class='cards'>{''.join(made)}</div>"


# ---- End to end

def accuracy_table(results):
    outcomes, rows = comparable(results), []
    head = ["method"] + [f"{budget} of tokens" if "/" in budget else f"{budget} tokens" for budget in BUDGETS]
    full = accuracy(outcomes, "full")
    rows.append([label("full")] + [f"{full[0]:.3f}"] * len(BUDGETS))
    for side in SIDES:
        cells = []
        for budget in BUDGETS:
            found = accuracy(outcomes, f"{side}@{budget}")
            versus = gap(difference(outcomes, f"{side}@{budget}", f"oracle@{budget}")) if side != "oracle" else gap(
                difference(outcomes, f"oracle@{budget}", "full"))
            cells.append(f"{found[0]:.3f}<small>{versus}</small>" if found else "–")
        rows.append([label(side) + ("<small>difference from full attention</small>" if side == "oracle" else
                                    "<small>difference from exact top-k</small>")] + cells)
    return table(head, rows) + (
        f"<p class='soft'>{full[1]} questions about contexts of 4096 tokens and more, the same for every cell; ± is half of the "
        "95 % interval, over contexts. Of 1024 tokens, 1/20 is less than sink + window; they stand in the tables below.</p>")


def budget_chart(results, facts, title, width=520):
    outcomes, series = where(comparable(results), **facts), {}
    full = accuracy(outcomes, "full")
    if full is None:
        return ""
    series["full"] = [(i, full[0]) for i in range(len(BUDGETS))]
    for side in SIDES:
        series[side] = [(i, found[0]) for i, budget in enumerate(BUDGETS)
                        if (found := accuracy(outcomes, f"{side}@{budget}"))]
    return charts.lines(series, categories=BUDGETS, x_label="budget: all tokens attended", y_label="right answers",
                        y_range=(-0.03, 1.03), title=f"{title} ({full[1]} questions)", width=width,
                        height=290 if width > 400 else 240, legend=width > 400)


def task_table(results, budget):
    outcomes, rows = last(results), []
    extra = [m for m in ("pq4x6", "pq4x4", "flat", "random") if where(outcomes, method=f"{m}@{budget}")]
    for task in values(outcomes, "task"):
        for length in sorted(values(where(outcomes, task=task), "length")):
            facts = {"task": task, "length": length}
            full = accuracy(outcomes, "full", **facts)
            contexts = len(values(where(outcomes, **facts), "context"))
            row = [f"{task} {charts.tokens(length)}", f"{full[1]}<small>{contexts} contexts</small>", f"{full[0]:.2f}"]
            for side in SIDES + extra:
                found = accuracy(outcomes, f"{side}@{budget}", **facts)
                versus = gap(difference(outcomes, f"{side}@{budget}", f"oracle@{budget}", **facts)) if side != "oracle" else ""
                row.append(f"{found[0]:.2f}<small>{versus}</small>" if found else "–")
            rows.append(row)
    return table(["task, length", "questions", "full"] + [label(side) for side in SIDES + extra], rows) + (
        "<p class='soft'>Small: paired difference from exact top-k.</p>")


def attended_table(results):
    found = attended(results)
    rows = []
    for length in sorted({length for length, _ in found}):
        cells = []
        for budget in BUDGETS:
            parts = found.get((length, f"pq4x8@{budget}"))
            cells.append(f"{sum(parts)}<small>{' + '.join(map(str, parts))}</small>" if parts else "–")
        rows.append([charts.tokens(length)] + cells)
    return table(["context"] + BUDGETS, rows)


def difference_chart(results):
    rows = []
    for side in ("pq4x8", "pq2x6"):
        for budget in BUDGETS:
            found = difference(comparable(results), f"{side}@{budget}", f"oracle@{budget}")
            if found:
                rows.append((f"{label(side)}, {budget}", found.mean, found.half_width, gap(found), side))
    return charts.intervals(rows, x_label="difference in the share of right answers, 95 % interval over contexts")


def needle_maps(results):
    lengths = sorted({row["length"] for row in where(last(results), task="niah")})
    depth = [f"{10 * i} %" for i in range(10)]
    made = []
    for method in ("full", "oracle@1/10", "pq4x8@1/10", "pq2x6@1/10", "pq4x8@256", "pq2x6@256", "window@1/10"):
        cells = {(charts.tokens(length), depth[row]): cell for (length, row), cell in needle_cells(results, method).items()}
        if cells:
            budget = method.partition("@")[2]
            total = needles_found(results, method)
            made.append(charts.heat_map(cells, [charts.tokens(length) for length in lengths], depth, x_label="context",
                                        y_label="depth", title=label(method) + (f", {budget}" if budget else "")
                                        + f": {total[0]:.3f}"))
    return f"<div class='charts'>{''.join(made)}</div>"


def suite_table(results, suite, split):
    outcomes = where(results.model, suite=suite)
    methods, rows = values(outcomes, "method"), []
    for key in sorted({tuple(row[name] for name in split) for row in outcomes}):
        facts = dict(zip(split, key))
        rows.append([" ".join(map(str, key)), len(where(outcomes, method="full", **facts))]
                    + [f"{accuracy(outcomes, method, **facts)[0]:.2f}" for method in methods])
    names = [label(method) + (f" {method.partition('@')[2]}" if "@" in method else "") for method in methods]
    return table([", ".join(split), "questions"] + names, rows)


# ---- Vectors

def vector_table(rows, groups):
    made = []
    for name, facts in groups:
        chosen = where(rows, budget="1/10", **facts)
        if chosen:
            made.append([name, f"{mean(chosen, 'effective_tokens')[0]:.0f}", share(mean(where(chosen, method='oracle'), 'mass')[0])]
                        + [with_interval(mean(where(chosen, method=m), "mass_vs_oracle")) for m in ("flat", "pq4x8", "pq2x6", "window")]
                        + [share(mean(where(chosen, method=m), "recall")[0]) for m in ("pq4x8", "pq2x6")]
                        + [share(mean(where(chosen, method=m), "recall_per_query_head")[0]) for m in ("oracle", "pq4x8", "pq2x6")]
                        + [share(mean(where(chosen, method=m), "output_error")[0]) for m in ("oracle", "pq4x8", "pq2x6")])
    return table(["", "effective<br>tokens", "exact top-k<br>covers", "flat", "m=4 b=8", "m=2 b=6", "window",
                  "recall<br>m=4 b=8", "recall<br>m=2 b=6", "per head:<br>exact", "<br>m=4 b=8", "<br>m=2 b=6",
                  "output error<br>exact", "<br>m=4 b=8", "<br>m=2 b=6"], made)


def captured_groups(results):
    rows, groups = results.captured, []
    for layer in sorted(values(rows, "layer")):
        for task in values(rows, "task"):
            groups.append((f"layer {layer}, {task}", {"layer": layer, "task": task}))
        for head in sorted(values(rows, "kv_head")):
            groups.append((f"layer {layer}, kv head {head}, retrieval tasks",
                           {"layer": layer, "kv_head": head, "task": RETRIEVAL_TASKS}))
    for length in sorted(values(rows, "length")):
        groups.append((f"layer 1, {charts.tokens(length)} tokens", {"layer": 1, "length": length, "task": RETRIEVAL_TASKS}))
    return groups


def entropy_groups(results):
    """One group per decade and a half of effective tokens; a row is one context, layer and kv head."""
    edges, groups = [0, 10, 30, 100, 300, 1000, 3000, 10000, math.inf], []
    for row in results.captured:
        row["entropy_bin"] = next(i for i, edge in enumerate(edges[1:]) if row["effective_tokens"] < edge)
    for i, (low, high) in enumerate(zip(edges, edges[1:])):
        name = f"{low} to {high}" if math.isfinite(high) else f"over {low}"
        groups.append((f"{name} effective tokens", {"entropy_bin": i}))
    return groups


def mass_chart(results, layer, title):
    rows = [row for row in where(results.captured, layer=layer, task=RETRIEVAL_TASKS) if row["length"] >= 4096]
    series = {}
    for side in ("oracle", "flat", "pq4x8", "pq2x6", "window", "random"):
        series[side] = [(i, found[0]) for i, budget in enumerate(BUDGETS)
                        if (found := mean(where(rows, method=side, budget=budget), "mass_vs_oracle"))]
    return charts.lines(series, categories=BUDGETS, x_label="budget: all tokens attended", y_range=(-0.03, 1.03),
                        y_label="attention mass / exact top-k", title=title, height=300)


def grid_chart(results, default_epoch=32768):
    size = {(row["subspaces"], row["bits"]): row["index_over_keys"] for row in where(results.accounting, codebook_tokens=131072)
            or where(results.accounting, codebook_tokens=default_epoch)}
    points = []
    for (m, b), bytes_share in sorted(size.items()):
        found = mean(where(results.grid, method=f"pq{m}x{b}", budget="1/10"), "mass_vs_oracle")
        if found:
            points.append((bytes_share, found[0], str(b), f"m={m}"))
    return charts.scatter(points, x_label="index bytes / key bytes at 128K tokens, d 128, one codebook (log)", y_range=(0.53, 1.04),
                          title="Quality against bytes: m × b, the number in a dot is b",
                          y_label="attention mass / exact top-k", goal_x=INDEX_GOAL, goal_y=0.97) if points else ""


def read_chart(results):
    rows, points = where(results.captured, layer=1, task=("niah", "mq"), length=32768), {}
    for side in ("oracle", "pq4x8", "pq2x6", "window", "random"):
        points[side] = []
        for budget in BUDGETS:
            chosen = where(rows, method=side, budget=budget)
            if chosen:
                points[side].append((mean(chosen, "bytes")[0] / 2 ** 20, mean(chosen, "mass")[0],
                                     f"{label(side)}, {budget}: {mean(chosen, 'mass')[0]:.3f}"))
        points[side].sort()
    full = where(rows, method="full")
    if full:
        points["full"] = [(mean(full, "bytes")[0] / 2 ** 20, 1.0)]
    if not rows:
        return ""
    return charts.lines(points, x_label="MiB read per step and kv head", y_label="attention mass covered", log_x=True,
                        y_range=(-0.03, 1.03), title="Mass covered against bytes read (32K tokens)", height=300,
                        x_ticks=[0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 16])


def iteration_chart(results):
    series = {m: iteration_curve(results, m) for m in ("pq4x8", "pq2x6")}
    points = [point for curve in series.values() for point in curve]
    if not points:
        return ""
    return charts.lines(series, x_label="k-means rounds", y_label="attention mass / exact top-k", log_x=True,
                        title="Quality against k-means rounds", height=300,
                        x_ticks=sorted({p[0] for p in points} & {1, 2, 3, 5, 10, 20, 30}))


def axis_charts(results):
    made = []
    for axis in values(results.generated, "axis"):
        rows = where(results.generated, axis=axis, budget="1/10")
        places = values(rows, "at")
        series = {}
        for side in ("flat", "pq4x8", "pq2x6", "window"):
            series[side] = [(i, mean(where(rows, at=place, method=side), "mass_vs_oracle")[0])
                            for i, place in enumerate(places)]
        names = [charts.tokens(place) if axis == 'length' else charts.short(place) if isinstance(place, (int, float)) else str(place)
                 for place in places]
        made.append(charts.lines(series, categories=names, x_label=axis, y_label="mass / exact top-k", title=axis,
                                 y_range=(-0.03, 1.06), width=340 if max(map(len, names)) < 9 else 520, height=240, legend=False,
                                 joined=all(isinstance(place, (int, float)) for place in places)))
    return f"<div class='charts'>{''.join(made)}</div>"


def legend(names):
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 600 20' width='600' height='20' style=\"{charts.FONT}\">"
            + "".join(charts.legend_of(names, 4, 10, 600)) + "</svg>")


def generated_table(results):
    made = []
    for axis in values(results.generated, "axis"):
        for place in values(where(results.generated, axis=axis), "at"):
            rows = where(results.generated, axis=axis, at=place, budget="1/10")
            cell = lambda method, metric, digits=3: share((mean(where(rows, method=method), metric) or [None])[0], digits)
            made.append([f"{axis}: {place}", cell("oracle", "effective_tokens", 0), rows[0]["measured_distance"],
                         cell("oracle", "mass")]
                        + [cell(m, "mass_vs_oracle") for m in ("flat", "pq4x8", "pq2x6", "window", "random")]
                        + [cell(m, "recall") for m in ("flat", "pq4x8", "pq2x6")]
                        + [cell(m, "found", 2) for m in ("oracle", "pq4x8", "pq2x6", "window")]
                        + [cell(m, "output_error") for m in ("oracle", "pq4x8", "pq2x6")])
    return table(["setting", "effective<br>tokens", "query<br>distance", "exact<br>covers", "flat", "m=4 b=8", "m=2 b=6",
                  "window", "random", "recall<br>flat", "<br>m=4 b=8", "<br>m=2 b=6", "needle<br>exact", "<br>m=4 b=8",
                  "<br>m=2 b=6", "<br>window", "error<br>exact", "<br>m=4 b=8", "<br>m=2 b=6"], made)


def accounting_table(results):
    epochs, made = values(results.accounting, "codebook_tokens"), []
    for m, b in dict.fromkeys((row["subspaces"], row["bits"]) for row in results.accounting):
        rows = {row["codebook_tokens"]: row for row in where(results.accounting, subspaces=m, bits=b)}
        quality = {metric: mean(where(results.grid, method=f"pq{m}x{b}", budget="1/10"), metric) for metric in
                   ("mass_vs_oracle", "recall", "build_seconds", "select_ms")}
        any_row = next(iter(rows.values()))
        cells = [f"m={m} b={b}", f"{any_row['code_bytes'] / any_row['tokens']:.1f}"]
        for epoch in epochs:
            ratio = rows[epoch]["index_over_keys"]
            cells.append(f"<span class='{'good' if ratio <= INDEX_GOAL else ''}'>1/{1 / ratio:.1f}</span>"
                         f"<small>{rows[epoch]['codebook_bytes'] // 1024} KiB centroids</small>")
        made.append(cells + [with_interval(quality["mass_vs_oracle"]), share((quality["recall"] or [None])[0]),
                             share((quality["build_seconds"] or [None])[0], 2), share((quality["select_ms"] or [None])[0], 2)])
    return table(["index", "codes and counts,<br>B/token"] + [f"index / keys,<br>epoch {charts.tokens(e)}" for e in epochs]
                 + ["mass / exact top-k", "recall", "build s", "select ms"], made)


def epoch_table(results):
    made = []
    for method in ("pq4x8", "pq4x6", "pq2x6"):
        for budget in values(where(results.epochs, method=method), "budget"):
            chosen = where(results.epochs, method=method, budget=budget)
            made.append([f"{label(method)}, {budget}"] + [share(mean(where(chosen, codebook_tokens=epoch), "mass_vs_oracle")[0])
                                                          for epoch in values(results.epochs, "codebook_tokens")])
    return table(["index, budget"] + [f"epoch {charts.tokens(e)}" for e in values(results.epochs, "codebook_tokens")], made)
