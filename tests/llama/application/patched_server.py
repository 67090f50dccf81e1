#!/usr/bin/env python3
"""Builds llama-server with deploy/llama_server.patch, and prints the folder that it is in.

patched_server.py BUILD   BUILD is a build folder of this project; its client is installed beside the server.

Lies with the other builds of llama.cpp (engine.py). Takes six minutes on two cores, and less when only the patch has changed.
"""

import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import engine  # noqa: E402

VERSION = engine.TESTED[0]
PATCH = pathlib.Path(__file__).resolve().parents[3] / "deploy/llama_server.patch"


def folder():
    return engine.cache() / f"{VERSION}-patched"


def binaries():
    return folder() / "build/bin"


def is_built():
    applied = folder() / "built"
    return applied.exists() and applied.read_text() == PATCH.read_text()


def run(*words):
    subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)


def build(pqcached):
    engine.fetch(VERSION)
    patched, installed = folder() / "source", folder() / "pqcached"
    run("cmake", "--install", pqcached, "--component", "client", "--prefix", installed)
    shutil.copytree(engine.source(VERSION), patched, symlinks=True, dirs_exist_ok=True)
    run("patch", "--directory", patched, "--strip", "1", "--input", PATCH)
    launcher = [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")] if shutil.which("ccache") else []
    run("cmake", "-S", patched, "-B", folder() / "build", "-G", "Ninja", *engine.OPTIONS, *launcher, f"-DCMAKE_PREFIX_PATH={installed}")
    run("cmake", "--build", folder() / "build", "--target", "llama-server")
    (folder() / "built").write_text(PATCH.read_text())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build(sys.argv[1])
    print(binaries())
