"""INTEGRATE.md says of each public function what it waits for, and names no function that no header declares.

Usage: integrate_test.py SOURCE
"""

import collections
import fnmatch
import pathlib
import re
import sys
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1))
PAGE = (SOURCE / "client/INTEGRATE.md").read_text(encoding="utf-8")
HEADERS = "\n".join(path.read_text(encoding="utf-8") for path in (SOURCE / "client/include/pqcached").glob("*.h"))
SPAN = re.compile(r"`(pqc_[a-z0-9_*]+)`")


def functions(headers):
    """The functions that the headers declare as a part of the ABI."""
    code = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    return re.findall(r"\bPQC_API\b[^;(]*?\b(pqc_\w+)\s*\(", code)


def waits(page):
    """The names and patterns of "What may block": those in the table's first column, and those that never wait."""
    section = page.split("## What may block\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    paragraph = re.search(r"^These calls never wait .*?\n\n", section, re.MULTILINE | re.DOTALL).group()
    return SPAN.findall(" ".join(rows)), SPAN.findall(paragraph)


class IntegrateTest(unittest.TestCase):
    def test_each_function_is_listed_once_by_its_waits(self):
        table, never = waits(PAGE)
        declared = functions(HEADERS)
        self.assertGreater(len(declared), 90)
        listed = collections.Counter(name for pattern in table + never for name in fnmatch.filter(declared, pattern))
        self.assertEqual([], [name for name in declared if not listed[name]], "not in the section")
        self.assertEqual([], [name for name in declared if listed[name] > 1], "listed more than once")

    def test_each_listed_function_exists(self):
        declared = functions(HEADERS)
        table, never = waits(PAGE)
        self.assertEqual([], [pattern for pattern in table + never if not fnmatch.filter(declared, pattern)])

    def test_each_name_of_the_page_is_in_a_header(self):
        named = set(re.findall(r"\b(?:pqc|PQC)_\w+\b(?!\.\.\.|\*)", PAGE)) - {"pqc_gpu_"}
        self.assertEqual(set(), {name for name in named if not re.search(rf"\b{name}\b", HEADERS)})

    def test_names_are_found_in_page_and_header(self):
        page = ("## What may block\n| call | waits for |\n|---|---|\n| `pqc_a_*`, `pqc_b` | `pqc_c` |\n\n"
                "These calls never wait for\n`pqc_d`.\n\n`pqc_e`\n## Next\n")
        self.assertEqual((["pqc_a_*", "pqc_b"], ["pqc_d"]), waits(page))
        header = "/* PQC_API int pqc_old(void); */ PQC_API const pqc_s*\n pqc_a_x(const pqc_t* t);"
        self.assertEqual(["pqc_a_x"], functions(header))


if __name__ == "__main__":
    unittest.main()
