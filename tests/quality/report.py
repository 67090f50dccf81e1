"""The judge's report: one self-contained HTML file from its CSV files, for a light and a dark page.

report.py DIRECTORY: writes DIRECTORY/report.html, DIRECTORY/summary/*.csv and DIRECTORY/*.svg (the pictures of FINDINGS.md).
"""

import pathlib
import sys

import charts
import exhibits
import papers
import summaries
from analysis import INDEX_GOAL, best_index, comparable, figure_rows, index_name, load, values

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


def section(identity, title, *parts):
    """Parts that are no markup yet become paragraphs."""
    return f"<h2 id='{identity}'>{title}</h2>" + "".join(
        part if part.startswith("<") or not part else f"<p>{part}</p>" for part in parts)


def details(summary, markup):
    return f"<details><summary>{summary}</summary>{markup}</details>"


def row_of(*made):
    return f"<div class='charts'>{''.join(made)}</div>"


def end_to_end(results):
    tasks = values(comparable(results), "task")
    return section(
        "end", "End to end: the trained model's answers",
        "A small model that was trained for this project answers questions about long contexts. One prefill serves all methods; "
        "everything after the context, the question included, is a selective decode step. pq is the daemon, asked through its "
        "client; exact top-k is computed inside the engine and shares no code with it.",
        exhibits.accuracy_table(results),
        exhibits.budget_chart(results, {}, "All tasks, 4K to 32K tokens", 640),
        row_of(*(exhibits.budget_chart(results, {"task": task}, task, 340) for task in tasks)),
        "<h3>Paired differences from exact top-k of the same budget</h3>", exhibits.difference_chart(results),
        "<h3>By task and length, budget 1/10</h3>", exhibits.task_table(results, "1/10"),
        details("The same with 256 tokens", exhibits.task_table(results, "256")),
        "<h3>What a budget is: all tokens attended = sink + window + selected</h3>", exhibits.attended_table(results))


def needles(results):
    return section(
        "needles", "Needle in a haystack, over length and depth",
        "niah: a key and its value stand somewhere in filler. Share of the needles answered right, in percent, of those that full "
        "attention answers right (full: of all). The number in a title counts all cells.", exhibits.needle_maps(results))


def late(results):
    return section(
        "late", "Question first, and long outputs",
        "Question first, as in the paper's Table 3: the question stands before the context, only its last token follows it. What "
        "full attention cannot do tells nothing about a selection: where its column is near 0, the task is beyond this model.",
        exhibits.suite_table(results, "first", ["task", "length"]),
        "Long output: after a context of 4096 tokens another 2046 tokens with other statements and other filler are decoded one by "
        "one (their codes come from the prefill's centroids), then questions about both parts follow in one conversation.",
        exhibits.suite_table(results, "long", ["about"]))


def captured(results):
    return section(
        "vectors", "Captured Q, K, V of the trained model",
        "Layer 1 retrieves (few tokens hold the attention), layer 3 is diffuse. Mass is the attention that sink, window and selected "
        "tokens hold together, divided by what exact top-k of the same size holds; recall is against the group's exact top-k, and "
        "per query head against each head's own. Budget 1/10; ± is half of the 95 % interval over contexts.",
        row_of(exhibits.mass_chart(results, 1, "Retrieval layer, retrieval tasks, 4K to 32K"),
               exhibits.mass_chart(results, 3, "Diffuse layer, retrieval tasks, 4K to 32K")),
        exhibits.vector_table(results.captured, exhibits.captured_groups(results)),
        "<h3>By the entropy of attention, all layers and tasks</h3>",
        exhibits.vector_table(results.captured, exhibits.entropy_groups(results)))


def quality_and_bytes(results):
    best = best_index(results)
    epochs = "" if not results.epochs else (
        "<h3>One codebook for 128K tokens, or one per 32K?</h3><p>Mass relative to exact top-k, generated keys.</p>"
        + exhibits.epoch_table(results))
    return section(
        "bytes", "Quality and bytes",
        f"Green: index within {INDEX_GOAL:.3g} of the key bytes. " + (
            f"The best index within it: {exhibits.label(index_name(best))} with codebook_tokens={best['codebook_tokens']}." if best else ""),
        row_of(exhibits.grid_chart(results), exhibits.iteration_chart(results), exhibits.read_chart(results)),
        "What the daemon stores for 131072 tokens of one kv head of 128 dims (pqc_sequence_describe), quality on the retrieval layer's "
        "captured vectors (niah and mq, 8K to 32K), seconds per build of one layer with two kv heads, milliseconds per select call.",
        exhibits.accounting_table(results), epochs)


def generated(results):
    return section(
        "generated", "Generated vectors: one statistic at a time",
        "Keys with features, topics, sinks and RoPE, queries with a set entropy; one thing changes per chart. Means over seeds, budget "
        "1/10; 16K tokens, 128 dims, 4 query heads per kv head where nothing else is said.",
        exhibits.legend(["flat", "pq4x8", "pq2x6", "window"]), exhibits.axis_charts(results),
        details("All numbers", exhibits.generated_table(results)))


def page(results, machine):
    places = {"end": "End to end", "needles": "Needles", "late": "Question first, long outputs", "vectors": "Captured vectors",
              "bytes": "Quality and bytes", "generated": "Generated vectors", "papers": "The papers", "words": "Words"}
    parts = [
        "<h1>How good is a selection?</h1>",
        f"<p class='soft'>pqcached's judge: methods side by side on the same bytes. {exhibits.escape(machine)}.</p>",
        "<nav>" + "".join(f"<a href='#{place}'>{name}</a>" for place, name in places.items()) + "</nav>",
        exhibits.cards(figure_rows(results)),
        end_to_end(results), needles(results), late(results), captured(results), quality_and_bytes(results), generated(results),
        section("papers", "What the papers report", papers.markup(exhibits.table)),
        section("words", "Words", "<ul>" + "".join(f"<li>{line}</li>" for line in papers.WORDS) + "</ul>"),
    ]
    return ("<!doctype html><html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width,initial-scale=1'><title>pqcached: the judge</title>"
            f"<style>{charts.variables()}{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>")


def write(directory, machine):
    directory = pathlib.Path(directory)
    results = load(directory)
    (directory / "report.html").write_text(page(results, machine))
    title = "Right answers against budget, contexts of 4K to 32K tokens"
    (directory / "accuracy.svg").write_text(charts.standalone(exhibits.budget_chart(results, {}, title, 640)))
    (directory / "grid.svg").write_text(charts.standalone(exhibits.grid_chart(results)))
    summaries.write(directory, results)
    return results


if __name__ == "__main__":
    write(sys.argv[1], "from saved CSV files")
