"""Runs one long suite by name, and records how it ended: see tests/long.sh.

long.json has a suite in each line: its name, content, command, the program that it `needs` if there is one, and the
result, minutes, machine and date of its last run. A suite whose program is missing is neither run nor recorded.
"""

import argparse
import datetime
import json
import pathlib
import shutil
import subprocess
import sys
import time

import figures

ROOT = pathlib.Path(__file__).resolve().parents[1]


def machine():
    """This machine, with its GPU where there is one."""
    if shutil.which("nvidia-smi") is None:
        return figures.machine()
    asked = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], check=False, capture_output=True, text=True)
    gpus = asked.stdout.splitlines() if asked.returncode == 0 else []
    return ", ".join([figures.machine(), *gpus[:1]])


def read(path):
    return {suite["name"]: suite for suite in json.loads(path.read_text())}


def record(path, name, last_run):
    """Writes the last run of a suite into the file, one suite in each line."""
    suites = read(path)  # again: a run takes hours
    suites[name].update(last_run)
    lines = ",\n".join(json.dumps(suite, ensure_ascii=False) for suite in suites.values())
    path.write_text(f"[\n{lines}\n]\n")


def run(path, name):
    """Runs a suite and records its end. Returns its exit status."""
    started = time.monotonic()
    status = subprocess.run(["bash", "-c", read(path)[name]["command"]], check=False, cwd=ROOT).returncode
    record(path, name, {"result": "passed" if status == 0 else "failed",
                        "minutes": round((time.monotonic() - started) / 60, 1), "machine": machine(),
                        "date": datetime.date.today().isoformat()})
    return status


def listing(suites):
    lines = []
    for suite in suites.values():
        last = f"{suite['result']} on {suite['date']}, {suite['machine']}" if "result" in suite else "not run yet"
        lines.append(f"{suite['name']:10} {suite['content']} ({last})")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(prog="tests/long.sh", description="Runs a long suite, or lists them.")
    parser.add_argument("name", nargs="?")
    name = parser.parse_args().name
    suites = read(figures.SUITES)
    if name is None:
        print(listing(suites))
        return
    if name not in suites:
        parser.error(f"no suite {name}; there are {', '.join(suites)}")
    needs = suites[name].get("needs")
    if needs and shutil.which(needs) is None:
        parser.error(f"{name} needs {needs}, which is not here: nothing was run")
    status = run(figures.SUITES, name)
    figures.write_page()
    sys.exit(status)


if __name__ == "__main__":
    main()
