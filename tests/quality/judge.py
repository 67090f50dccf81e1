#!/usr/bin/python3
"""The judge: how good are the selections, against exact ones, at what price in bytes?

    tests/quality/judge.py [--full] [--out DIR] [--build DIR] [--only STAGE,...] [--rows FILE]

Writes CSV files and one self-contained page, DIR/report.html (default: build/judge). Without --full a small subset,
about half a minute; with it everything, about 20 minutes on 2 cores. --only: model, captured, grid, iterations, generated,
bytes, report; what is left out is taken from DIR's CSV files. --build: a build folder that is there; default:
build/release, built first.
--rows: the rows of the area `judge` for tests/figures.sh, as JSON.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import time

import model_study
import report
import sidecar
import vector_plan
from analysis import figure_rows
from methods import load_client

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from figures import machine  # noqa: E402  (of the folder above)

DATA = ROOT / "tests/tinylm"
TARGETS = ["pqcached", "pqcached_client", "pqcached_rpc", "tinylm_judge", "tinylm_capture"]
VECTORS = ["captured", "grid", "iterations", "generated"]
STAGES = ["model", *VECTORS, "bytes", "report"]


def say(words):
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def built():
    build = ROOT / "build/release"
    subprocess.run(["cmake", "--preset", "release"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", build, "--target", *TARGETS], cwd=ROOT, check=True, stdout=sys.stderr)
    return build


def measure(build, out, full, stages):
    keep = lambda name, rows: model_study.write_csv(out / f"{name}.csv", rows)
    if "model" in stages:
        outcomes, builds = model_study.run(build, DATA, full)
        keep("model", outcomes)
        keep("builds", builds)
    pqcached = load_client(build)
    if vectors := [name for name in VECTORS if name in stages]:
        with sidecar.running(build) as endpoint:
            plan = vector_plan.Plan(build, DATA, pqcached, endpoint, full, say)
            for name in vectors:
                keep(name, getattr(plan, name)())
    if "bytes" in stages:
        grid, epochs = (None, (32768, 65536, 131072)) if full else (vector_plan.QUICK_GRID, (32768, 131072))
        keep("accounting", vector_plan.accounting(build, pqcached, grid=grid, epochs=epochs, say=say))
        if full:
            keep("epochs", vector_plan.epoch_study(build, pqcached, say=say))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/judge")
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--rows", type=pathlib.Path)
    arguments = parser.parse_args()
    stages = arguments.only.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(STAGES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)

    if set(stages) != {"report"}:
        measure((arguments.build or built()).resolve(), arguments.out, arguments.full, stages)
    subset = "" if arguments.full or stages == ["report"] else "; the quick subset: few questions, wide intervals"
    results = report.write(arguments.out, f"{machine()}, {datetime.date.today().isoformat()}{subset}")
    if arguments.rows:
        arguments.rows.write_text(json.dumps(figure_rows(results), indent=1))
    print(arguments.out / "report.html")


if __name__ == "__main__":
    main()
