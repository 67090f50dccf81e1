"""Collects the rows that the programs of tests/figures.sh wrote, prints them, and keeps the page of all figures.

figures.py DIRECTORY [--json FILE] [--no-page] [--check]
    Reads every *.json of DIRECTORY (a list of rows without machine and date) and the file `seconds` (an area and
    its duration in each line), completes the rows, prints a table, and updates tests/figures.json and
    tests/FIGURES.md. --no-page leaves these two alone. --check then lists the rows of DIRECTORY that miss their
    goal, and exits with 1 if there are any; rows that could not run are named, and miss nothing.
figures.py --page
    Writes tests/FIGURES.md from tests/figures.json, tests/long.json and tests/figures_notes.md; measures nothing.
"""

import argparse
import datetime
import json
import pathlib
import re
import textwrap

TESTS = pathlib.Path(__file__).resolve().parent
DATA, NOTES, PAGE = TESTS / "figures.json", TESTS / "figures_notes.md", TESTS / "FIGURES.md"
SUITES = TESTS / "long.json"  # of tests/long.py
MINUTES = "figures_minutes"  # name of the row with the duration of an area
MINUTES_GOAL = 180  # of all areas together, on two cores

KEYS = ["area", "name", "value", "unit", "better", "goal", "against", "samples", "spread", "machine", "date"]
# Added in figures.json: the instruction set is always there, the others where there is something to say.
PAGE_KEYS = KEYS + ["instruction_set", "remark", "source"]

# What tests/figures.sh measures.
RUN_AREAS = ["house", "quality", "kernels", "local", "engine", "judge", "systems", "llama", "transformers", "recovery", "travel", "gpu"]
# Sections of the page, in their order. A row of an area that is not listed gets a section at the end.
AREAS = {
    "house": "Prose and size of the tree",
    "quality": "Answers of the trained model with its KV in the sidecar",
    "judge": "Selections compared with exact top-k: answers and captured vectors",
    "systems": "What methods of other systems gain in this one",
    "quickstart": "The report of deploy/quickstart.sh",
    "kernels": "Kernels against their limits",
    "kernels by hand": "Kernels, measured by hand",
    "local": "Client and sidecar on one host",
    "engine": "What an engine gains: shared turns, exact attention, waits",
    "llama": "llama.cpp with the plug-in, beside llama.cpp",
    "transformers": "Models in Hugging Face Transformers, beside its own cache",
    "ingest by hand": "Ingest, measured by hand",
    "store by hand": "Store, measured by hand",
    "recovery": "Faults survived, and what was lost",
    "travel": "Contexts and calls that leave the host",
    "gpu": "Kernels and steps on a GPU",
}

# Areas whose rows come from more than one run: there a run replaces only the rows that it names.
IN_PARTS = {"house", "engine", "llama", "recovery", "systems", "transformers", "travel"}

HEAD = """\
# Figures

Everything that this project measures, as measured last. This page is generated: do not edit it.

    tests/figures.sh [AREA...]          # measures, then updates tests/figures.json and this page
    tests/figures.sh --no-page ...      # measures and prints only
    python3 tests/figures.py --page     # writes this page again, e.g. after an edit of the notes

A run replaces the rows of its areas that were measured with the same instruction set (the best one
that the kernels can use on the machine). Rows of other areas and of other instruction sets stay. An
area of which nothing could run replaces no measured row. In `house`, `engine`, `recovery` and
`systems`, a run replaces only the rows that it names.

How to read a table:

- **value** is the median where a row has several samples. The unit `x` is a ratio to the column
  *against*: `_vs_` names say how many times as fast (higher is better), `_over_` names how many
  times as much time (lower is better).
- **spread** is the distance between the quartiles of the samples; in `quality` and `judge` it is
  half of the 95 % interval over contexts.
- **goal** is the smallest or largest acceptable value. **MISSED** goals stay in the table.
- Names that end in `_2t` ran on two threads, `_f16` on fp16 rows; `_s10` selected a tenth of the
  tokens, `_1024` 1024 tokens. `_avx2` limited our code to AVX2 on a machine with more, and
  follows the row of the same name without that limit.
- *source* marks rows that no program of `tests/figures.sh` measures, and the README that quoted
  them first. They stay until they are measured and edited by hand.

Studies over several parameters are tables in the notes of their area, kept in
[`figures_notes.md`](figures_notes.md).
"""


def machine():
    model, cores = "unknown CPU", 0
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            cores += 1
    return f"{model}, {cores} cores"


def instruction_set(flags):
    """The best form of the kernels on a CPU with these flags, by the names of kernels/base/exec.h."""
    if "asimd" in flags:
        return "neon"
    ladder = [
        ("avx2", {"avx2", "fma", "f16c"}),
        ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        ("avx512vbmi", {"avx512vbmi", "avx512_vbmi2"}),
        ("avx512bf16", {"avx512_bf16"}),
    ]
    best = "portable"
    for name, needed in ladder:
        if not needed <= flags:
            break
        best = name
    return best


def machine_flags():
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def verdict(row):
    if row["value"] is None:
        return "not run"
    if row["goal"] is None:
        return ""
    met = row["value"] >= row["goal"] if row["better"] == "higher" else row["value"] <= row["goal"]
    return "met" if met else "MISSED"


def number(value):
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"


def goal_of(row):
    sign = {"higher": ">=", "lower": "<="}.get(row["better"], "")
    return f"{sign} {number(row['goal'])}" if row["goal"] is not None else ""


def merged(kept, run):
    """The rows of the page after a run: those of its areas (or parts of areas) and instruction sets are replaced."""
    def place(row):
        return row["area"], row["instruction_set"], row["name"] if row["area"] in IN_PARTS else None

    measured = {place(row) for row in run if row["value"] is not None}
    known = {place(row) for row in kept if row["value"] is not None}
    replaced = {place(row) for row in run if place(row) in measured or place(row) not in known}
    return [row for row in kept if place(row) not in replaced] + [row for row in run if place(row) in replaced]


def duration_rows(rows, seconds):
    """A row with the duration of each area of which something could run."""
    measured = {row["area"] for row in rows if row["value"] is not None}
    return [{**dict.fromkeys(KEYS), "area": area, "name": MINUTES, "value": round(seconds[area] / 60, 1), "unit": "min",
             "better": "lower", "against": "tests/figures.sh on this area, without the build"}
            for area in seconds if area in measured]


def durations_line(rows):
    """What the page says about the durations of all areas: the latest one of each."""
    latest = {}
    for row in rows:
        if row["name"] == MINUTES and row["date"] >= latest.get(row["area"], row)["date"]:
            latest[row["area"]] = row
    total = sum(row["value"] for row in latest.values())
    unknown = [area for area in RUN_AREAS if area not in latest]
    line = f"The areas of `tests/figures.sh` took {number(total)} minutes together"
    if unknown:
        line += f" (not timed yet: {', '.join(unknown)})"
    return f"{line}; goal: <= {MINUTES_GOAL} minutes on two cores{', **MISSED**' if total > MINUTES_GOAL else ''}."


def suite_lines(suites):
    """The table of the suites of tests/long.sh and their last runs."""
    lines = ["", "## Long suites, by their last run", "", "`tests/long.sh NAME` runs one of them, and records the result here.", "",
             "| name | content | result | minutes | machine | date |", "|---|---|---|---|---|---|"]
    for suite in suites:
        result = suite.get("result", "not run yet")
        cells = [f"`{suite['name']}`", suite["content"], "**failed**" if result == "failed" else result,
                 number(suite["minutes"]) if "minutes" in suite else "", suite.get("machine"), suite.get("date")]
        lines.append("| " + " | ".join(cell(text) for text in cells) + " |")
    return lines


def notes_by_area(text):
    """What figures_notes.md says under each `## AREA`."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {area.strip(): note.strip() for area, note in zip(parts[1::2], parts[2::2])}


def cell(text):
    return str(text or "").replace("|", "\\|").replace("\n", " ")


def table_line(row):
    value = number(row["value"])
    shown = value if row["unit"] in (None, "", "count") or row["value"] is None else f"{value} {row['unit']}"
    judged = verdict(row)
    remarks = [row.get("remark"), f"source: {row['source']}" if row.get("source") else None]
    cells = [f"`{row['name']}`", shown, goal_of(row), "**MISSED**" if judged == "MISSED" else judged,
             "" if row["spread"] is None else f"± {number(row['spread'])}", row["against"],
             "; ".join(part for part in remarks if part), row["machine"], row["instruction_set"], row["date"]]
    return "| " + " | ".join(cell(text) for text in cells) + " |"


LIMITED = "_avx2"  # behind the names of rows whose code was limited to that instruction set


def with_limited_beside(rows):
    """The rows, those of limited code behind the ones of the same name without the limit."""
    def place(row):
        return row["name"], row["instruction_set"]

    names = {place(row) for row in rows}
    limited = {}
    for row in rows:
        other = row["name"].removesuffix(LIMITED), row["instruction_set"]
        if row["name"].endswith(LIMITED) and other in names:
            limited[other] = row
    moved = {place(row) for row in limited.values()}
    return [shown for row in rows if place(row) not in moved for shown in (row, limited.get(place(row))) if shown]


def page(rows, notes, suites=()):
    """The text of FIGURES.md."""
    by_area = {}
    for row in rows:
        by_area.setdefault(row["area"], []).append(row)
    areas = [*AREAS, *sorted(area for area in {*by_area, *notes} if area not in AREAS)]
    missed = [row for area in areas for row in by_area.get(area, []) if verdict(row) == "MISSED"]
    with_goal = [row for row in rows if verdict(row) in ("met", "MISSED")]
    lines = [HEAD, f"{len(with_goal) - len(missed)} of {len(with_goal)} goals are met."]
    if missed:
        names = ", ".join(f"`{row['name']}`" for row in missed)
        lines.append(textwrap.fill(f"Missed: {names}.", 100, break_on_hyphens=False))
    lines += ["", textwrap.fill(durations_line(rows), 100)]
    for area in areas:
        if area not in by_area and area not in notes:
            continue
        lines += ["", f"## {area}: {AREAS[area]}" if area in AREAS else f"## {area}"]
        if area in by_area:
            lines += ["", "| name | value | goal | | spread | against | remark | machine | instruction set | date |",
                      "|---|---|---|---|---|---|---|---|---|---|"]
            lines += [table_line(row) for row in with_limited_beside(by_area[area])]
        if area in notes:
            lines += ["", "### Notes", "", notes[area]] if area in by_area else ["", notes[area]]
    lines += suite_lines(suites)
    return "\n".join(lines) + "\n"


def data_text(rows):
    """One row a line, so that a new run is a readable difference."""
    kept = [{key: row[key] for key in PAGE_KEYS if key in row and (key in KEYS or row[key] is not None)} for row in rows]
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept) + "\n]\n"


def write_page():
    PAGE.write_text(page(json.loads(DATA.read_text()), notes_by_area(NOTES.read_text()), json.loads(SUITES.read_text())))


def seconds_by_area(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return {area: int(seconds) for area, seconds in (line.split() for line in lines)}


def collected(directory, common):
    rows = []
    for path in sorted(directory.glob("*.json")):
        for row in json.loads(path.read_text()):
            complete = {**dict.fromkeys(KEYS), **row, **common}
            if set(complete) != set(KEYS):
                raise SystemExit(f"{path.name}: row {row.get('name')} has unknown keys {set(complete) - set(KEYS)}")
            rows.append(complete)
    return rows


def print_rows(rows):
    print(f"{'area':8} {'row':44} {'value':>10} {'goal':>10}  {'':7} {'spread':>9} {'samples':>7}  against")
    for row in rows:
        print(f"{row['area']:8} {row['name']:44} {number(row['value']):>10} {goal_of(row):>10}  {verdict(row):7} "
              f"{number(row['spread']):>9} {row['samples'] or '':>7}  {row['against'] or ''}")


def check(rows):
    """Prints which goals of a run are missed, and which could not be judged. Returns the exit status."""
    missed = [row for row in rows if verdict(row) == "MISSED"]
    met = [row for row in rows if verdict(row) == "met"]
    absent = [row for row in rows if verdict(row) == "not run" and row["goal"] is not None]
    for row in absent:
        print(f"could not run: {row['area']} {row['name']} (goal {goal_of(row)}): {row['against']}")
    for row in missed:
        print(f"MISSED: {row['area']} {row['name']} is {number(row['value'])}, goal {goal_of(row)}")
    print(f"{len(met)} of {len(met) + len(missed)} goals are met, {len(absent)} could not run")
    return 1 if missed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path, nargs="?")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--no-page", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        write_page()
        return
    if not arguments.directory:
        parser.error("name a directory of rows, or --page")

    common = {"machine": machine(), "date": datetime.date.today().isoformat()}
    rows = collected(arguments.directory, common)
    seconds = seconds_by_area(arguments.directory / "seconds")
    rows += [{**row, **common} for row in duration_rows(rows, seconds)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{common['machine']}, {common['date']}")
    print_rows(rows)
    for area, duration in seconds.items():
        print(f"{area:8} took {duration} s")
    if not arguments.no_page:
        level = instruction_set(machine_flags())
        run = [{**row, "instruction_set": level} for row in rows]
        DATA.write_text(data_text(merged(json.loads(DATA.read_text()), run)))
        write_page()
    if arguments.check:
        raise SystemExit(check(rows))


if __name__ == "__main__":
    main()
