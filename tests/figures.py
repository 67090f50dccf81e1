"""Joins the rows that the programs of tests/figures.sh wrote, completes them, prints a table.

figures.py DIRECTORY [--json FILE]: every *.json of DIRECTORY is a list of rows without machine and date.
figures.py --markdown FILE: prints the rows of such a FILE, as --json wrote it, as a table for a README.
"""

import argparse
import datetime
import json
import pathlib

KEYS = ["area", "name", "value", "unit", "better", "goal", "against", "samples", "spread", "machine", "date"]


def machine():
    model, cores = "unknown CPU", 0
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            cores += 1
    return f"{model}, {cores} cores"


def verdict(row):
    if row["value"] is None:
        return "not run"
    if row["goal"] is None:
        return ""
    met = row["value"] >= row["goal"] if row["better"] == "higher" else row["value"] <= row["goal"]
    return "met" if met else "MISSED"


def number(value):
    return "-" if value is None else f"{value:.4g}"


def goal_of(row):
    sign = {"higher": ">=", "lower": "<="}.get(row["better"], "")
    return f"{sign} {number(row['goal'])}" if row["goal"] is not None else ""


def print_markdown(rows):
    """Rows of two threads without a goal of their own stand beside those of one."""
    names = {row["name"] for row in rows}

    def single(row):
        base = row["name"].removesuffix("_2t")
        if base == row["name"] or row["goal"] is not None:
            return None
        return next((name for name in (base, base + "_1t") if name in names), None)

    two_threads = {single(row): row for row in rows if single(row)}
    print(f"{rows[0]['machine']}, {rows[0]['date']}.\n")
    print("| row | value | 2 threads | goal | | against |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        if single(row):
            continue
        two = number(two_threads[row["name"]]["value"]) if row["name"] in two_threads else ""
        print(f"| `{row['name']}` | {number(row['value'])} | {two} | {goal_of(row)} | {verdict(row)} | {row['against']} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path, nargs="?")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.markdown:
        print_markdown(json.loads(arguments.markdown.read_text()))
        return
    if not arguments.directory:
        parser.error("name a directory of rows, or --markdown FILE")

    common = {"machine": machine(), "date": datetime.date.today().isoformat()}
    rows = []
    for path in sorted(arguments.directory.glob("*.json")):
        for row in json.loads(path.read_text()):
            complete = {**dict.fromkeys(KEYS), **row, **common}
            if set(complete) != set(KEYS):
                raise SystemExit(f"{path.name}: row {row.get('name')} has unknown keys {set(complete) - set(KEYS)}")
            rows.append(complete)

    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{common['machine']}, {common['date']}")
    print(f"{'area':8} {'row':44} {'value':>10} {'goal':>10}  {'':7} {'spread':>9} {'samples':>7}  against")
    for row in rows:
        print(f"{row['area']:8} {row['name']:44} {number(row['value']):>10} {goal_of(row):>10}  {verdict(row):7} "
              f"{number(row['spread']):>9} {row['samples'] or '':>7}  {row['against'] or ''}")


if __name__ == "__main__":
    main()
