"""Measures the prose of the tree: comments, help texts and READMEs.

Run as `prose.py ROOT [--list] [--json FILE]`: prints the measures and one line per finding, and exits with 1 when there
is any finding. --list prints every odd comment block too. --json writes the measures as rows for tests/figures.py.

A comment should be a sentence that a stranger reads once. Five patterns find the blocks that most often are not; they
are a floor: a comment that is bent to miss them is worse than one that matches, so a small share may match.
"""

import argparse
import json
import pathlib
import re
import sys
from typing import NamedTuple

import check_tree
import product_lines
import sources

# A comment block is odd when one of these matches. The first three are about its opening: a fragment that begins with
# "Of", with a preposition, or with a question word or demonstrative has its subject elsewhere. The last two are about
# agents: a person without a name ("whoever holds it"), and a machine that tells.
PATTERNS = {
    "of": re.compile(r"^Of\b"),
    "preposition": re.compile(r"^(Of|By|For|To|In|With|From|Under|Behind|At|As|Beside|Among|On)\b"),
    "question": re.compile(r"^(What|Whether|Who|Whoever|Where|Those|That|Nobody|Which|How)\b"),
    "agent": re.compile(r"\b(whoever|nobody|somebody|anybody|who)\b", re.IGNORECASE),
    "tells": re.compile(r"\b(tell|tells|told)\b", re.IGNORECASE),
}
OPENINGS = ("of", "preposition", "question")
MAX_OPENINGS_PERCENT = 1.5
MAX_ODD_PERCENT = 3.0
# LevelDB has 1.1 % and less than 3 %.

MAX_COLUMNS = 100
URL = re.compile(r"https?://\S")

# Words that make a machine a person or a place, in what is read without the code: headers, the protocol, help texts.
FORBIDDEN = re.compile(
    r"\b(tell|tells|told|hear|hears|heard|lets?\s+go|anew|under\s+way|whoever|nobody|somebody|what\s+is\s+there"
    r"|comes\s+free|beside|meanwhile)\b", re.IGNORECASE)
HEADERS = {".h", ".hpp", ".cuh", ".proto"}
HELP_TEXTS = {
    "service/config/command_line.cc", "service/config/config_keys.cc", "service/config/config_pressure.cc", "service/main.cc",
    "client/ctl/main.cc", "client/conform/main.cc",
}

BLOCK_SOURCES = sources.C_LIKE | {".py"}
LICENCE = re.compile(r"SPDX|Copyright")


class Block(NamedTuple):
    """A run of lines that are comment and nothing else."""

    path: pathlib.PurePath
    line: int
    text: str

    def kinds(self):
        return [name for name, pattern in PATTERNS.items() if pattern.search(self.text)]


class Prose(NamedTuple):
    blocks: list
    findings: list

    def share(self, names):
        hits = sum(1 for block in self.blocks if not set(names).isdisjoint(block.kinds()))
        return 100.0 * hits / max(1, len(self.blocks))


def runs(comments):
    """Splits comments into runs of adjacent lines."""
    run = []
    for comment in comments:
        if run and comment.line > run[-1].line + 1:
            yield run
            run = []
        run.append(comment)
    if run:
        yield run


def blocks_of(path, parts):
    for run in runs([comment for comment in parts.comments if comment.is_whole_line]):
        text = " ".join(comment.text for comment in run).strip()
        if len(text.split()) > 1 and not LICENCE.search(text):
            yield Block(path, run[0].line, text)


def long_comment_findings(path, parts, lines):
    for number in sorted({comment.line for comment in parts.comments}):
        line = lines[number - 1]
        if len(line) > MAX_COLUMNS and not URL.search(line):
            yield f"{path}:{number}: a comment of {len(line)} columns (limit {MAX_COLUMNS})"


def long_markdown_findings(path, lines):
    fence = None
    for number, line in enumerate(lines, 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark:
            fence = None if fence and mark.group(1).startswith(fence) else fence or mark.group(1)
            continue
        is_code = fence is not None or line.startswith(("    ", "\t"))
        is_table = line.lstrip().startswith("|")
        has_link = URL.search(line) or re.search(r"\]\([^)]*\)|^\[[^]]*\]:", line)
        if len(line) > MAX_COLUMNS and not (is_code or is_table or has_link):
            yield f"{path}:{number}: {len(line)} columns (limit {MAX_COLUMNS})"


def word_findings(path, parts):
    for run in runs(parts.comments):
        text = ""
        begins = []  # (offset in the text, line)
        for comment in run:
            begins.append((len(text), comment.line))
            text += comment.text + "\n"
        for match in FORBIDDEN.finditer(text):
            line = max(number for offset, number in begins if offset <= match.start())
            yield f"{path}:{line}: forbidden in a comment of a header: {' '.join(match.group().split())}"


def help_findings(path, parts):
    for line, text in parts.strings:
        for match in FORBIDDEN.finditer(text):
            yield f"{path}:{line}: forbidden in a help text: {match.group()}"


def share_findings(prose):
    for names, limit, what in ((OPENINGS, MAX_OPENINGS_PERCENT, "with an odd opening"),
                               (tuple(PATTERNS), MAX_ODD_PERCENT, "that match a pattern")):
        if prose.share(names) > limit:
            yield f"{prose.share(names):.1f} % of comment blocks {what} (limit {limit:g} %)"


def measure(root, files):
    prose = Prose([], [])
    for path in files:
        is_source = sources.is_product(path) and path.suffix in BLOCK_SOURCES
        if not is_source and path.suffix != ".md":
            continue
        text = (root / path).read_text(encoding="utf-8")
        if not is_source:
            prose.findings.extend(long_markdown_findings(path, text.splitlines()))
            continue
        parts = sources.parts_of(path, text)
        prose.blocks.extend(blocks_of(path, parts))
        prose.findings.extend(long_comment_findings(path, parts, text.splitlines()))
        if path.suffix in HEADERS:
            prose.findings.extend(word_findings(path, parts))
        if str(path) in HELP_TEXTS:
            prose.findings.extend(help_findings(path, parts))
    prose.findings.extend(share_findings(prose))
    return prose


def rows_of(prose):
    def row(name, names, goal, against):
        return {"area": "house", "name": name, "value": round(prose.share(names), 2), "unit": "%", "better": "lower",
                "goal": goal, "against": against, "samples": len(prose.blocks)}

    return [
        row("prose_openings_percent", OPENINGS, MAX_OPENINGS_PERCENT, "comment blocks with an odd opening"),
        row("prose_odd_percent", PATTERNS, MAX_ODD_PERCENT, "comment blocks that match one of five patterns"),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--list", action="store_true", help="print every odd comment block")
    parser.add_argument("--json", type=pathlib.Path, help="write the measures, and those of product_lines.py, as rows")
    arguments = parser.parse_args()
    files = check_tree.tracked_files(arguments.root)
    prose = measure(arguments.root, files)
    if arguments.list:
        for block in prose.blocks:
            if block.kinds():
                print(f"{block.path}:{block.line}: {', '.join(block.kinds())}: {block.text[:100]}")
    for finding in prose.findings:
        print(finding)
    each = "; ".join(f"{name} {prose.share([name]):.1f} %" for name in PATTERNS)
    print(f"prose: {len(prose.blocks)} comment blocks; openings {prose.share(OPENINGS):.1f} %; "
          f"all patterns {prose.share(PATTERNS):.1f} %; {each}; findings {len(prose.findings)}")
    if arguments.json:
        product = product_lines.count(arguments.root, files)
        arguments.json.write_text(json.dumps(rows_of(prose) + product_lines.rows_of(product), indent=1) + "\n")
    return 1 if prose.findings else 0


if __name__ == "__main__":
    sys.exit(main())
