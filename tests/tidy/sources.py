"""Comments, string literals and code lines of the tree's sources, for the checks of this folder."""

import ast
import io
import re
import tokenize
from typing import NamedTuple

C_LIKE = {".h", ".hpp", ".cc", ".c", ".cu", ".cuh", ".proto"}


class Comment(NamedTuple):
    """The part of one line that is comment, without its markers."""

    line: int
    text: str
    is_whole_line: bool


class Parts(NamedTuple):
    comments: list  # of Comment, ascending
    strings: list  # of (line, text) of the string literals
    code_lines: set  # numbers of the lines with anything but comments and blanks


# One alternative per kind of token; what matches none of them is code, character by character. A digit separator
# (1'000) must not begin a character literal.
C_TOKEN = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?(?:\*/|\Z))|(?P<string>"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<number>\b[0-9][0-9A-Za-z_.']*)|(?P<char>'(?:\\.|[^'\\\n])+')|(?P<blank>\s+)|(?P<code>[A-Za-z_]\w*|.)""",
    re.DOTALL)


def parts_of_c(text):
    parts = Parts([], [], set())
    number = 1
    for match in C_TOKEN.finditer(text):
        token = match.group()
        if match.lastgroup in ("line", "block"):
            before = text[text.rfind("\n", 0, match.start()) + 1:match.start()]
            for offset, line in enumerate(token.split("\n")):
                alone = offset > 0 or not before.strip()
                parts.comments.append(Comment(number + offset, line.strip().strip("/* "), alone))
        elif match.lastgroup == "string":
            parts.strings.append((number, token[1:-1]))
            parts.code_lines.add(number)
        elif match.lastgroup != "blank":
            parts.code_lines.add(number)
        number += token.count("\n")
    return parts


def docstring_lines(text):
    lines = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
            continue
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.update(range(value.lineno, value.end_lineno + 1))
    return lines


def parts_of_python(text):
    parts = Parts([], [], set())
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    docstrings = docstring_lines(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        number = token.start[0]
        if token.type == tokenize.COMMENT:
            if not token.string.startswith("#!"):
                alone = not token.line[:token.start[1]].strip()
                parts.comments.append(Comment(number, token.string.strip("# "), alone))
        elif token.type not in skipped:
            parts.code_lines.update(set(range(number, token.end[0] + 1)) - docstrings)
    blank = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    parts.code_lines.difference_update(blank)
    return parts


def parts_of_lines(text):
    parts = Parts([], [], set())
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#!"):
            continue
        if stripped.startswith("#"):
            parts.comments.append(Comment(number, stripped.strip("# "), True))
        elif stripped:
            parts.code_lines.add(number)
    return parts


def is_cmake(path):
    return path.suffix == ".cmake" or path.name == "CMakeLists.txt"


def is_product(path):
    """A source that parts_of can read, outside tests/."""
    is_source = path.suffix in C_LIKE | {".py", ".sh"} or is_cmake(path)
    return is_source and path.parts[0] != "tests" and not path.parts[0].startswith(".")


def parts_of(path, text):
    if path.suffix in C_LIKE:
        return parts_of_c(text)
    return parts_of_python(text) if path.suffix == ".py" else parts_of_lines(text)
