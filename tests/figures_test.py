"""FIGURES.md is what figures.py writes, a run replaces its own areas only, and missed goals are shown."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import figures


def row(area, name, value, instruction_set="avx2", **more):
    return {**dict.fromkeys(figures.KEYS), "area": area, "name": name, "value": value, "unit": "x", "better": "higher",
            "instruction_set": instruction_set, **more}


class FiguresTest(unittest.TestCase):
    def test_the_page_is_what_the_data_file_gives(self):
        rows = json.loads(figures.DATA.read_text())
        notes = figures.notes_by_area(figures.NOTES.read_text())
        self.assertEqual(figures.page(rows, notes, json.loads(figures.SUITES.read_text())), figures.PAGE.read_text(),
                         "run `python3 tests/figures.py --page` and commit tests/FIGURES.md")
        self.assertEqual(figures.data_text(rows), figures.DATA.read_text(), "figures.json has unknown keys or another layout")

    def test_every_row_of_the_data_file_is_complete(self):
        rows = json.loads(figures.DATA.read_text())
        for one in rows:
            self.assertLessEqual({*figures.KEYS, "instruction_set"}, set(one), one["name"])
        places = [(one["area"], one["name"], one["instruction_set"]) for one in rows]
        self.assertEqual(len(places), len(set(places)))

    def test_a_run_replaces_only_its_areas_of_its_instruction_set(self):
        kept = [row("kernels", "old", 1), row("kernels", "old", 2, "avx512"), row("local", "other", 3)]
        self.assertEqual(figures.merged(kept, [row("kernels", "new", 4)]),
                         [row("kernels", "old", 2, "avx512"), row("local", "other", 3), row("kernels", "new", 4)])

    def test_a_run_of_a_part_of_an_area_keeps_the_other_parts(self):
        kept = [row("house", "prose", 1), row("house", "build", 2)]
        self.assertEqual(figures.merged(kept, [row("house", "build", 3)]), [row("house", "prose", 1), row("house", "build", 3)])

    def test_a_run_without_values_replaces_no_measured_ones(self):
        measured, absent = row("gpu", "step", 5), row("gpu", "step", None)
        self.assertEqual(figures.merged([measured], [absent]), [measured])
        self.assertEqual(figures.merged([], [absent]), [absent])
        self.assertEqual(figures.merged([absent], [measured]), [measured])

    def test_a_missed_goal_is_shown(self):
        rows = [row("kernels", "slow", 1, goal=2), row("kernels", "fast", 3, goal=2),
                row("kernels", "large", 3, goal=2, better="lower"), row("kernels", "open", 3)]
        text = figures.page(rows, {})
        self.assertIn("1 of 3 goals are met.\nMissed: `slow`, `large`.", text)
        self.assertIn("| `slow` | 1 x | >= 2 | **MISSED** |", text)
        self.assertIn("| `large` | 3 x | <= 2 | **MISSED** |", text)
        self.assertIn("| `fast` | 3 x | >= 2 | met |", text)
        self.assertIn("| `open` | 3 x |  |  |", text)

    def checked(self, *rows):
        """What `figures.py DIRECTORY --no-page --check` exits with and prints, for rows that a program has written."""
        names = [key for key in figures.KEYS if key not in ("machine", "date")]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "rows.json").write_text(json.dumps([{key: one[key] for key in names} for one in rows]))
            done = subprocess.run([sys.executable, figures.TESTS / "figures.py", folder, "--no-page", "--check"],
                                  stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout

    def test_a_check_fails_for_a_missed_goal_and_names_it(self):
        status, text = self.checked(row("kernels", "slow", 1, goal=2), row("kernels", "fast", 3, goal=2))
        self.assertEqual(status, 1)
        self.assertIn("\nMISSED: kernels slow is 1, goal >= 2\n1 of 2 goals are met, 0 could not run\n", text)
        self.assertNotIn("MISSED: kernels fast", text)
        status, text = self.checked(row("kernels", "large", 2.5, goal=2, better="lower"))
        self.assertEqual(status, 1)
        self.assertIn("\nMISSED: kernels large is 2.5, goal <= 2\n", text)

    def test_a_check_passes_when_all_goals_are_met_and_rows_without_goals_do_not_matter(self):
        status, text = self.checked(row("kernels", "fast", 2, goal=2), row("kernels", "open", 3),
                                    row("kernels", "zero", 0, goal=0, better="lower"))
        self.assertEqual(status, 0)
        self.assertIn("\n2 of 2 goals are met, 0 could not run\n", text)

    def test_a_check_names_rows_that_could_not_run_and_counts_no_miss(self):
        status, text = self.checked(row("gpu", "step", None, goal=2, against="not run: no device"),
                                    row("kernels", "fast", 2, goal=2))
        self.assertEqual(status, 0)
        self.assertIn("\ncould not run: gpu step (goal >= 2): not run: no device\n1 of 1 goals are met, 1 could not run\n", text)

    def test_rows_of_limited_code_follow_those_without_the_limit(self):
        rows = [row("kernels", "a", 1), row("kernels", "b", 2), row("kernels", "b", 3, "neon"), row("kernels", "a_avx2", 4),
                row("kernels", "alone_avx2", 5), row("kernels", "b_avx2", 6)]
        shown = [(one["name"], one["instruction_set"]) for one in figures.with_limited_beside(rows)]
        self.assertEqual(shown, [("a", "avx2"), ("a_avx2", "avx2"), ("b", "avx2"), ("b_avx2", "avx2"), ("b", "neon"),
                                 ("alone_avx2", "avx2")])
        text = figures.page(rows, {})
        self.assertLess(text.index("| `a_avx2` |"), text.index("| `b` |"))

    def test_an_area_that_measured_something_gets_its_duration(self):
        rows = [row("kernels", "a", 1), row("gpu", "b", None)]
        timed = figures.duration_rows(rows, {"kernels": 90, "gpu": 3})
        self.assertEqual([(one["area"], one["name"], one["value"]) for one in timed], [("kernels", figures.MINUTES, 1.5)])

    def test_the_page_adds_the_latest_durations_up(self):
        def timed(area, minutes, date):
            return row(area, figures.MINUTES, minutes, date=date)

        first = [timed("kernels", 500, "2026-01-01"), timed("kernels", 20, "2026-01-02"), timed("local", 100, "2026-01-01")]
        self.assertIn("took 120 minutes together (not timed yet: house, quality, engine, judge, systems, llama, transformers, recovery, travel, gpu); goal: <= 180",
                      figures.durations_line(first))
        rest = [timed(area, 20, "2026-01-02") for area in figures.RUN_AREAS if area not in ("kernels", "local")]
        line = figures.durations_line(first + rest)
        self.assertTrue(line.endswith("took 320 minutes together; goal: <= 180 minutes on two cores, **MISSED**."), line)
        self.assertIn(line, figures.page(first + rest, {}).replace("\n", " "))

    def test_the_page_shows_the_last_runs_of_long_suites(self):
        suites = [{"name": "one", "content": "First."},
                  {"name": "two", "content": "Second.", "result": "failed", "minutes": 7, "machine": "M", "date": "2026-01-01"}]
        text = figures.page([], {}, suites)
        self.assertIn("| `one` | First. | not run yet |  |  |  |\n| `two` | Second. | **failed** | 7 | M | 2026-01-01 |", text)

    def test_notes_follow_the_table_of_their_area(self):
        notes = figures.notes_by_area("<!-- head -->\n\n## kernels\n\nWhy.\n\n## new area\n\nAlone.\n")
        text = figures.page([row("kernels", "a", 1)], notes)
        self.assertIn("### Notes\n\nWhy.\n", text)
        self.assertIn("## new area\n\nAlone.\n", text)

    def test_the_instruction_set_is_the_best_complete_one(self):
        avx2 = {"avx2", "fma", "f16c"}
        avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
        self.assertEqual(figures.instruction_set({"sse2"}), "portable")
        self.assertEqual(figures.instruction_set({"fp", "asimd", "crc32"}), "neon")
        self.assertEqual(figures.instruction_set(avx2), "avx2")
        self.assertEqual(figures.instruction_set(avx512), "avx512")
        self.assertEqual(figures.instruction_set(avx512 | {"avx512_bf16"}), "avx512")
        self.assertEqual(figures.instruction_set(avx512 | {"avx512vbmi", "avx512_vbmi2", "avx512_bf16"}), "avx512bf16")


if __name__ == "__main__":
    unittest.main()
