"""Writes a C source that defines every function which the public headers declare, so that a compiler describes their
types in debugging information: define_declared.py INCLUDE_FOLDER OUTPUT. The functions only abort."""

import pathlib
import re
import sys

DECLARATION = re.compile(r"^PQC_API ([^;{}]*?\b(pqc_\w+)\([^;]*?\));", re.MULTILINE | re.DOTALL)


def main():
    folder, output = map(pathlib.Path, sys.argv[1:])
    headers = sorted(path.name for path in (folder / "pqcached").glob("*.h"))
    lines = [f'#include "pqcached/{name}"' for name in headers] + ["#include <stdlib.h>"]
    for name in headers:
        text = (folder / "pqcached" / name).read_text()
        found = DECLARATION.findall(text)
        if len(found) != len(re.findall("^PQC_API", text, re.MULTILINE)):
            sys.exit(f"{name}: declarations are written in a way that this script does not read")
        lines += [f"{declaration} {{ abort(); }}" for declaration, _ in found]
    output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
