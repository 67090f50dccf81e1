#!/usr/bin/env python3
"""Breaks the code in one place at a time, and reports which tests notice it.

run.py [--set recovery|core] [--build FOLDER] [--json FILE] [--check] [NAME...]

Each entry of recovery.toml or core.toml (--set) is a *mutant*: a text of one source file, its replacement, the promise that the
replacement breaks, and the tests of which at least one must fail. The mutants are applied one after the other to a copy of the
tracked files in FOLDER (default: build/mutants), which is configured as a release build. A mutant that does not compile is not
killed. Before all mutants of a set are tried (no NAME), every test must pass without one; a test that then takes ten times as
long, and more than a minute, fails. --check only checks that each text occurs exactly once in its file. Exit status 1: a mutant
survives, or a check fails.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import tomllib

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
TEST_SECONDS = 900  # when it is not known how long a test takes
LEAST_SECONDS = 60


def load(name):
    """The mutants of a set, with the defaults of the file."""
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    defaults = content.get("defaults", {})
    return [{**defaults, **mutant} for mutant in content["mutant"]]


def faults_of(mutants, root):
    """What is wrong with the entries themselves."""
    faults, seen = [], set()
    for mutant in mutants:
        name = mutant["name"]
        path = root / mutant["file"]
        count = path.read_text().count(mutant["old"]) if path.exists() else 0
        if count != 1:
            faults.append(f"{name}: its text occurs {count} times in {mutant['file']}")
        if mutant["old"] == mutant["new"] or not mutant["tests"] or not mutant["breaks"] or name in seen:
            faults.append(f"{name}: it changes nothing, has no tests, breaks no promise, or is there twice")
        seen.add(name)
    return faults


def copy_tree(target):
    """Copies the tracked files as they are now; files that did not change keep their times."""
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True).stdout.decode().split("\0")
    kept = set()
    for name in filter(None, names):
        source, copy = ROOT / name, target / name
        if not source.is_file():
            continue
        kept.add(copy)
        content = source.read_bytes()
        if copy.exists() and copy.read_bytes() == content:
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        copy.chmod(source.stat().st_mode)
    for copy in [path for path in target.rglob("*") if path.is_file() and path not in kept and "build" not in path.parts]:
        copy.unlink()


def build(tree, tests):
    command = ["cmake", "--build", tree / "build", "--target", *tests]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def failing(tree, mutant, limits):
    """The first test that fails, with the first line that says why; or None. `limits`: seconds, by test."""
    for test in mutant["tests"]:
        program = next(path for path in (tree / "build/tests").rglob(test) if path.is_file())
        if test.startswith("fuzz_"):  # ctest knows the inputs that it runs
            command = ["ctest", "--test-dir", tree / "build", "-R", f"^{test}$", "--output-on-failure"]
        else:
            command = [program] + ([f"--gtest_filter={mutant['filter']}"] if "filter" in mutant else [])
        limit = limits.get(test, TEST_SECONDS)
        try:
            done = subprocess.run(command, cwd=program.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return f"{test}: no end after {limit:.0f} s"
        if done.returncode != 0:
            lines = done.stdout.decode(errors="replace").splitlines()
            reasons = [line for line in lines if "FAULT" in line or "Failure" in line] + [f"status {done.returncode}"]
            return f"{test}: {reasons[0].strip()}"
    return None


def check_without_mutants(tree, mutants):
    """Returns how long each test may take, in seconds."""
    tests = sorted({test for mutant in mutants for test in mutant["tests"]})
    if not build(tree, tests):
        sys.exit("the copy does not build without a mutant")
    limits = {}
    for test in tests:
        begun = time.monotonic()
        if why := failing(tree, {"tests": [test]}, {}):
            sys.exit(f"without a mutant: {why}")
        limits[test] = max(10 * (time.monotonic() - begun), LEAST_SECONDS)
    return limits


def run(tree, mutants, limits):
    """Runs the mutants; returns those that survive."""
    surviving = []
    for mutant in mutants:
        path = tree / mutant["file"]
        original = path.read_text()
        path.write_text(original.replace(mutant["old"], mutant["new"]))
        try:
            if not build(tree, mutant["tests"]):
                killer, verdict = None, "does not compile"
            else:
                killer = failing(tree, mutant, limits)
                verdict = f"killed by {killer}" if killer else "SURVIVES"
        finally:
            path.write_text(original)
        print(f"{mutant['name']}: {verdict}", flush=True)
        if killer is None:
            surviving.append(mutant["name"])
    return surviving


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="recovery", choices=["recovery", "core"])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/mutants")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    mutants = load(arguments.set)
    faults = faults_of(mutants, ROOT)
    if faults:
        sys.exit("\n".join(faults))
    if arguments.check:
        return
    mutants = [mutant for mutant in mutants if not arguments.names or mutant["name"] in arguments.names]
    arguments.build = arguments.build.resolve()
    arguments.build.mkdir(parents=True, exist_ok=True)
    # The compiler cache then finds what the checkout has compiled.
    os.environ.update(CCACHE_BASEDIR=str(arguments.build), CCACHE_NOHASHDIR="1")
    copy_tree(arguments.build)
    subprocess.run(["cmake", "--preset", "release", "-DPQCACHED_CUDA=OFF", "-B", arguments.build / "build"], cwd=arguments.build,
                   stdout=subprocess.DEVNULL, check=True)
    limits = check_without_mutants(arguments.build, mutants) if not arguments.names else {}
    surviving = run(arguments.build, mutants, limits)
    killed = len(mutants) - len(surviving)
    print(f"{killed} of {len(mutants)} mutants were killed")
    if arguments.json:
        row = {"name": f"{arguments.set}_mutants_killed", "value": killed / len(mutants), "samples": len(mutants)}
        arguments.json.write_text(json.dumps([row]) + "\n")
    sys.exit(1 if surviving else 0)


if __name__ == "__main__":
    main()
