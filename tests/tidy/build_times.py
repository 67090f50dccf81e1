"""Measures how long a newcomer and a developer wait for the compiler.

build_times.py [--json FILE] [--keep DIRECTORY]
    Clones the committed state into a temporary directory, runs deploy/quickstart.sh there, then edits sources of
    kvstore/ one by one and finishes a unit test after each edit by `tests/run.sh --only`. The compiler cache is
    switched off. Debian's packages must be installed: a download would measure the network.
    --keep puts the clone into DIRECTORY and leaves it there, with the logs of ninja.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A source of the store, and a unit test of what it does.
EDITS = [
    ("kvstore/evict/evictor.cc", "kvstore_evictor_test"),
    ("kvstore/index/builder.cc", "kvstore_build_test"),
    ("kvstore/memory/pool.cc", "kvstore_pool_test"),
    ("kvstore/sequence/sequence.cc", "kvstore_sequence_test"),
    ("kvstore/store/recovery.cc", "kvstore_recovery_test"),
]


def run(clone, *command):
    """Runs a command in the clone without the compiler cache; returns its wall time in seconds."""
    environment = {**os.environ, "CCACHE_DISABLE": "1", "PQCACHED_SKIP_PACKAGES": "1"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}")
    print(f"{seconds:7.1f} s  {' '.join(map(str, command))}", file=sys.stderr)
    return seconds


def edit(path):
    """Changes the code of a source file, so that its object differs."""
    with path.open("a", encoding="utf-8") as file:
        name = f"kBuildTimesEdit_{path.stem}"
        file.write(f"\nextern const char {name}[];\nconst char {name}[] = __FILE__;\n")


def edit_seconds(clone):
    """Returns the seconds from each edit to its finished test."""
    for _, test in EDITS:
        run(clone, "tests/run.sh", "--only", test)
    seconds = []
    for source, test in EDITS:
        edit(clone / source)
        seconds.append(run(clone, "tests/run.sh", "--only", test))
    return seconds


def rows_of(quickstart_seconds, edits):
    def row(name, value, unit, goal, against, **more):
        return {"area": "house", "name": name, "value": round(value, 1), "unit": unit, "better": "lower", "goal": goal,
                "against": against, **more}

    spread = statistics.quantiles(edits, n=4)
    return [
        row("quickstart_minutes_cold", quickstart_seconds / 60, "minutes", 6,
            "deploy/quickstart.sh in a new clone without a compiler cache, its report included; packages were installed"),
        row("edit_to_test_seconds", statistics.median(edits), "s", 20,
            f"an edited .cc of kvstore/, built, and its unit test finished; the slowest took {max(edits):.1f} s",
            samples=len(edits), spread=round(spread[2] - spread[0], 1)),
    ]


def measured(clone):
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    return rows_of(run(clone, "deploy/quickstart.sh"), edit_seconds(clone))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows for tests/figures.py")
    parser.add_argument("--keep", type=pathlib.Path, help="an empty directory for the clone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measured(arguments.keep.resolve() if arguments.keep else pathlib.Path(directory) / "pqcached")
    for row in rows:
        print(f"{row['name']}: {row['value']} {row['unit']} (goal: at most {row['goal']})")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
