"""Counts the product: lines of code, folders, and which folder includes which.

Run as `product_lines.py ROOT [--arrows]`. Lines are those of C, C++, CUDA, proto, Python, shell and CMake sources
outside tests/ that are neither blank nor comment (docstrings are comments). A folder counts when sources other than
CMake's lie in it. An arrow is a pair of two folders of which a file of the first includes one of the second.
"""

import pathlib
import re
import sys
from typing import NamedTuple

import check_tree
import sources

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
INCLUDE_ROOTS = ("", "client/include", "proto")
IMPORT = re.compile(r'^\s*import\s+"([^"]+)"\s*;', re.MULTILINE)  # of a proto file


class Product(NamedTuple):
    lines: int
    folders: set
    arrows: set


def included_folder(path, target, files):
    """The folder of an included file of ours; None for others."""
    candidates = [path.parent / target] + [pathlib.PurePath(root) / target for root in INCLUDE_ROOTS]
    for candidate in candidates:
        generated = re.sub(r"(\.grpc)?\.pb\.h$", ".proto", str(candidate))
        if pathlib.PurePath(generated) in files:
            return str(pathlib.PurePath(generated).parent)
    return None


def count(root, files):
    lines, folders, arrows = 0, set(), set()
    known = set(files)
    for path in files:
        if not sources.is_product(path):
            continue
        text = (root / path).read_text(encoding="utf-8")
        lines += len(sources.parts_of(path, text).code_lines)
        if sources.is_cmake(path):
            continue
        folder = str(path.parent)
        folders.add(folder)
        if path.suffix not in sources.C_LIKE:
            continue
        for target in (IMPORT if path.suffix == ".proto" else INCLUDE).findall(text):
            other = included_folder(path, target, known)
            if other is not None and other != folder:
                arrows.add((folder, other))
    return Product(lines, folders, arrows)


def rows_of(product):
    def row(name, value, unit, against):
        return {"area": "house", "name": name, "value": value, "unit": unit, "better": "lower", "goal": None,
                "against": against}

    return [
        row("product_lines", product.lines, "lines", "code outside tests/, without blanks and comments"),
        row("house_folders", len(product.folders), "folders", "folders with sources outside tests/"),
        row("house_include_arrows", len(product.arrows), "arrows", "pairs of folders, the first includes the second"),
    ]


def main():
    root = pathlib.Path(sys.argv[1])
    product = count(root, check_tree.tracked_files(root))
    if "--arrows" in sys.argv[2:]:
        for folder, other in sorted(product.arrows):
            print(f"{folder} -> {other}")
    print(f"product: {product.lines} lines; {len(product.folders)} folders; {len(product.arrows)} include arrows")


if __name__ == "__main__":
    main()
