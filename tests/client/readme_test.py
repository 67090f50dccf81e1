"""The C++ of README.md, and of client/README.md if any, is what client/examples/chat/main.cc has between its marks.

Usage: readme_test.py SOURCE
"""

import pathlib
import re
import sys
import textwrap


def main() -> int:
    source = pathlib.Path(sys.argv[1])
    parts = (source / "client/examples/chat/main.cc").read_text().split("  // [example]\n")
    if len(parts) != 3:
        print("client/examples/chat/main.cc: two [example] marks are needed")
        return 1
    example = textwrap.dedent(parts[1]).strip()
    failed = False
    for name, allowed in (("README.md", [[example]]), ("client/README.md", [[], [example]])):
        blocks = re.findall(r"```cpp\n(.*?)```", (source / name).read_text(), re.DOTALL)
        blocks = [block.strip() for block in blocks]
        if blocks not in allowed:
            print(f"{name}: may only have this one ```cpp block:\n{example}\nbut has {len(blocks)}:")
            print("\n---\n".join(blocks))
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
