"""Each rule of prose must find what it is there to find, and product_lines must count what it says."""

import json
import pathlib
import tempfile
import unittest
from unittest import mock

import check_tree
import product_lines
import prose

GOOD = "// Returns the number of tokens.\nint Count();\n"


class Tree(unittest.TestCase):
    def in_tree(self, files, function):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return function(root, [pathlib.PurePath(name) for name in files])

    def prose_of(self, files):
        return self.in_tree(files, prose.measure)

    def findings_in(self, files):
        return self.prose_of(files).findings

    def assert_finds(self, words, files):
        found = self.findings_in(files)
        self.assertTrue(any(words in line for line in found), f"{words!r} not in {found}")


class PatternsTest(Tree):
    def kinds_of(self, comment):
        [block] = self.prose_of({"kernels/a.h": comment + "\n"}).blocks
        return block.kinds()

    def test_each_pattern_finds_its_kind(self):
        self.assertEqual(["of", "preposition"], self.kinds_of("// Of a segment."))
        self.assertEqual(["preposition"], self.kinds_of("// For the evictor."))
        self.assertEqual(["question"], self.kinds_of("// What a client maps."))
        self.assertEqual(["agent"], self.kinds_of("// Waits for whoever holds it."))
        self.assertEqual(["tells"], self.kinds_of("// The page tells the client."))
        self.assertEqual([], self.kinds_of("// Returns what the client maps, for the evictor."))

    def test_each_word_of_a_pattern(self):
        for word in ("By", "For", "To", "In", "With", "From", "Under", "Behind", "At", "As", "Beside", "Among", "On"):
            self.assertEqual(["preposition"], self.kinds_of(f"// {word} a segment."))
        for word in ("What", "Whether", "Where", "Those", "That", "Which", "How"):
            self.assertEqual(["question"], self.kinds_of(f"// {word} a segment."))
        for word in ("Who", "Whoever", "Nobody"):
            self.assertEqual(["question", "agent"], self.kinds_of(f"// {word} reads."))
        for word in ("whoever", "nobody", "somebody", "anybody", "who"):
            self.assertEqual(["agent"], self.kinds_of(f"// Waits for {word}."))
        for word in ("tell", "Tells", "told"):
            self.assertEqual(["tells"], self.kinds_of(f"// A page {word}."))

    def test_openings_are_those_of_blocks_not_of_lines(self):
        self.assertEqual([], self.kinds_of("// Returns the tokens\n// of a segment."))
        self.assertEqual(["tells"], self.kinds_of("// Returns what\n// it told."))

    def test_shares_fail_beyond_their_limits(self):
        def tree(odd, comment):
            return {f"kernels/{i}.h": comment if i < odd else GOOD for i in range(200)}

        self.assertEqual([], self.findings_in(tree(3, "// Of a segment.\n")))
        self.assert_finds("2.0 % of comment blocks with an odd opening", tree(4, "// Of a segment.\n"))
        self.assertEqual([], self.findings_in(tree(6, "// Waits for anybody.\n")))
        self.assert_finds("3.5 % of comment blocks that match", tree(7, "// Waits for anybody.\n"))

    def test_blocks_are_runs_of_whole_comment_lines_in_sources(self):
        self.assertEqual(["Adds two numbers. Fast."], [block.text for block in self.prose_of({
            "kernels/a.cc": "// SPDX-License-Identifier: Apache-2.0\n\n// Adds two\n// numbers. Fast.\nint x;  // for one\n// one\n",
            "tests/a.cc": "// Of a test.\n",
            "deploy/a.sh": "# Of a script.\n"}).blocks])
        self.assertEqual(["Adds two."], [b.text for b in self.prose_of({"client/a.c": "/* Adds\n * two. */\n"}).blocks])
        self.assertEqual(["Adds two."], [b.text for b in self.prose_of({"client/a.py": '#!/x y\n"""Of it."""\n# Adds two.\n'}).blocks])
        self.assertEqual([], self.prose_of({"client/a.c": 'char* s = "// Of a string.";\nint y = 1\'000;\n'}).blocks)

    def test_an_empty_tree_is_no_failure(self):
        self.assertEqual([], self.findings_in({}))


class LengthTest(Tree):
    long = "word " * 20 + "end"  # 103 columns

    def test_long_comment_lines(self):
        for name, text in {"kernels/a.cc": f"// {self.long}\n", "kernels/b.h": f"int x;  // {self.long}\n",
                           "client/a.c": f"/* a\n * {self.long} */\n", "proto/a.proto": f"// {self.long}\n",
                           "client/a.py": f"x = 1  # {self.long}\n", "kernels/t.h": f"// | {self.long} |\n"}.items():
            self.assert_finds("columns (limit 100)", {name: text})

    def test_exactly_the_limit_and_urls_are_fine(self):
        self.assertEqual([], self.findings_in({
            "kernels/a.cc": "// " + "a" * 97 + "\n// https://example.com/" + "a" * 100 + "\n",
            "kernels/b.cc": 'auto x = "' + "a" * 100 + '";\n'}))
        self.assert_finds("a.cc:1: a comment of 101", {"kernels/a.cc": "// " + "a" * 98 + "\n"})

    def test_long_markdown_lines(self):
        self.assert_finds("README.md:2: 103 columns", {"README.md": f"# Title\n{self.long}\n"})
        self.assert_finds("gpu/README.md:4: 103 columns", {"gpu/README.md": f"```\n{self.long}\n```\n{self.long}\n"})
        self.assertEqual([], self.findings_in({"README.md": (
            f"| {self.long} |\n```sh\n{self.long}\n```\n    {self.long}\n[a](b.md) {self.long}\n"
            f"https://example.com {self.long}\n")}))


class WordsTest(Tree):
    def test_each_forbidden_word_in_a_header(self):
        for word in ("tell", "Tells", "told", "hear", "hears", "heard", "let go", "lets go", "anew", "under way", "whoever",
                     "Nobody", "somebody", "what is there", "comes free", "beside", "meanwhile"):
            for name in ("client/include/a.h", "kvstore/store.h", "client/a.hpp", "proto/a.proto"):
                self.assert_finds(f"{name}:2: forbidden in a comment of a header: {word}", {name: f"\nint x;  // A b {word} c\n"})

    def test_words_are_found_across_lines(self):
        self.assert_finds("a.h:2: forbidden in a comment of a header: under way", {"gpu/a.h": "\n// A call under\n// way.\n"})

    def test_a_digit_separator_begins_no_literal(self):
        self.assert_finds("a.h:1: forbidden", {"gpu/a.h": "int y = 1'000;  // Nobody's.\n"})

    def test_other_words_and_places_are_free(self):
        self.assertEqual([], self.findings_in({
            "gpu/a.h": "// Tolerates errors besides these, and a letter.\nint Tell();\n",
            "gpu/a.cc": "// Returns the rest. Meanwhile the copy runs.\n",
            "tests/a.h": "// Waits. Nobody else does.\n"}))

    def test_help_texts(self):
        for name in ("service/config/config_keys.cc", "service/main.cc", "client/ctl/main.cc"):
            self.assert_finds(f"{name}:2: forbidden in a help text: nobody", {name: '\nAdd("evict", "drops what nobody uses");\n'})
        self.assertEqual([], self.findings_in({"service/main.cc": 'Add("evict", "drops an unused sequence");\n'}))
        self.assertEqual([], self.findings_in({"service/base/log.cc": 'Add("nobody");\n'}))

    def test_help_texts_are_where_the_tree_has_them(self):
        root = pathlib.Path(__file__).parents[2]
        for name in prose.HELP_TEXTS:
            self.assertTrue((root / name).is_file(), name)


class ProductTest(Tree):
    FILES = {
        "kernels/b.h": "",
        "kernels/a.h": "// A comment.\n\n#include <kernels/b.h>\nint A();  // trailing\n/* more\n * of it */\n",
        "kvstore/a.cc": '#include "kernels/a.h"\n#include "kvstore/read/b.h"\nconst char* s = "/* no comment";\n',
        "kvstore/read/b.h": "",
        "kvstore/CMakeLists.txt": "# A comment.\nadd_library(a a.cc)\n",
        "client/include/pqcached/client.h": "int c;\n",
        "client/c.cc": '#include "pqcached/client.h"\n#include "pqcached/v1/t.pb.h"\n#include <vector>\n',
        "proto/pqcached/v1/t.proto": 'syntax = "proto3";\n',
        "client/a.py": '#!/usr/bin/env python3\n"""Docs\nof it."""\n# A comment.\n\nx = """a\n\nb"""\n',
        "deploy/a.sh": "#!/bin/sh\n# A comment.\ntrue\n",
        "tests/a.cc": '#include "kernels/a.h"\nint t;\n',
        "README.md": "text\n",
    }

    def test_lines_folders_and_arrows(self):
        product = self.in_tree(self.FILES, product_lines.count)
        self.assertEqual(2 + 3 + 0 + 1 + 1 + 3 + 1 + 2 + 1, product.lines)
        self.assertEqual({"kernels", "kvstore", "kvstore/read", "client", "client/include/pqcached", "proto/pqcached/v1", "deploy"},
                         product.folders)
        self.assertEqual({("kvstore", "kernels"), ("kvstore", "kvstore/read"), ("client", "client/include/pqcached"),
                          ("client", "proto/pqcached/v1")}, product.arrows)

    def test_generated_files_do_not_count_when_their_generator_does(self):
        generated = '"""Numbers.\n\nGenerated by client/generate.py; do not edit.\n"""\n\nx = 1\n'
        for generator, lines in (("client/generate.py", 1), ("client/other.py", 2), ("tests/generate.py", 1)):
            product = self.in_tree({"client/x.py": generated, generator: "y = 1\n"}, product_lines.count)
            self.assertEqual(lines, product.lines, generator)
        self.assertEqual(1, self.in_tree({"client/x.py": generated.replace("client/g", "tests/g"), "tests/generate.py": "y = 1\n"},
                                         product_lines.count).lines)

    def test_json_has_rows_for_the_figures(self):
        def run(root, files):
            out = root / "rows.json"
            with mock.patch("sys.argv", ["prose.py", str(root), "--json", str(out)]), mock.patch("builtins.print"), \
                    mock.patch.object(check_tree, "tracked_files", return_value=files):
                self.assertEqual(0, prose.main())
            return {row["name"]: row for row in json.loads(out.read_text())}

        rows = self.in_tree({"kernels/a.h": GOOD}, run)
        self.assertEqual({"prose_openings_percent", "prose_odd_percent", "product_lines", "house_folders", "house_include_arrows"},
                         set(rows))
        self.assertEqual({"house"}, {row["area"] for row in rows.values()})
        self.assertEqual((0, 1.5), (rows["prose_openings_percent"]["value"], rows["prose_openings_percent"]["goal"]))
        self.assertEqual((0, 3), (rows["prose_odd_percent"]["value"], rows["prose_odd_percent"]["goal"]))
        self.assertEqual((1, None), (rows["product_lines"]["value"], rows["product_lines"]["goal"]))


if __name__ == "__main__":
    unittest.main()
