"""The whole on the trained model: an answer survives when pqcached chooses a tenth of the tokens, and not without.

quality_test.py BUILD. Few questions; tests/figures.sh quality asks them all. PQCACHED_FULL_TESTS=1 asks more.
"""

import os
import pathlib
import sys
import unittest

import sidecar
from paired import paired_difference
from quality_rows import DATA, FULL, ORACLE, PQ26, PQ48, WINDOW

BUILD = pathlib.Path(sys.argv[1])
MORE = os.environ.get("PQCACHED_FULL_TESTS") == "1"


class QualityTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.report = sidecar.report(BUILD, DATA, [4096, 8192] if MORE else [4096], ["niah", "mq"],
                                    contexts=2, questions=10 if MORE else 4)
        cls.outcomes = cls.report["outcomes"]

    def difference(self, method, against):
        return paired_difference(self.outcomes, method, against).mean

    def test_the_questions_need_the_middle_of_the_context(self):
        self.assertGreaterEqual(self.difference(ORACLE, WINDOW), 0.3)
        self.assertGreaterEqual(self.difference(FULL, WINDOW), 0.3)

    def test_a_tenth_of_the_tokens_answers_like_exact_selection(self):
        # One question of 16 is 0.06: the bounds allow that one.
        self.assertGreaterEqual(self.difference(PQ48, ORACLE), -0.07)
        self.assertGreaterEqual(self.difference(PQ26, ORACLE), -0.2)
        self.assertGreaterEqual(self.difference(PQ48, FULL), -0.07)

    def test_the_budget_counts_sink_window_and_selected(self):
        for length in self.report["lengths"]:
            for method in length["methods"]:
                if 0 < method["ratio"] < 1:
                    attended = sum(method["attended"].values())
                    # The last step of a question lies a few tokens past the context.
                    self.assertLessEqual(attended, method["ratio"] * (length["length"] + 64))
                    self.assertGreaterEqual(attended, method["ratio"] * (length["length"] - 64))

    def test_the_sidecar_holds_the_rows_and_the_engine_holds_little(self):
        for length in self.report["lengths"]:
            full, pq48 = ([m for m in length["methods"] if m["name"] == name][0] for name in (FULL, PQ48))
            self.assertEqual(0, full["sidecar_kv_bytes"])
            self.assertGreater(pq48["sidecar_kv_bytes"], length["length"] * 2 * 2 * 2 * 64 * 2 * 0.9)
            self.assertLess(pq48["engine_kv_bytes"], full["engine_kv_bytes"] / 4)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
