#!/usr/bin/env python3
"""The mutants of tests/fault/mutants fit the sources, and the program that runs them distinguishes killed from surviving ones."""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/fault/mutants"))
import run as mutants  # noqa: E402  (its folder was added above)


def mutant(**changes):
    return {"name": "m", "breaks": "A promise.", "file": "a.cc", "old": "good", "new": "bad", "tests": ["a_test"], **changes}


class MutantsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "a.cc").write_text("good; other; other;")

    def test_each_text_occurs_once_in_its_file(self):
        for path in (ROOT / "tests/fault/mutants").glob("*.toml"):
            self.assertEqual(mutants.faults_of(mutants.load(path.stem), ROOT), [], path)

    def test_entries_that_do_not_fit_are_named(self):
        self.assertEqual(mutants.faults_of([mutant()], self.root), [])
        for wrong in (mutant(old="other"), mutant(old="gone"), mutant(file="b.cc"), mutant(new="good"), mutant(tests=[])):
            self.assertEqual(len(mutants.faults_of([wrong], self.root)), 1, wrong)
        self.assertEqual(len(mutants.faults_of([mutant(), mutant()], self.root)), 1)

    def make_test(self, body):
        program = self.root / "build/tests/a_test"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def test_a_mutant_survives_when_no_test_fails(self):
        self.make_test(f"grep -q good {self.root}/a.cc")
        self.assertIsNone(mutants.failing(self.root, mutant(), {}))
        (self.root / "a.cc").write_text("bad")
        self.assertEqual(mutants.failing(self.root, mutant(), {}), "a_test: status 1")

    def test_a_test_that_does_not_end_in_time_fails(self):
        self.make_test("exec sleep 600")
        self.assertEqual(mutants.failing(self.root, mutant(), {"a_test": 0.2}), "a_test: no end after 0 s")


if __name__ == "__main__":
    unittest.main()
