"""The examples in C and Python run, and agree with the one in C++. Usage: examples_test.py BUILD C_EXAMPLE CXX_EXAMPLE C_CHAT CXX_CHAT CXX_KCACHE"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest

C_EXAMPLE, CXX_EXAMPLE, C_CHAT, CXX_CHAT, CXX_KCACHE = (sys.argv.pop(2) for _ in range(5))

from daemon import SOURCE, running  # noqa: E402  (takes its argument from what is left)

import numpy as np  # noqa: E402

EXAMPLES = SOURCE / "client/examples"
TINYLM = SOURCE / "tests/tinylm"
sys.path.insert(0, str(TINYLM / "python"))


def run(*command):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE / "client/python")}
    done = subprocess.run([str(part) for part in command], env=environment, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise AssertionError(f"{command[0]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


class ExamplesTest(unittest.TestCase):
    def test_the_smallest_engines_print_the_same_in_all_languages(self):
        with running() as daemon:
            expected = run(CXX_EXAMPLE, daemon.endpoint)
            self.assertRegex(expected, r"attended 16 sink \+ 64 window \+ \d+ selected of 4096 tokens; output\[0\] = -?0\.\d{4}")
            self.assertEqual(run(C_EXAMPLE, daemon.endpoint), expected)
            self.assertEqual(run(sys.executable, EXAMPLES / "python/attend.py", daemon.endpoint), expected)

    def test_an_engine_with_keys_of_its_own_reads_a_part_of_the_values(self):
        with running() as daemon:
            printed = run(CXX_KCACHE, daemon.endpoint)
        found = re.fullmatch(r"read (\d+) of 8192 values, with (\d+) % of the attention at least; output\[0\] = (-?0\.\d{4}), "
                             r"without renormalisation (-?0\.\d{4})\n", printed)
        self.assertIsNotNone(found, printed)
        self.assertTrue(128 <= int(found[1]) <= 512, printed)  # 2 kv heads, each with 64 for 1 to 4 query heads
        self.assertTrue(50 < int(found[2]) < 100, printed)
        self.assertLess(abs(float(found[4])), abs(float(found[3])))

    def test_conversations_print_the_same_in_all_languages(self):
        config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
                  "hidden_size": 256, "torch_dtype": "float16"}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            commands = ([CXX_CHAT], [C_CHAT], [sys.executable, EXAMPLES / "python/chat.py"])
            reports = []
            for command in commands:
                with running() as daemon:
                    more = [path] if command[0] == sys.executable else []
                    reports.append(run(*command, daemon.endpoint, *more))
        first, second = reports[0].splitlines()
        self.assertRegex(first, r"^0 of 600 tokens were stored; attention\[0\] = -?\d\.\d{3}$")
        # All whole steps of 128 tokens of the 659 rows: the prompt alone has four, the fifth needs generated tokens.
        self.assertRegex(second, r"^640 of 760 tokens were stored; attention\[0\] = -?\d\.\d{3}$")
        self.assertEqual(reports, [reports[0]] * 3)

    def test_the_conversations_are_short(self):
        for name in ("chat/main.cc", "c/chat.c", "python/chat.py"):
            self.assertLessEqual(len((EXAMPLES / name).read_text().splitlines()), 40, name)

    def test_the_c_example_is_short_and_says_what_is_wrong(self):
        self.assertLessEqual(len((EXAMPLES / "c/attend.c").read_text().splitlines()), 80)
        done = subprocess.run([C_EXAMPLE, "unix:///nobody/listens/here"], stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stderr.startswith("UNAVAILABLE: "), done.stderr)

    def test_the_numpy_model_is_the_one_of_the_reference(self):
        from tinylm import TinyLM
        reference = json.loads((TINYLM / "reference_dev/reference_tiny.json").read_text())
        model = TinyLM(TINYLM / "model")
        *context, last = reference["ids"]
        rows = {layer: [] for layer in model.full_layers}
        model.prefill(context, lambda layer, first, keys, values: rows[layer].append((keys, values)))

        def attend_full(layer, position, queries, keys, values):
            from tinylm import attend
            (old_keys, old_values), = rows[layer]
            return attend(queries[:, None], np.concatenate([old_keys, keys[None]]).transpose(1, 0, 2),
                          np.concatenate([old_values, values[None]]).transpose(1, 0, 2))[0][:, 0]

        np.testing.assert_allclose(model.decode(last, attend_full), reference["logits_last"], atol=2e-3)

    def test_the_quickstart_finds_what_full_attention_finds(self):
        with running() as daemon:
            report = run(sys.executable, TINYLM / "python/quickstart.py", "--endpoint", daemon.endpoint, "--length", 1024,
                         "--tasks", "niah", "--contexts", 1, "--questions", 3)
        right = dict(re.findall(r"^(\S.*?)  +(\d)/3 ", report, re.MULTILINE))
        self.assertEqual(len(right), 8, report)
        self.assertEqual(right["full attention"], "3", report)
        self.assertEqual(right["exact top-k, 1/5"], "3", report)
        self.assertEqual(right["pqcached m=4 b=8, 1/5"], "3", report)
        self.assertEqual(right["sink + window only"], "0", report)
        self.assertRegex(report, r"exact top-k, 1/10 .* 16\+ 64\+ +\d\d ")

    def test_the_readme_shows_the_example(self):
        block, = re.findall(r"```python\n(.*?)```", (SOURCE / "client/README.md").read_text(), re.DOTALL)
        self.assertIn(textwrap.indent(block, "    "), (EXAMPLES / "python/chat.py").read_text())


if __name__ == "__main__":
    unittest.main()
