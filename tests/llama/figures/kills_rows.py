#!/usr/bin/env python3
"""Tokens changed by 1,000 kills, freezes and new starts of the sidecar, and the longest wait of a node: from the test in sidecar_test.py.

kills_rows.py BUILD [KILLS]   prints the rows
"""

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from rows import row  # noqa: E402

KILLS = 1000
CHANGED_NOTHING = re.compile(r"(\d+) kills changed no token: .* selected in (\d+) of (\d+) nodes; the longest wait was ([\d.]+) ms")


def kills_rows(build, kills=KILLS):
    """The test fails, and so does this, when a logit of a token differs by more than 1e-4 from that of a run without a sidecar."""
    ended = subprocess.run(
        [sys.executable, HERE.parent / "sidecar_test.py", build, build / "client/libggml-pqcached.so",
         "NewestVersion.test_random_kills_change_nothing"], env={**os.environ, "PQCACHED_LLAMA_KILLS": str(kills)}, capture_output=True, text=True)
    found = CHANGED_NOTHING.search(ended.stdout)
    if ended.returncode != 0 or found is None:
        raise RuntimeError(ended.stdout + ended.stderr[-4000:])
    count, selected, nodes, wait = found.groups()
    against = (f"{count} kills of a sidecar's worker or of all of it, freezes and new starts at random instants; four engines at a time; tokens "
               f"were selected in {selected} of {nodes} nodes")
    return [row("llama_tokens_changed_by_kills", 0, 0, against, "tokens", "lower"),
            row("llama_worst_wait_ms", float(wait), 5, f"the longest time that a node waited for the client, beside these {count} kills", "ms",
                "lower")]


if __name__ == "__main__":
    for each in kills_rows(pathlib.Path(sys.argv[1]).resolve(), *map(int, sys.argv[2:])):
        print(each["name"], each["value"], each["unit"], "goal", each["goal"], each["against"])
