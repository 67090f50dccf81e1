"""The arithmetic of paired differences, on small cases that can be done by hand."""

import math
import unittest

from paired import mean_of_contexts, paired_difference, student


def outcomes(rows):
    """rows: (context, question, right of a, right of b)."""
    made = []
    for context, question, a, b in rows:
        where = {"task": "t", "length": 1, "context": context, "question": question}
        made += [{**where, "method": "a", "right": a}, {**where, "method": "b", "right": b}]
    return made


class PairedDifferenceTest(unittest.TestCase):
    def test_equal_methods_differ_by_nothing(self):
        found = paired_difference(outcomes([(0, 0, 1, 1), (0, 1, 0, 0), (1, 0, 1, 1)]), "a", "b")
        self.assertEqual((0, 0, 3, 2), (found.mean, found.half_width, found.question_count, found.context_count))

    def test_the_mean_counts_each_question_once(self):
        found = paired_difference(outcomes([(0, 0, 1, 0), (0, 1, 1, 1), (1, 0, 0, 1), (1, 1, 1, 0)]), "a", "b")
        self.assertAlmostEqual(0.25, found.mean)

    def test_the_interval_is_that_of_contexts_not_of_questions(self):
        # Both questions of a context agree: two samples of +1 and -1, not four. Residual sums are +2 and -2:
        # variance = (4 + 4) / 16 * 2 = 1; Student's quantile for one degree of freedom is 12.706.
        found = paired_difference(outcomes([(0, 0, 1, 0), (0, 1, 1, 0), (1, 0, 0, 1), (1, 1, 0, 1)]), "a", "b")
        self.assertAlmostEqual(12.706, found.half_width)

    def test_one_context_has_no_interval(self):
        self.assertEqual(math.inf, paired_difference(outcomes([(0, 0, 1, 0)]), "a", "b").half_width)

    def test_many_contexts_approach_the_normal_quantile(self):
        self.assertEqual(2.042, student(30))
        self.assertAlmostEqual(2.0003, student(60), places=3)  # 2.0003 in tables
        self.assertAlmostEqual(1.96, student(100000), places=3)

    def test_a_mean_counts_each_context_once(self):
        # Means 1, 2, 3 of three contexts: standard error 1 / sqrt(3), quantile 4.303 for two degrees of freedom.
        mean, half_width = mean_of_contexts([("a", 0), ("a", 2), ("b", 2), ("c", 3), ("c", 3), ("c", 3)])
        self.assertAlmostEqual(2, mean)
        self.assertAlmostEqual(4.303 / math.sqrt(3), half_width)

    def test_unpaired_questions_are_refused(self):
        rows = outcomes([(0, 0, 1, 0)])
        with self.assertRaises(ValueError):
            paired_difference(rows[:1], "a", "b")
        with self.assertRaises(ValueError):
            paired_difference(rows, "c", "b")


if __name__ == "__main__":
    unittest.main()
