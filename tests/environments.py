#!/usr/bin/env python3
"""Virtual environments with real engines for the tests of client/engines, outside of the tree.

environments.py NAME   Installs what is missing of `lmcache` or `sglang` (1 to 3 minutes, without CUDA), and prints its Python.

They lie next to the environment of tests/quality/pretrained.py, whose torch and Transformers they use. The engines' declared
dependencies need CUDA, so they are installed without them, and then the packages that their modules import on a CPU.
"""

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "quality")]

import pretrained  # noqa: E402  (found in the line above)

ENGINES = {"lmcache": "lmcache==0.5.6", "sglang": "sglang==0.5.23"}
PACKAGES = {
    "lmcache": ["aiofile==3.12.3", "aiofiles==25.1.0", "aiohttp==3.14.5", "awscrt==0.38.1", "blake3==1.0.11", "cachetools==8.0.2",
                "cryptography==50.0.2", "fastapi==0.141.1", "grpcio==1.78.0", "grpcio-observability==1.78.0", "httptools==0.9.0",
                "httpx==0.28.1", "msgspec==0.22.0", "numba==0.68.1", "numpy==2.2.6", "nvtx==0.2.17", "opentelemetry-api==1.40.0",
                "opentelemetry-exporter-otlp==1.40.0", "opentelemetry-exporter-prometheus==0.61b0", "opentelemetry-sdk==1.40.0",
                "prometheus_client==0.24.1", "protobuf==6.33.6", "psutil==7.2.2", "py-cpuinfo==9.0.0", "PyYAML==6.0.4",
                "pyzmq==27.3.0", "redis==8.1.0", "requests", "sortedcontainers==2.4.0", "uvicorn==0.54.0"],
    # triton: SGLang imports it on every machine.
    "sglang": ["aiohttp==3.14.5", "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "dill==0.4.1", "einops==0.8.2",
               "fastapi==0.141.1", "ipython==9.18.1", "msgspec==0.22.0", "orjson==3.13.0", "partial-json-parser==0.2.1.1.post7",
               "pillow==13.0.0", "prometheus_client==0.24.1", "psutil==7.2.2", "pybase64==1.5.1", "pydantic==2.14.4",
               "python-multipart==0.0.34", "pyzmq==27.3.0", "requests", "sentencepiece==0.2.3", "setproctitle==1.3.8", "tiktoken==0.14.0",
               "triton==3.9.0", "uvicorn==0.54.0", "uvloop==0.23.0", "xxhash==4.1.0"],
}


def folder_of(name):
    return pretrained.cache() / f"{name}-environment"


def wanted(name):
    return "\n".join([ENGINES[name], *PACKAGES[name], *pretrained.PACKAGES])


def is_installed(name):
    marker = folder_of(name) / "installed"
    return marker.exists() and marker.read_text() == wanted(name) and pretrained.is_installed()


def environment(name):
    """The Python of an engine's environment; installs what it lacks."""
    folder = folder_of(name)
    python = folder / "bin/python"
    if is_installed(name):
        return python
    base = pretrained.environment()
    asked = subprocess.run([base, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True)
    venv.create(folder, with_pip=True)
    site = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    site.joinpath("pretrained.pth").write_text(asked.stdout)  # behind the packages of this environment
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--no-deps", ENGINES[name]], check=True)
    if PACKAGES[name]:
        subprocess.run([*pip, *PACKAGES[name]], check=True)
    (folder / "installed").write_text(wanted(name))
    return python


def run_in_environment(name):
    """Runs the calling test again in the engine's environment, if that is installed and it does not run there already. Returns
    whether it runs there.
    """
    if pathlib.Path(sys.prefix).resolve() == folder_of(name).resolve():
        return is_installed(name)
    if is_installed(name):
        python = str(folder_of(name) / "bin/python")
        os.execv(python, [python, *sys.argv])
    return False


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit(__doc__)
    print(environment(sys.argv[1]))
