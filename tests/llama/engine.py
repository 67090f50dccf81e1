#!/usr/bin/env python3
"""llama.cpp for the tests of its plug-in: fetches its source, builds it once, and compiles test programs against it.

engine.py [--tools] [VERSION...]: fetches and builds what is missing (default: the versions that run all tests, and the one that is
          refused), and prints where it is. --tools also builds llama-server, llama-cli, llama-perplexity and llama-bench.

The source package of llama-cpp-python on PyPI carries the whole source of llama.cpp. Sources and builds lie outside of the tree, in
$PQCACHED_MODEL_CACHE or ~/.cache/pqcached. A build takes two minutes on two cores, with the tools six.
"""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request

PACKAGE = "llama-cpp-python"
# Version of the package: SHA-256 of its source.
CHECKSUMS = {
    "0.3.36": "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "0.3.28": "958227b394f413425d6039952096daa0b8b98328c6b99d652862aec775f1672d",
    "0.3.16": "34ed0f9bd9431af045bb63d9324ae620ad0536653740e9bb163a2e1fcb973be6",
}
TESTED = ("0.3.36", "0.3.28")  # ggml 0.25.3 and 0.13.1
REFUSED = "0.3.16"  # backend API version 1
LIBRARIES = ("llama", "ggml-cpu")
TOOLS = ("llama-server", "llama-cli", "llama-perplexity", "llama-bench")
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF",
           "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")


# The libraries of sanitizers, for a plug-in that was built with them.
PRELOAD = os.environ.get("PQCACHED_LLAMA_PRELOAD")
IS_TSAN = "libtsan" in (PRELOAD or "")


def cache():
    own = os.environ.get("PQCACHED_MODEL_CACHE") or pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "pqcached")
    folder = pathlib.Path(own) / "llama.cpp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def source(version):
    return cache() / version / "source"


def binaries(version):
    return cache() / version / "build/bin"


def is_built(version, targets=LIBRARIES):
    marker = cache() / version / "built"
    return marker.exists() and set(targets) <= set(marker.read_text().split())


def package_url(version):
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    request = urllib.request.Request(f"{index.rstrip('/')}/{PACKAGE}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        files = json.load(answer)["files"]
    (url,) = [each["url"] for each in files if each["filename"].endswith(f"-{version}.tar.gz")]
    return url


def fetch(version):
    """Fetches and unpacks the source of a version, unless it is there."""
    if source(version).exists():
        return
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        packed = pathlib.Path(folder, "source.tar.gz")
        with urllib.request.urlopen(package_url(version), timeout=60) as answer, open(packed, "wb") as file:
            shutil.copyfileobj(answer, file)
        with open(packed, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != CHECKSUMS[version]:
            raise RuntimeError(f"{PACKAGE} {version} has another source than expected: {digest}")
        with tarfile.open(packed) as archive:
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # since Python 3.11.4
        (unpacked,) = pathlib.Path(folder).glob("*/vendor/llama.cpp")
        source(version).parent.mkdir(exist_ok=True)
        os.rename(unpacked, source(version))


def build(version, targets=LIBRARIES):
    """Builds targets of a version, unless they are built."""
    if is_built(version, targets):
        return
    fetch(version)
    folder = cache() / version / "build"
    launcher = [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")] if shutil.which("ccache") else []
    subprocess.run(["cmake", "-S", source(version), "-B", folder, "-G", "Ninja", *OPTIONS, *launcher], check=True,
                   stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "--target", *targets], check=True, stdout=subprocess.DEVNULL)
    marker = cache() / version / "built"
    before = marker.read_text().split() if marker.exists() else []
    marker.write_text("\n".join(sorted({*before, *targets})))


def compile_program(version, program, folder, libraries=None):
    """Compiles a program of this folder against a version, and returns its path in `folder`. `libraries`: where libpqcached_llama
    is, which programs in application/ call."""
    here = pathlib.Path(__file__).resolve().parent
    client = here.parent.parent / "client"
    words = [] if libraries is None else [
        f"-I{client}/include", f"-I{client}/engines/llama/application", f"-L{libraries}", "-lpqcached_llama", "-lpqcached_client",
        f"-Wl,-rpath,{libraries}"]
    result = pathlib.Path(folder, pathlib.Path(program).name)
    subprocess.run(
        ["c++", "-O1", "-std=c++20", f"-I{here.parent.parent}", f"-I{source(version)}/include", f"-I{source(version)}/ggml/include",
         here / f"{program}.cc", "-o", result, f"-L{binaries(version)}", "-lllama", "-lggml", "-lggml-base",
         f"-Wl,-rpath,{binaries(version)}", *words], check=True)
    return result


def environment(plugin=None, settings=None):
    """The environment of an engine, with or without the plug-in."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("GGML_", "PQCACHED_LLAMA"))}
    variables["GGML_NO_BACKTRACE"] = "1"
    if plugin is not None:
        variables["GGML_BACKEND_PATH"] = str(plugin)
        if PRELOAD:
            # Races are reported of the plug-in and the client only: TSan does not see how libraries without it synchronize.
            variables.update(LD_PRELOAD=PRELOAD, ASAN_OPTIONS="detect_leaks=0", TSAN_OPTIONS="ignore_noninstrumented_modules=1")
    if settings is not None:
        variables["PQCACHED_LLAMA"] = settings
    return variables


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--tools"]
    if any(word not in CHECKSUMS for word in words):
        sys.exit(f"{__doc__}\nVERSION is one of {', '.join(CHECKSUMS)}")
    for wanted in words or (*TESTED, REFUSED):
        build(wanted, LIBRARIES + (TOOLS if "--tools" in sys.argv else ()))
        print(binaries(wanted))
