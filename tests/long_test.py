"""long.py records how a suite ended, and leaves the other suites alone."""

import json
import pathlib
import tempfile
import unittest

import figures
import long


class LongTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "long.json"

    def suites(self, command):
        one = {"name": "one", "content": "First.", "command": command}
        two = {"name": "two", "content": "Second.", "command": "exit 1", "result": "passed", "minutes": 3, "machine": "M",
               "date": "2026-01-01"}
        self.path.write_text(json.dumps([one, two]))
        return one, two

    def test_a_run_that_passes_is_recorded(self):
        one, two = self.suites("exit 0")
        self.assertEqual(long.run(self.path, "one"), 0)
        after = json.loads(self.path.read_text())
        self.assertEqual(after[1], two)
        self.assertEqual((after[0]["result"], after[0]["machine"]), ("passed", long.machine()))
        self.assertEqual({key: after[0][key] for key in one}, one)
        self.assertGreaterEqual(set(after[0]), {"minutes", "date"})

    def test_a_run_that_fails_is_recorded_as_failed(self):
        self.suites("exit 3")
        self.assertEqual(long.run(self.path, "one"), 3)
        self.assertEqual(long.read(self.path)["one"]["result"], "failed")
        self.assertEqual(long.run(self.path, "two"), 1)
        self.assertEqual(long.read(self.path)["two"]["result"], "failed")

    def test_commands_run_at_the_root_of_the_tree(self):
        self.suites("test -x tests/long.sh")
        self.assertEqual(long.run(self.path, "one"), 0)

    def test_the_list_names_every_suite_with_its_last_run(self):
        self.suites("exit 0")
        self.assertEqual(long.listing(long.read(self.path)).splitlines(),
                         ["one        First. (not run yet)", "two        Second. (passed on 2026-01-01, M)"])

    def test_the_suites_of_the_tree_start_programs_that_exist(self):
        for suite in long.read(figures.SUITES).values():
            scripts = [word for word in suite["command"].split() if word.startswith("tests/")]
            self.assertEqual(len(scripts), 1, suite)
            self.assertTrue((long.ROOT / scripts[0]).is_file(), scripts[0])


if __name__ == "__main__":
    unittest.main()
