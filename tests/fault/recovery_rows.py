#!/usr/bin/env python3
"""The figures of area `recovery`: faults that were survived, and what was lost (0, or something is wrong).

recovery_rows.py BUILD --json FILE [--parts PART,...]: runs the fault tests and the model tests of a build folder (target
`recovery_programs`), which say what they have seen in their reports, the mutants (tests/fault/mutants/run.py) and the fuzzers
(tests/fuzz/run.sh --runs). What counts faults or operations is the number done when none failed, else 0. A row that could not
run has value null and says why in `against`.
--parts PART,...: only the rows of these parts (programs, mutants, fuzz), to measure them one after the other.
PQCACHED_FULL_TESTS in the environment: the long forms, which take hours.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Program: the row that counts what it has done.
PROGRAMS = {
    "fault/fault_crash_test": "crash_points_survived",
    "fault/fault_recovery_time": "recovery_ms_per_gib",
    "fault/fault_worker_kill_test": "daemon_kills_survived",
    "fault/fault_client_kill_test": "client_kills_survived",
    "fault/fault_environment_test": "environment_faults_survived",
    "fault/fault_frozen_test": None,
    "fault/fault_full_volume_test": "acknowledged_bytes_lost_full_volume",
    "fault/fault_quiet_tenant_test": "quiet_tenant_p99_ratio_max",
    "fault/fault_shortage_test": None,
    "kvstore/kvstore_model_test": "model_test_operations",
    "kvstore/kvstore_sharing_model_test": "model_test_operations",
    "kvstore/kvstore_pressure_model_test": "model_test_operations",
    "kvstore/kvstore_session_staging_test": "staging_promised_over_available",
    "service/service_roles_test": "rpc_role_pairs_tested",
}
WRITES_ROWS = ("fault/fault_crash_test", "fault/fault_recovery_time")  # themselves (--json); the others are of GoogleTest
# fault_worker_kill_test: 105 kills; fault_quiet_tenant_test: 6 windows of 2.5 s for each of its percentiles.
ROUNDS = {"PQCACHED_KILL_ROUNDS": "7", "PQCACHED_QUIET_ROUNDS": "6"}
# The tests that the rows of the table there name.
ENVIRONMENT_FAULTS = re.findall(r"`(\w+Test\.\w+)` \|$", (ROOT / "service/README.md").read_text(), re.MULTILINE)
# name: (better, goal, what the number is)
ROWS = {
    "crash_points_survived": ("higher", 5000, "kills of a store before one of its stores that outlive it; all compared with a model"),
    "recovery_mutants_killed": ("higher", 1.0, "share of the faults of tests/fault/mutants/recovery.toml that the tests notice"),
    "core_mutants_killed": ("higher", 1.0, "share of the faults of tests/fault/mutants/core.toml that the tests notice"),
    "daemon_kills_survived": ("higher", 100, "SIGKILL of a daemon's worker by a clock; several engines compare every acknowledged byte"),
    "acknowledged_bytes_lost": ("lower", 0, "over all fault tests"),
    "acknowledged_bytes_lost_full_volume": ("lower", 0, "eight caches on a tmpfs that other files fill, and kills meanwhile"),
    "staging_promised_over_available": ("lower", 1, "staging rings of many sessions that were granted, over what the machine had"),
    "rpc_role_pairs_tested": ("higher", 240, "every rpc by every role on every socket: the expected answer"),
    "wrong_rows_seen": ("lower", 0, "over all fault tests"),
    "extents_leaked": ("lower", 0, "in use when all sessions had ended"),
    "leases_leaked": ("lower", 0, "held when all sessions had ended"),
    "environment_faults_survived": (
        "higher", len(ENVIRONMENT_FAULTS),
        f"of the {len(ENVIRONMENT_FAULTS)} in service/README.md: full volumes, no memory, stopped processes, ..."),
    "client_kills_survived": ("higher", 50, "SIGKILL of an engine at random, nothing of it left"),
    "calls_past_deadline": ("lower", 0, "by more than 1 s, with a worker or an engine that stands still too"),
    "model_test_operations": ("higher", 1e5, "random operations against a plain model, single and multi-threaded"),
    "quiet_tenant_p99_ratio_max": (
        "lower", 3, "p99 of a tenant's Append and remote TopK beside each of five hostile tenants, over its p99 beside a program "
        "that burns as many cores and never calls the sidecar"),
    "quiet_tenant_local_top_k_p99_ratio_max": (
        "lower", 3, "the same of TopK on the local path, which calls no sidecar; threads that wake up interrupt it, and those "
        "of the program never sleep"),
    "fuzz_executions": ("higher", 1e5, "libFuzzer, over all targets, without a finding"),
    "fuzz_executions_min_target": ("higher", 1e5, "libFuzzer: the least over the targets"),
    "fuzz_handlers_per_s": ("higher", 1e4, "inputs of the handlers in one process, without sanitizers"),
    "recovery_ms_per_gib": ("lower", None, "of rows in use, from the start of a store until it serves"),
}
UNITS = {"recovery_ms_per_gib": "ms", "fuzz_handlers_per_s": "1/s", "staging_promised_over_available": "ratio",
         "quiet_tenant_p99_ratio_max": "ratio", "quiet_tenant_local_top_k_p99_ratio_max": "ratio"}
# Over the tests that report them; the others are sums.
MAXIMA = {"quiet_tenant_p99_ratio_max", "quiet_tenant_local_top_k_p99_ratio_max"}
LOSSES = ["acknowledged_bytes_lost", "wrong_rows_seen", "extents_leaked", "leases_leaked", "calls_past_deadline"]


def numbers_of(program, name):
    """What a program has seen, by row: a list of numbers each; and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "report.json"
        command = [program, "--json", path] if name in WRITES_ROWS else [program, f"--gtest_output=json:{path}"]
        done = subprocess.run(command, env={**ROUNDS, **os.environ}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            sys.stderr.write(done.stdout.decode(errors="replace")[-8000:])
        report = json.loads(path.read_text()) if path.exists() else []
    if name in WRITES_ROWS:
        found = [(row["name"], row["value"]) for row in report if row["value"] is not None]
    else:
        tests = [test for suite in report["testsuites"] for test in suite["testsuite"]] if report else []
        found = [(row, float(value)) for test in tests for row, value in test.items() if row in ROWS]
        leave_out_faults([f"{test['classname']}.{test['name']}" for test in tests if test["result"] == "SKIPPED"])
    numbers = {}
    for row, value in found:
        numbers.setdefault(row, []).append(value)
    return numbers, done.returncode


def leave_out_faults(skipped):
    """Lowers the goal of `environment_faults_survived` by the faults that this machine cannot make, and names them."""
    impossible = [name for name in skipped if name in ENVIRONMENT_FAULTS]
    if impossible:
        better, goal, what = ROWS["environment_faults_survived"]
        ROWS["environment_faults_survived"] = (better, goal - len(impossible), f"{what}; not possible here: {', '.join(impossible)}")


def part_of(row):
    return "mutants" if row.endswith("_mutants_killed") else "fuzz" if row.startswith("fuzz_") else "programs"


def mutants_killed(which):
    """The share of a set of mutants that the tests notice, and how many there are."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.json"
        subprocess.run([ROOT / "tests/fault/mutants/run.py", "--set", which, "--json", path], check=False)
        return json.loads(path.read_text())[0] if path.exists() else None


def fuzz_rows(build):
    """Numbers by row, and why rows are missing."""
    rows, reasons = {}, {}
    program = build / "tests/fuzz/fuzz_handlers_test"
    if program.exists():
        done = subprocess.run([program, "--random", "100000"], capture_output=True, text=True, check=False)
        found = re.search(r"(\d+) per second", done.stdout)
        rows["fuzz_handlers_per_s"] = [float(found[1])] if found and done.returncode == 0 else [0]
    else:
        reasons["fuzz_handlers_per_s"] = "not in this build"
    if shutil.which("clang++") is None:
        return rows, {**reasons, "fuzz_executions": "no clang", "fuzz_executions_min_target": "no clang"}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "fuzz.json"
        done = subprocess.run([ROOT / "tests/fuzz/run.sh", "--json", path, "--runs"], check=False, stdout=subprocess.DEVNULL)
        report = json.loads(path.read_text()) if done.returncode == 0 else {"executions": 0, "targets": {}}
    targets = report["targets"]
    rows["fuzz_executions"] = [report["executions"]]
    rows["fuzz_executions_min_target"] = [min((each["executions"] for each in targets.values()), default=0)]
    for target, seen in targets.items():
        for what in ("executions", "edges"):
            ROWS[f"fuzz_{target}_{what}"] = ("higher", None, f"libFuzzer, target {target}: {what}")
            rows[f"fuzz_{target}_{what}"] = [seen[what]]
    return rows, reasons


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--parts", default="programs,mutants,fuzz")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    numbers, failed, reasons = {}, set(), {}  # by row
    for name, count in PROGRAMS.items() if "programs" in parts else ():
        program = arguments.build / "tests" / name
        if not program.exists():
            reasons.setdefault(count, f"{program.name} is not in this build")
            continue
        seen, status = numbers_of(program, name)
        print(f"{program.name}: {'passed' if status == 0 else 'failed'}", flush=True)
        for row, values in seen.items():
            numbers.setdefault(row, []).extend(values)
        if status != 0:
            failed.add(count)
        if not seen:
            reasons.update({row: f"{program.name} ended without a report" for row in LOSSES})
    for which in ("recovery", "core") if "mutants" in parts else ():
        if row := mutants_killed(which):
            numbers[row["name"]] = [row["value"]]
    if "fuzz" in parts:
        fuzzed, missing = fuzz_rows(arguments.build)
        numbers.update(fuzzed)
        reasons.update(missing)
    rows = []
    for name, (better, goal, what) in ROWS.items():
        if part_of(name) not in parts:
            continue
        values = numbers.get(name)
        known = values is not None and name not in reasons
        total = max if name in MAXIMA else sum
        value = (0 if better == "higher" else None) if name in failed else total(values) if known else None
        rows.append({"area": "recovery", "name": name, "value": value, "unit": UNITS.get(name, "count"),
                     "better": better, "goal": goal,
                     "against": what if value is not None else f"not run: {reasons.get(name, 'nothing has counted it')}",
                     "samples": len(values) if known else None, "spread": None})
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
