"""What must hold whatever the numbers: orderings and identities of selections, and the judge's own tools.

judge_test.py BUILD
"""

import pathlib
import sys
import tempfile
import unittest

import numpy as np

import judge
import live_study
import model_study
import sidecar
import vector_plan
from analysis import figure_rows, load, mean, where
from generators import Setting, generate, mahalanobis, rotated, softmax_entropy
from methods import SINK, WINDOW, Full, Oracle, Pq, Random, Rows, Sidecar, Window, load_client
from problems import Problem, Turn, captured, stored
from vector_study import Exact, measure, select_count, study

BUILD = pathlib.Path(sys.argv[1]).resolve()


def problem_of(keys, queries, scale=0.125):
    """One turn without new rows; all queries are those of the last token."""
    kv_heads, tokens, dim = keys.shape
    values = stored(np.random.default_rng(3).standard_normal(keys.shape))
    none = np.empty((kv_heads, 0, dim), np.float32)
    turn = Turn(none, none, queries.astype(np.float32), np.full(len(queries), tokens - 1))
    return Problem("test", {}, stored(keys), values, [turn], scale)


def random_problem(tokens, steps=4, dim=64, kv_heads=2, group=2, seed=1):
    random = np.random.default_rng(seed)
    return problem_of(random.standard_normal((kv_heads, tokens, dim)), random.standard_normal((steps, kv_heads * group, dim)) * 2)


def selections(endpoint, problem, index, count, rule_builds=True):
    """Positions per step, [kv_heads, count], of the sidecar."""
    rows = Rows(load_client(BUILD), endpoint, problem)
    try:
        if rule_builds:
            rows.build(index, 5)
        terms = rows.pqcached.Selection(token_count=SINK + WINDOW + count, sink_tokens=SINK, window_tokens=WINDOW, index=index)
        turn = problem.turns[0]
        return [rows.sequence.topk(0, int(position), query, terms).positions
                for query, position in zip(turn.queries, turn.positions)]
    finally:
        rows.close()


class OrderingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        pqcached = load_client(BUILD)
        problems = captured(BUILD, judge.DATA, "niah", 4096, 0, 3, steps=5)
        problems += [generate("needles", Setting(tokens=4096, steps=6, needle_margin=1.0)),
                     generate("drift", Setting(tokens=3072, generated=1024, steps=6, drift=1))]
        cls.rows = []
        with sidecar.running(BUILD) as endpoint:
            for problem in problems:
                cls.rows += vector_plan.with_rows(BUILD, problem, pqcached, endpoint, vector_plan.standard, ["1/10", "256"])

    def each(self):
        for problem in {row["problem"] for row in self.rows}:
            for budget in ("1/10", "256"):
                with self.subTest(problem=problem, budget=budget):
                    yield lambda method, metric: np.mean([row[metric] for row in where(
                        self.rows, problem=problem, budget=budget, method=method)])

    def test_full_attention_misses_nothing(self):
        for of in self.each():
            self.assertAlmostEqual(1, of("full", "mass"), places=9)
            self.assertLess(of("full", "output_error"), 1e-6)

    def test_nothing_of_the_same_size_covers_more_than_exact_top_k(self):
        for row in self.rows:
            if row["method"] != "full":
                self.assertLessEqual(row["mass_vs_oracle"], 1 + 1e-9, row["problem"] + row["method"])
        for of in self.each():
            self.assertAlmostEqual(1, of("oracle", "recall"), places=9)
            self.assertAlmostEqual(1, of("oracle", "mass_vs_oracle"), places=9)

    def test_exact_is_at_least_flat_then_pq_then_the_window(self):
        for of in self.each():
            mass = {method: of(method, "mass") for method in ("oracle", "flat", "pq4x8", "pq2x6", "window", "random")}
            self.assertGreaterEqual(mass["oracle"] + 1e-9, mass["flat"])
            self.assertGreater(mass["flat"], mass["pq4x8"])
            self.assertGreater(mass["pq4x8"], mass["pq2x6"])
            self.assertGreater(mass["pq2x6"], mass["random"])
        for row in where(self.rows, source="captured", layer=1, method="pq2x6"):
            window = where(self.rows, problem=row["problem"], budget=row["budget"], kv_head=row["kv_head"], method="window")
            self.assertGreater(row["mass"], window[0]["mass"])

    def test_more_tokens_cover_more(self):
        for problem in {row["problem"] for row in self.rows}:
            for method in ("oracle", "flat", "pq4x8", "pq2x6", "window"):
                of = lambda budget: np.mean([row["mass"] for row in where(self.rows, problem=problem, method=method, budget=budget)])
                self.assertGreater(of("1/10"), of("256"), (problem, method))

    def test_exact_scores_find_every_planted_needle(self):
        for method in ("oracle", "flat"):
            for row in where(self.rows, problem="needles", method=method):
                self.assertEqual(1, row["found"], row)

    def test_exact_selection_reads_more_than_pq_and_pq_more_than_the_window(self):
        for of in self.each():
            self.assertGreater(of("flat", "bytes"), of("pq4x8", "bytes"))
            self.assertGreater(of("pq4x8", "bytes"), of("pq2x6", "bytes"))
            self.assertGreater(of("pq2x6", "bytes"), of("window", "bytes"))


class LiveStudyTest(unittest.TestCase):
    def test_looking_at_drift_finds_more_and_costs_codebooks(self):
        problem = generate("themes", Setting(tokens=4096, steps=8, kv_heads=1, theme_tokens=1280))
        self.assertEqual(problem.keys.shape, (1, 4096, 128))
        setting = {"segment_tokens": 512, "codebook_tokens": 1024}
        looking, never = (live_study.measure(BUILD, load_client(BUILD), {**setting, "drift_ratio": ratio}, 6, [problem])
                          for ratio in (1.25, live_study.NEVER))
        for budget in live_study.BUDGETS:
            self.assertGreater(looking[budget]["recall"], never[budget]["recall"])
            self.assertGreater(looking[budget]["bytes"], never[budget]["bytes"])
            self.assertLessEqual(looking[budget]["mass_vs_oracle"], 1 + 1e-9)


class KCacheTest(unittest.TestCase):
    def test_with_all_tokens_selected_it_is_full_attention(self):
        names = ["full", "kcache2048x1", "kcache2048x1r", "kcache2048x2", "kcache64x1"]
        for data in (judge.DATA, judge.DATA / "rope"):
            with sidecar.running(BUILD) as endpoint:
                outcomes = model_study.ask(BUILD, data, endpoint, "last", "mq", 1024, 1, 5, names)["outcomes"]
            of = {name: [outcome for outcome in outcomes if outcome["method"] == name] for name in names}
            right = {name: [outcome["right"] for outcome in of[name]] for name in names}
            for name in names[1:4]:
                self.assertEqual(right[name], right["full"], f"{name} of {data.name}")
            self.assertGreater(sum(right["full"]), 0)
            self.assertGreaterEqual(of["kcache64x1"][-1]["selected"], 63)  # and the step's own token
            self.assertLessEqual(of["kcache64x1"][-1]["selected"], 64 * 4)
            bytes_of = {name: of[name][-1]["engine_bytes"] for name in names}
            # Of the first model's stored layers the keys alone; one of the other's four layers has values, too.
            share = 0.5 if data == judge.DATA else 0.625
            self.assertAlmostEqual(bytes_of["kcache64x1"] / bytes_of["full"], share, delta=0.01)
            self.assertGreater(bytes_of["kcache2048x2"], bytes_of["kcache2048x1"])


class IdentityTest(unittest.TestCase):
    def test_as_many_centroids_as_tokens_rank_exactly(self):
        pqcached, problem = load_client(BUILD), random_problem(tokens=SINK + 220)
        with sidecar.running(BUILD) as endpoint:
            exact = selections(endpoint, problem, pqcached.Index.flat(), 40, rule_builds=False)
            for subspaces in (1, 2, 4):
                coded = selections(endpoint, problem, pqcached.Index.pq(subspaces, 8), 40)
                for a, b in zip(exact, coded):
                    np.testing.assert_array_equal(a, b)

    def test_too_few_centroids_do_not(self):
        pqcached, problem = load_client(BUILD), random_problem(tokens=SINK + 220)
        with sidecar.running(BUILD) as endpoint:
            exact = selections(endpoint, problem, pqcached.Index.flat(), 40, rule_builds=False)
            coded = selections(endpoint, problem, pqcached.Index.pq(1, 4), 40)
        self.assertTrue(any((a != b).any() for a, b in zip(exact, coded)))

    def test_many_segments_under_one_codebook_are_like_one(self):
        pqcached, problem = load_client(BUILD), random_problem(tokens=4000)
        for index in (pqcached.Index.pq(2, 6), pqcached.Index.pq(4, 8), pqcached.Index.flat()):
            found = []
            for segment_tokens in ("8192", "512"):
                with sidecar.running(BUILD, "--segment-tokens", segment_tokens) as endpoint:
                    found.append(selections(endpoint, problem, index, 300, index.kind != pqcached.IndexKind.FLAT))
            for a, b in zip(*found):
                np.testing.assert_array_equal(a, b)

    def test_the_sidecars_attention_is_the_reference_over_the_same_tokens(self):
        pqcached, problem = load_client(BUILD), random_problem(tokens=1500)
        turn = problem.turns[0]
        with sidecar.running(BUILD) as endpoint:
            rows = Rows(pqcached, endpoint, problem)
            index = pqcached.Index.pq(4, 6)
            rows.build(index, 5)
            terms = pqcached.Selection(token_count=300, sink_tokens=SINK, window_tokens=WINDOW, index=index)
            for number, query in enumerate(turn.queries):
                position = int(turn.positions[number])
                chosen = rows.sequence.topk(0, position, query, terms).positions
                output = rows.sequence.attend(0, position, query, terms).output
                grouped = query.reshape(problem.kv_heads, -1, problem.dim).astype(np.float64)
                for head in range(problem.kv_heads):
                    logits = grouped[head] @ problem.keys[head][chosen[head]].T * problem.scale
                    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                    expected = weights / weights.sum(axis=1, keepdims=True) @ problem.values[head][chosen[head]]
                    group = len(expected)
                    np.testing.assert_allclose(output[head * group:(head + 1) * group], expected, atol=2e-3)
            rows.close()


class MetricsTest(unittest.TestCase):
    """On a case that can be done by hand: 100 tokens, one of them holds nearly everything."""

    def setUp(self):
        keys = np.zeros((1, 100, 32))
        keys[0, 30, 0] = 20
        self.problem = problem_of(keys, np.eye(1, 32)[None] * np.ones((1, 1, 1)), scale=1.0)
        self.exact = Exact(self.problem, self.problem.turns[0], 0)

    def test_a_budget_counts_sink_window_and_selected(self):
        self.assertEqual(1000 // 10 - SINK - WINDOW, select_count("1/10", 1000))
        self.assertEqual(0, select_count("1/20", 1000))
        self.assertEqual(256 - SINK - WINDOW, select_count("256", 100000))

    def test_the_needle_is_all_the_mass_and_missing_it_none(self):
        found, missed = (measure(self.exact, [chosen], 2, [30])[0] for chosen in ([30, 25], [20, 25]))
        self.assertEqual(1, found["found"])
        self.assertEqual(0, missed["found"])
        self.assertAlmostEqual(1, found["mass_vs_oracle"], places=6)
        self.assertLess(missed["mass_vs_oracle"], 1e-6)
        self.assertLess(found["output_error"], 1e-5)
        self.assertGreater(missed["output_error"], 0.1)
        # All tokens but the needle weigh the same: any of them is as good as the oracle's second one.
        self.assertEqual(1, found["recall"])

    def test_a_choice_outside_the_middle_or_with_a_repeat_is_refused(self):
        for chosen in ([3, 30], [30, 99], [30, 30]):
            with self.assertRaises(AssertionError):
                measure(self.exact, [chosen], 2, None)

    def test_a_method_of_a_few_lines_takes_part(self):
        class Norms(Sidecar):
            """The keys with the largest norms."""
            name = "norms"

            def __init__(self):
                super().__init__(None)

            def begin_turn(self, turn):
                pass

            def choose(self, step, count):
                norms = np.linalg.norm(self.problem.keys[:, SINK:step.end], axis=2)
                return SINK + np.argsort(-norms, axis=1)[:, :count]

        rows = study(random_problem(tokens=1500), [Oracle(), Norms(), Window(), Random(), Full()], ["1/10"])
        norms, oracle = (where(rows, method=name) for name in ("norms", "oracle"))
        self.assertEqual(2, len(norms))
        self.assertLess(mean(norms, "mass")[0], mean(oracle, "mass")[0])


class GeneratorTest(unittest.TestCase):
    def test_attention_has_the_entropy_that_was_asked_for(self):
        problem = generate("entropy", Setting(tokens=4096, steps=4, effective_tokens=50))
        for number in range(4):
            exact = Exact(problem, problem.turns[0], number)
            np.testing.assert_allclose(np.exp(exact.entropy), 50, rtol=0.15)

    def test_both_rope_layouts_turn_by_the_same_angles(self):
        x, positions = np.random.default_rng(2).standard_normal((7, 16)), np.arange(7) * 100
        pairs = np.arange(16).reshape(2, 8).T.reshape(-1)  # interleaved place -> half's place
        half, interleaved = rotated(x, positions, "half", 1e4), rotated(x[:, pairs], positions, "interleaved", 1e4)
        np.testing.assert_allclose(half[:, pairs], interleaved, atol=1e-12)

    def test_rope_leaves_relative_positions_only(self):
        q, k = np.random.default_rng(4).standard_normal((2, 1, 32))
        dots = [rotated(q, np.array([a]), "half", 1e4) @ rotated(k, np.array([a - 11]), "half", 1e4).T for a in (20, 900)]
        np.testing.assert_allclose(dots[0], dots[1], atol=1e-9)

    def test_queries_are_as_far_away_as_asked(self):
        problem = generate("far", Setting(tokens=4096, steps=4, kv_heads=1, distance=400, effective_tokens=1024))
        self.assertAlmostEqual(400, mahalanobis(problem.turns[0].queries.reshape(-1, 128), problem.keys[0]), delta=20)

    def test_duplicates_are_exact_without_rope(self):
        keys = generate("same", Setting(tokens=2048, steps=2, distinct=64, rope="none", effective_tokens=256)).keys
        np.testing.assert_array_equal(keys[:, 640:704], keys[:, 1280:1344])

    def test_entropy_of_equal_logits_is_their_count(self):
        self.assertAlmostEqual(np.log(64), softmax_entropy(np.full(64, 3.0)))


class ReportTest(unittest.TestCase):
    def test_the_quick_judge_runs_through_and_its_page_stands_alone(self):
        with tempfile.TemporaryDirectory() as directory:
            out = pathlib.Path(directory)
            judge.measure(BUILD, out, False, judge.STAGES)
            results = judge.report.write(out, "test")
            page = (out / "report.html").read_text()
            for identity in ("end", "needles", "late", "vectors", "bytes", "generated", "papers", "words"):
                self.assertIn(f"id='{identity}'", page)
            for reference in ("http://", "src=", "<link", "url("):
                self.assertNotIn(reference, page.replace("http://www.w3.org/2000/svg", ""))
            rows = {row["name"]: row for row in figure_rows(results)}
            self.assertLessEqual(rows["index_bytes_over_keys"]["value"], 1 / 50)
            self.assertGreater(rows["mass_vs_oracle_r10"]["value"], 0.9)
            self.assertEqual(results.model, load(out).model)
            self.assertFalse(where(model_study.read_csv(out / "captured.csv"), mass=None))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
