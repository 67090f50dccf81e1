"""The example in a public header is what a compiled program has between its [example] marks.

A header's example begins behind a comment line that starts with "Example" and ends with a colon; it is the block of lines
that are indented by four more columns than the comment's text. The program has the same lines between "// [example]" and
"// [/example]". White space does not count.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = "client/include/pqcached"
PROGRAMS = "tests/client/include"
EXAMPLES = {
    f"{HEADERS}/client.h": f"{PROGRAMS}/client_h_example.c",
    f"{HEADERS}/status.h": f"{PROGRAMS}/status_h_example.c",
    f"{HEADERS}/tensor.h": f"{PROGRAMS}/tensor_h_example.c",
    f"{HEADERS}/index.h": f"{PROGRAMS}/index_h_example.c",
    f"{HEADERS}/names.h": f"{PROGRAMS}/names_h_example.c",
    f"{HEADERS}/query.h": f"{PROGRAMS}/query_h_example.c",
    f"{HEADERS}/model.h": f"{PROGRAMS}/model_h_example.c",
    f"{HEADERS}/rows.h": f"{PROGRAMS}/rows_h_example.c",
    f"{HEADERS}/step.h": f"{PROGRAMS}/step_h_example.c",
    f"{HEADERS}/progress.h": f"{PROGRAMS}/progress_h_example.c",
    f"{HEADERS}/attach.h": f"{PROGRAMS}/sharing/attach_h_example.c",
    f"{HEADERS}/cache_events.h": f"{PROGRAMS}/events/cache_events_h_example.c",
    f"{HEADERS}/cache_events.hpp": f"{PROGRAMS}/events/cache_events_hpp_example.cc",
    f"{HEADERS}/page_cache.h": f"{PROGRAMS}/page_cache/page_cache_h_example.c",
    f"{HEADERS}/page_cache.hpp": f"{PROGRAMS}/page_cache/page_cache_hpp_example.cc",
    f"{HEADERS}/operation.h": f"{PROGRAMS}/operation_h_example.c",
    f"{HEADERS}/load.h": f"{PROGRAMS}/load_h_example.c",
    f"{HEADERS}/threads.h": f"{PROGRAMS}/threads_h_example.c",
    f"{HEADERS}/decode.h": f"{PROGRAMS}/decode_h_example.c",
    f"{HEADERS}/pages.h": f"{PROGRAMS}/pages_h_example.c",
    f"{HEADERS}/positions.h": f"{PROGRAMS}/positions_h_example.c",
    f"{HEADERS}/gpu.h": f"{PROGRAMS}/gpu_h_example.c",
    f"{HEADERS}/client.hpp": f"{PROGRAMS}/client_hpp_example.cc",
    f"{HEADERS}/sequence.hpp": f"{PROGRAMS}/sequence_hpp_example.cc",
    f"{HEADERS}/step.hpp": f"{PROGRAMS}/step_hpp_example.cc",
    f"{HEADERS}/values.hpp": f"{PROGRAMS}/values_hpp_example.cc",
    f"{HEADERS}/operation.hpp": f"{PROGRAMS}/operation_hpp_example.cc",
    f"{HEADERS}/gpu.hpp": f"{PROGRAMS}/gpu_hpp_example.cc",
    "kvstore/store.h": "tests/kvstore/store_h_example.cc",
}
COMMENT = re.compile(r"^\s*(?://|/\*| \*)(?!/)( .*|)$")
TITLE = re.compile(r"^ Example\b.*:$")
INDENT = " " * 5  # the blank behind the comment's mark, and four columns


def normalised(lines):
    """The lines that have text, with single blanks."""
    return [" ".join(line.split()) for line in lines if line.strip()]


def comment_text(line):
    """What a comment line has behind its mark; None for a line that is no comment."""
    found = COMMENT.match(line)
    return found and found.group(1).rstrip()


def examples_of_header(text):
    """The indented blocks behind the lines that announce an example."""
    blocks = []
    block = None  # of the example that is being read
    for line in text.splitlines():
        comment = comment_text(line)
        if comment is None:
            block = None
        elif TITLE.match(comment):
            block = []
            blocks.append(block)
        elif block is not None and (comment.startswith(INDENT) or not comment):
            block.append(comment)
        else:
            block = None
    return [normalised(block) for block in blocks]


def examples_of_program(text):
    """What lies between the marks, pair by pair."""
    parts = re.findall(r"^\s*// \[example\]\n(.*?)^\s*// \[/example\]$", text, re.DOTALL | re.MULTILINE)
    return [normalised(part.splitlines()) for part in parts]


class HeaderExamplesTest(unittest.TestCase):
    def test_each_header_has_the_example_that_is_compiled(self):
        for header, program in EXAMPLES.items():
            with self.subTest(header=header):
                in_program = examples_of_program((ROOT / program).read_text(encoding="utf-8"))
                self.assertEqual(1, len(in_program), f"{program}: one pair of [example] marks is needed")
                in_header = examples_of_header((ROOT / header).read_text(encoding="utf-8"))
                self.assertEqual(in_program, in_header, f"{header} and {program} differ")

    def test_every_public_header_has_an_example(self):
        headers = {str(path.relative_to(ROOT)) for path in (ROOT / HEADERS).iterdir()}
        self.assertEqual(set(), headers - set(EXAMPLES))

    def test_a_block_ends_where_the_indent_ends(self):
        text = "/* Words.\n *\n * Example: says a.\n\n * Example, of two lines:\n *\n *     a();\n *\n *       b();\n * more\n *     c\n */\n"
        self.assertEqual([["a();", "b();"]], examples_of_header(text))

    def test_comments_of_both_kinds_are_read(self):
        self.assertEqual([["a();"]], examples_of_header("// Example:\n//     a();\nint b;\n"))
        self.assertEqual([["a();"]], examples_of_header("/* Example:\n *     a();\n */\n"))

    def test_a_changed_line_is_found_and_white_space_is_not(self):
        program = "int main() {\n  // [example]\n  a( 1 );\n  // [/example]\n}\n"
        self.assertEqual([["a( 1 );"]], examples_of_program(program))
        self.assertEqual(examples_of_program(program), examples_of_header("// Example:\n//     a( 1   );\n"))
        self.assertNotEqual(examples_of_program(program), examples_of_header("// Example:\n//     a( 2 );\n"))


if __name__ == "__main__":
    unittest.main()
