"""skips.py finds every kind of skip and its reason, and refuses skips of what is required. Usage: skips_test.py"""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import skips
from skip import skip_unless

TESTS = pathlib.Path(__file__).resolve().parent
BARE = re.compile(r"GTEST_SKIP|\bskipTest\b|\bskipIf\b|\bskipUnless\b|\bSkipTest\b|unittest\.skip\b|SKIP_RETURN_CODE")
NAMED = re.compile(r'PQC_SKIP\("(\w+)"\)|\bskip_unless\("(\w+)"|pqcached_left_out\(\w+ (\w+) "')
MAY_SKIP = {"skip.h", "skip.py", "skips_test.py", "gpu/standalone/gtest/gtest.h"}

REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="Linux-c++" tests="5">
<testcase name="core" status="run"><system-out>[  PASSED  ] 3 tests.</system-out></testcase>
<testcase name="gtest" status="run"><system-out>[ RUN      ] A.B
tests/x.cc:7: Skipped
SKIPPED root: needs root

[  SKIPPED ] A.B (0 ms)
[ RUN      ] A.C
tests/x.cc:9: Skipped
SKIPPED root: needs root

[  SKIPPED ] A.C (0 ms)
[  PASSED  ] 1 test.
[  SKIPPED ] 2 tests, listed below:
[  SKIPPED ] A.B
[  SKIPPED ] A.C
</system-out></testcase>
<testcase name="python" status="run"><system-out>SKIPPED torch: not installed (Debian: python3-torch)
.s
OK (skipped=1)</system-out></testcase>
<testcase name="left_out" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>SKIPPED gpu: built without CUDA</system-out></testcase>
<testcase name="leaks" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>[  PASSED  ] 4 tests.
Tracer caught signal 11</system-out></testcase>
</testsuite>
"""
BARE_REPORT = '<testsuite><testcase name="x" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase></testsuite>'


def run(arguments, required=""):
    return subprocess.run([sys.executable, TESTS / "skips.py", *arguments], check=False, capture_output=True, text=True,
                          env={**os.environ, "PQCACHED_REQUIRE": required})


class SkipsTest(unittest.TestCase):
    def listed(self, report, required=""):
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(report)
            file.flush()
            return run([file.name], required)

    def test_lists_every_reason_with_its_tests(self):
        done = self.listed(REPORT)
        self.assertEqual((done.returncode, done.stdout.splitlines()), (0, [
            "skipped: 5",
            "  gpu: built without CUDA: left_out",
            "  leak_check: LeakSanitizer's tracer failed: leaks of this run are unknown: leaks",
            "  root: needs root: gtest (2)",
            "  torch: not installed (Debian: python3-torch): python",
        ]))

    def test_says_that_nothing_was_skipped(self):
        done = self.listed("<testsuite/>", "root")
        self.assertEqual((done.returncode, done.stdout), (0, "skipped: nothing\n"))

    def test_a_skip_of_what_is_required_fails(self):
        done = self.listed(REPORT, "systemd, torch")
        self.assertEqual((done.returncode, done.stderr), (1, "error: skipped, but torch is required\n"))
        self.assertEqual(self.listed(REPORT, "systemd,transformers").returncode, 0)

    def test_a_skip_without_a_name_fails(self):
        done = self.listed(BARE_REPORT)
        self.assertEqual(done.returncode, 1)
        self.assertIn("unnamed: SKIP_RETURN_CODE=77: x", done.stdout)

    def test_python_skips_print_every_missing_requirement(self):
        @skip_unless("root", True, "not shown")
        @skip_unless("torch", False, "no torch")
        @skip_unless("pip", False, "no pip")
        class Whole(unittest.TestCase):
            def test_does_not_run(self):
                self.fail()

        class Part(unittest.TestCase):
            @skip_unless("gpu", False, "no GPU")
            def test_does_not_run(self):
                self.fail()

            @skip_unless("gpu", True, "not shown")
            def test_runs(self):
                pass

        output, result = io.StringIO(), unittest.TestResult()
        with contextlib.redirect_stdout(output):
            for case in (Whole, Part):
                unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        self.assertEqual(output.getvalue(), "SKIPPED torch: no torch\nSKIPPED pip: no pip\nSKIPPED gpu: no GPU\n")
        self.assertEqual((result.testsRun, len(result.skipped), result.failures), (2, 2, []))

    def test_an_unknown_requirement_is_an_error(self):
        done = run(["--check"], "root,transformer")
        self.assertEqual(done.returncode, 2)
        self.assertIn("unknown: transformer;", done.stderr)
        self.assertEqual(run(["--check"], "root,transformers").returncode, 0)

    def test_all_tests_skip_by_name_and_every_name_is_used(self):
        names = {skips.LEAK_CHECK[1]}
        for path in TESTS.rglob("*"):
            if path.suffix not in {".cc", ".h", ".py", ".txt", ".sh"} or str(path.relative_to(TESTS)) in MAY_SKIP:
                continue
            text = path.read_text()
            self.assertIsNone(BARE.search(text), f"{path}: use PQC_SKIP, skip_unless or pqcached_left_out")
            names.update(name for groups in NAMED.findall(text) for name in groups if name)
        self.assertEqual(names, set(skips.REQUIREMENTS))


if __name__ == "__main__":
    unittest.main()
