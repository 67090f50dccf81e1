"""The tutorial runs, and its table and page say what is right about its random model. Usage: tutorial_test.py BUILD"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

import models  # first
from models import TESTS, TOLERANCE, needs_transformers

from daemon import BUILD, SOURCE

sys.path.append(str(TESTS / "client/python/package"))
from html_test import Page  # noqa: E402

PROMPT, DECODED, SINK, WINDOW = 1024, 64, 16, 64
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 32
BYTES_OF_TOKEN = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4
PQ = ("pq m=4 b=8 1/10", "pq m=2 b=6 1/10")
SECONDS = 300


def run(*arguments):
    """The tutorial's output; raises when it fails. It has a process group of its own, so that its daemon ends with it."""
    with subprocess.Popen([sys.executable, SOURCE / "client/python/tutorial.py", BUILD, *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, start_new_session=True) as tutorial:
        try:
            output, _ = tutorial.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(tutorial.pid, signal.SIGKILL)
            raise
    try:
        os.killpg(tutorial.pid, signal.SIGKILL)
    except ProcessLookupError:
        left = False
    else:
        left = True
    if tutorial.returncode or left:
        raise AssertionError(f"exit status {tutorial.returncode}, {'a' if left else 'no'} process left:\n{output}")
    return output


@needs_transformers
class Tutorial(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, "page.html")
            cls.output = run("--tokens", str(PROMPT), "--html", page)
            cls.page = Page(page.read_text(encoding="utf-8"))
        lines = cls.output.splitlines()
        head = next(line for line in lines if line.startswith("cache "))
        names = [name for name in re.split(r"  +", head) if name][1:]
        table = lines[lines.index(head) + 1:]
        cls.rows = {line[:17].strip(): dict(zip(names, (float(each.replace(",", "")) for each in line[17:].split()), strict=True))
                    for line in table[:table.index("")]}

    def test_the_table_has_all_methods(self):
        self.assertEqual(list(self.rows), ["stock", "exact", "flat 1/10", *PQ])
        for row in self.rows.values():
            self.assertGreater(min(row["ms/token"], row["ready s"], row["perplexity"]), 0)

    def test_exact_attention_gives_what_the_models_own_cache_gives(self):
        self.assertIn("generate() gives the same 16 tokens: yes\n", self.output)
        stock, exact = self.rows["stock"], self.rows["exact"]
        self.assertEqual(exact["same"], 1)
        self.assertLessEqual(exact["logit diff"], TOLERANCE)
        self.assertAlmostEqual(exact["perplexity"], stock["perplexity"], delta=0.01)

    def test_a_tenth_of_the_tokens_gives_other_logits(self):
        for name in ("flat 1/10", *PQ):
            self.assertGreater(self.rows[name]["logit diff"], 100 * TOLERANCE, name)

    def test_rows_are_in_torch_with_the_models_own_cache_and_in_the_sidecar_with_ours(self):
        stored = (PROMPT + DECODED) * BYTES_OF_TOKEN
        for name, row in self.rows.items():
            with self.subTest(method=name):
                if name == "stock":
                    self.assertEqual((row["torch"], row["growth"], row["rows"]), (stored, (DECODED - 1) * BYTES_OF_TOKEN, 0))
                else:
                    self.assertEqual((row["growth"], row["rows"]), (0, stored))
                    self.assertTrue(0 < row["torch"] < 16 << 10, row["torch"])
                self.assertEqual(0 < row["index"] < stored, name in PQ)

    def test_the_page_marks_the_text_of_each_layer_and_head(self):
        text = (SOURCE / "README.md").read_text() + "\n" + (SOURCE / "client/README.md").read_text()
        places = [f"l{layer}h{head}" for layer in range(LAYERS) for head in range(KV_HEADS)]
        self.assertEqual(list(self.page.texts), places)
        own = {*range(SINK), *range(PROMPT + 1 - WINDOW, PROMPT + 1)}
        shares = []
        for place in places:
            with self.subTest(place=place):
                self.assertGreater(len(self.page.texts[place]), 2 * PROMPT)
                self.assertTrue(text.startswith(self.page.texts[place]))
                by_kind = {kind: {position for one, position, _ in self.page.marks[place] if one == kind}
                           for kind in ("found", "missed", "extra", "always")}
                self.assertEqual(by_kind["always"], own)
                self.assertEqual(len(by_kind["found"]) + len(by_kind["missed"]), (PROMPT + 1) // 10 - SINK - WINDOW)
                self.assertEqual(len(by_kind["missed"]), len(by_kind["extra"]))
                shares.append(len(by_kind["found"]) / len(by_kind["found"] | by_kind["missed"]))
        said = re.search(rf"^{PQ[0]} finds ([\d.]+) of the exact best tokens, ([\d.]+) at the worst head$", self.output, re.MULTILINE)
        self.assertAlmostEqual(float(said[1]), sum(shares) / len(shares), delta=0.001)
        self.assertAlmostEqual(float(said[2]), min(shares), delta=0.001)
        self.assertLess(min(shares), 1)
        self.assertGreater(min(shares), 0.2)


if __name__ == "__main__":
    unittest.main()
