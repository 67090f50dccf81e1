"""Prints the ratio of the two rates that read_bench.sh measured, and writes it as a row of tests/figures.py.

read_bench.py OUTPUT [ROWS.json]
"""

import json
import pathlib
import statistics
import sys

NAME = "rdma_read_vs_ib_read_bw_vm"


def rates(text):
    found = {"pull": [], "ib_read_bw": []}
    for line in text.splitlines():
        name, _, rate = line.partition(" ")
        if name in found and rate:
            found[name].append(float(rate))
    return found["pull"], found["ib_read_bw"]


def main():
    pulls, reads = rates(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    if not pulls or len(pulls) != len(reads):
        sys.exit("read_bench.sh has measured nothing")
    ratios = [pull / read for pull, read in zip(pulls, reads)]
    value = round(statistics.median(ratios), 3)
    print(f"{NAME} {value}: {statistics.median(pulls):.1f} of {statistics.median(reads):.1f} MiB/s")
    if len(sys.argv) > 2:
        row = {"area": "travel", "name": NAME, "value": value, "unit": "ratio", "better": "higher", "goal": None,
               "against": "perftest's ib_read_bw: 2 queue pairs, READs of 1 MiB, by turns in one emulated machine with soft-RoCE",
               "samples": len(ratios), "spread": round(max(ratios) - min(ratios), 3)}
        pathlib.Path(sys.argv[2]).write_text(json.dumps([row]), encoding="utf-8")


if __name__ == "__main__":
    main()
