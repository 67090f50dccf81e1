"""The judge's report: one self-contained HTML file from its CSV files, for a light and a dark page.

report.py DIRECTORY: writes DIRECTORY/report.html, DIRECTORY/summary/*.csv and DIRECTORY/*.svg (the pictures of the README).
"""

import html
import math
import pathlib
import sys

import charts
import papers
import summaries
from analysis import (INDEX_GOAL, RETRIEVAL_TASKS, accuracy, attended, best_index, comparable, difference, figure_rows, index_name,
                      iteration_curve, last, load, mean, needle_cells, needles_found, values, where)
from vector_study import BUDGETS

SIDES = ["oracle", "pq4x8", "pq2x6", "window"]
STYLE = """
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}main{max-width:1120px;margin:0 auto;padding:28px 22px 80px}
h1{font-size:27px;margin:0 0 4px}h2{font-size:20px;margin:46px 0 6px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:15.5px;margin:22px 0 4px}p{max-width:82ch;margin:6px 0 12px}.soft{color:var(--soft)}small{color:var(--soft)}
table{border-collapse:collapse;margin:8px 0 16px;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:4px 8px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--soft);font-size:12.5px;vertical-align:bottom}td:first-child,th:first-child{text-align:left;padding-left:0}
td.left,th.left{text-align:left;white-space:normal}td small{display:block;font-size:11.5px;line-height:1.25}
.scroll{overflow-x:auto}.charts{display:flex;flex-wrap:wrap;gap:14px 22px;margin:10px 0 16px}svg{max-width:100%;height:auto}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(262px,1fr));gap:12px;margin:16px 0}
.card{background:var(--panel);border-radius:8px;padding:12px 14px}.card b{display:block;font-size:25px;font-weight:650;line-height:1.25}
.card code{font-size:11.5px;color:var(--soft);overflow-wrap:anywhere}.good{color:var(--good)}.bad{color:var(--bad)}
code{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.92em}summary{cursor:pointer;color:var(--soft);margin:6px 0}
nav a{color:inherit;margin-right:14px;white-space:nowrap}.paper{border-left:3px solid var(--line);padding-left:16px}
"""


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
    outcomes, head = comparable(results), ["method"] + [f"{budget} of tokens" if "/" in budget else f"{budget} tokens" for budget in BUDGETS]
    rows = []
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
    return table(head, rows) + f"<p class='soft'>{full[1]} questions about contexts of 4096 tokens and more, the same for every cell; ± is half of the 95 % interval, over contexts. Of 1024 tokens, 1/20 is less than sink + window; they stand in the tables below.</p>"


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
            row = [f"{task} {charts.tokens(length)}", f"{full[1]}<small>{len(values(where(outcomes, **facts), 'context'))} contexts</small>",
                   f"{full[0]:.2f}"]
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
    return table([", ".join(split), "questions"] + [label(m) + (f" {m.partition('@')[2]}" if "@" in m else "") for m in methods], rows)


# ---- Vectors

def vector_table(results, rows, groups, metric="mass_vs_oracle"):
    made = []
    for name, facts in groups:
        chosen = where(rows, budget="1/10", **facts)
        if chosen:
            made.append([name, f"{mean(chosen, 'effective_tokens')[0]:.0f}", share(mean(where(chosen, method='oracle'), 'mass')[0])]
                        + [with_interval(mean(where(chosen, method=m), metric)) for m in ("flat", "pq4x8", "pq2x6", "window")]
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
            groups.append((f"layer {layer}, kv head {head}, retrieval tasks", {"layer": layer, "kv_head": head, "task": RETRIEVAL_TASKS}))
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
    size = {(row["subspaces"], row["bits"]): row["index_over_keys"] for row in where(results.accounting, epoch_tokens=131072)
            or where(results.accounting, epoch_tokens=default_epoch)}
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
                        title="Quality against k-means rounds", height=300, x_ticks=sorted({p[0] for p in points} & {1, 2, 3, 5, 10, 20, 30}))


def axis_charts(results):
    made = []
    for axis in values(results.generated, "axis"):
        rows = where(results.generated, axis=axis, budget="1/10")
        places = values(rows, "at")
        series = {}
        for side in ("flat", "pq4x8", "pq2x6", "window"):
            series[side] = [(i, mean(where(rows, at=place, method=side), "mass_vs_oracle")[0]) for i, place in enumerate(places)]
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
            made.append([f"{axis}: {place}", cell("oracle", "effective_tokens", 0), rows[0]["measured_distance"], cell("oracle", "mass")]
                        + [cell(m, "mass_vs_oracle") for m in ("flat", "pq4x8", "pq2x6", "window", "random")]
                        + [cell(m, "recall") for m in ("flat", "pq4x8", "pq2x6")]
                        + [cell(m, "found", 2) for m in ("oracle", "pq4x8", "pq2x6", "window")]
                        + [cell(m, "output_error") for m in ("oracle", "pq4x8", "pq2x6")])
    return table(["setting", "effective<br>tokens", "query<br>distance", "exact<br>covers", "flat", "m=4 b=8", "m=2 b=6",
                  "window", "random", "recall<br>flat", "<br>m=4 b=8", "<br>m=2 b=6", "needle<br>exact", "<br>m=4 b=8",
                  "<br>m=2 b=6", "<br>window", "error<br>exact", "<br>m=4 b=8", "<br>m=2 b=6"], made)


def accounting_table(results):
    epochs, made = values(results.accounting, "epoch_tokens"), []
    for m, b in dict.fromkeys((row["subspaces"], row["bits"]) for row in results.accounting):
        rows = {row["epoch_tokens"]: row for row in where(results.accounting, subspaces=m, bits=b)}
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
            made.append([f"{label(method)}, {budget}"] + [share(mean(where(results.epochs, method=method, budget=budget, epoch_tokens=e),
                        "mass_vs_oracle")[0]) for e in values(results.epochs, "epoch_tokens")])
    return table(["index, budget"] + [f"epoch {charts.tokens(e)}" for e in values(results.epochs, "epoch_tokens")], made)


def section(identity, title, *parts):
    return f"<h2 id='{identity}'>{title}</h2>" + "".join(part if part.startswith("<") or not part else f"<p>{part}</p>" for part in parts)


def page(results, machine):
    rows = figure_rows(results)
    outcomes = comparable(results)
    best = best_index(results)
    tasks = [task for task in values(outcomes, "task")]
    parts = [
        "<h1>How good is a selection?</h1>",
        f"<p class='soft'>pqcached's judge: methods side by side on the same bytes. {escape(machine)}.</p>",
        "<nav><a href='#end'>End to end</a><a href='#needles'>Needles</a><a href='#late'>Question first, long outputs</a>"
        "<a href='#vectors'>Captured vectors</a><a href='#bytes'>Quality and bytes</a><a href='#generated'>Generated vectors</a>"
        "<a href='#papers'>The papers</a><a href='#words'>Words</a></nav>",
        cards(rows),
        section("end", "End to end: the trained model's answers",
                "A small model that was trained for this project answers questions about long contexts. One prefill serves all "
                "methods; everything after the context, the question included, is a selective decode step. pq is the daemon, "
                "asked through its client; exact top-k is computed inside the engine and shares no code with it.",
                accuracy_table(results),
                budget_chart(results, {}, "All tasks, 4K to 32K tokens", 640),
                "<div class='charts'>" + "".join(budget_chart(results, {"task": task}, task, 340) for task in tasks) + "</div>",
                "<h3>Paired differences from exact top-k of the same budget</h3>"
                + charts.intervals([(f"{label(side)}, {budget}", found.mean, found.half_width, gap(found), side)
                                    for side in ("pq4x8", "pq2x6") for budget in BUDGETS
                                    if (found := difference(comparable(results), f"{side}@{budget}", f"oracle@{budget}"))],
                                   x_label="difference in the share of right answers, 95 % interval over contexts"),
                "<h3>By task and length, budget 1/10</h3>" + task_table(results, "1/10"),
                "<details><summary>The same with 256 tokens</summary>" + task_table(results, "256") + "</details>",
                "<h3>What a budget is: all tokens attended = sink + window + selected</h3>" + attended_table(results)),
        section("needles", "Needle in a haystack, over length and depth",
                "niah: a key and its value stand somewhere in filler. Share of the needles answered right, in percent, of those that "
                "full attention answers right (full: of all). The number in a title counts all cells.", needle_maps(results)),
        section("late", "Question first, and long outputs",
                "Question first, as in the paper's Table 3: the question stands before the context, only its last token follows "
                "it. What full attention cannot do tells nothing about a selection: where its column is near 0, the task is beyond this model.",
                suite_table(results, "first", ["task", "length"]),
                "Long output: after a context of 4096 tokens another 2046 tokens with other statements and other filler are decoded one by one "
                "(their codes come from the prefill's centroids), then questions about both parts follow in one conversation.",
                suite_table(results, "long", ["about"])),
        section("vectors", "Captured Q, K, V of the trained model",
                "Layer 1 retrieves (few tokens hold the attention), layer 3 is diffuse. Mass is the attention that sink, window and selected "
                "tokens hold together, divided by what exact top-k of the same size holds; recall is against the group's exact top-k, and per query head "
                "against each head's own. Budget 1/10; ± is half of the 95 % interval over contexts.",
                "<div class='charts'>" + mass_chart(results, 1, "Retrieval layer, retrieval tasks, 4K to 32K") + mass_chart(results, 3, "Diffuse layer, retrieval tasks, 4K to 32K") + "</div>",
                vector_table(results, results.captured, captured_groups(results)),
                "<h3>By the entropy of attention, all layers and tasks</h3>"
                + vector_table(results, results.captured, entropy_groups(results))),
        section("bytes", "Quality and bytes",
                f"Green: index within {INDEX_GOAL:.3g} of the key bytes. The best index within it: {label(index_name(best))} with "
                f"epoch_tokens={best['epoch_tokens']}." if best else "",
                "<div class='charts'>" + grid_chart(results) + iteration_chart(results) + read_chart(results) + "</div>",
                "What the daemon stores for 131072 tokens of one kv head of 128 dims (pqc_sequence_describe), quality on the retrieval "
                "layer's captured vectors (niah and mq, 8K to 32K), seconds per build of one layer with two kv heads, milliseconds per select call.",
                accounting_table(results),
                ("<h3>One codebook for 128K tokens, or one per 32K?</h3><p>Mass relative to exact top-k, generated keys.</p>" + epoch_table(results)) if results.epochs else ""),
        section("generated", "Generated vectors: one statistic at a time",
                "Keys with features, topics, sinks and RoPE, queries with a set entropy; one thing changes per chart. Means of three seeds, budget 1/10; "
                "16K tokens, 128 dims, 4 query heads per kv head where nothing else is said.",
                legend(["flat", "pq4x8", "pq2x6", "window"]) + axis_charts(results), "<details><summary>All numbers</summary>" + generated_table(results) + "</details>"),
        section("papers", "What the papers report", papers.markup(table)),
        section("words", "Words", "<ul>" + "".join(f"<li>{line}</li>" for line in papers.WORDS) + "</ul>"),
    ]
    return (f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>"
            f"<title>pqcached: the judge</title><style>{charts.variables()}{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>")


def write(directory, machine):
    directory = pathlib.Path(directory)
    results = load(directory)
    (directory / "report.html").write_text(page(results, machine))
    (directory / "accuracy.svg").write_text(charts.standalone(budget_chart(results, {}, "Right answers against budget, contexts of 4K to 32K tokens", 640)))
    grid = grid_chart(results)
    if grid:
        (directory / "grid.svg").write_text(charts.standalone(grid))
    summaries.write(directory, results)
    return results


if __name__ == "__main__":
    write(sys.argv[1], "from saved CSV files")
