"""Builds the wheel of package pqcached from the sources and, if their folder is given, the two
client libraries, with the GPU library if it is in the same folder.

Implements PEP 517 and 660 with only the standard library, so that `pip install` of this folder
needs no network.

The config setting `library`, or the environment's PQCACHED_LIBRARY_DIR, names the folder of the
libraries: a build folder, an installed prefix, or the folder that contains them. Without either,
the wheel has no libraries, and the loader must find libpqcached_client.so.1 at run time.
"""

import base64
import hashlib
import io
import os
import pathlib
import sysconfig
import tarfile
import zipfile

NAME = "pqcached"
VERSION = "0.1.0"
REQUIRES_PYTHON = ">=3.9"
REQUIRES = ["numpy>=1.23"]
SUMMARY = "KV-cache sidecar with product-quantization indexes for long LLM contexts: the client"

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLIENT, RPC, GPU = "libpqcached_client.so.1", "libpqcached_rpc.so", "libpqcached_gpu.so"
DIST_INFO = f"{NAME}-{VERSION}.dist-info"


def find_libraries(config_settings):
    """Returns the paths of the libraries to bundle; none when no folder is named."""
    named = (config_settings or {}).get("library") or os.environ.get("PQCACHED_LIBRARY_DIR")
    if not named:
        return []
    folder = pathlib.Path(named).expanduser().resolve()
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    tried = [folder, folder / "client", folder / "lib", folder / "lib64", folder / "lib" / multiarch]
    for place in tried:
        if (place / CLIENT).is_file() and (place / RPC).is_file():
            return [place / name for name in (CLIENT, RPC, GPU) if (place / name).is_file()]
    raise FileNotFoundError(f"{CLIENT} and {RPC} are not together in any of: {', '.join(map(str, tried))}")


def metadata():
    lines = ["Metadata-Version: 2.1", f"Name: {NAME}", f"Version: {VERSION}", f"Summary: {SUMMARY}",
             "License: Apache-2.0", f"Requires-Python: {REQUIRES_PYTHON}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in REQUIRES]
    return "\n".join(lines) + "\n"


def sources():
    package = ROOT / NAME
    return [path for path in sorted(package.rglob("*")) if path.suffix == ".py" or path.name == "py.typed"]


def write_wheel(directory, tag, files):
    """Writes {name in the wheel: bytes} with metadata and records; returns the wheel's file name."""
    files = dict(files)
    pure = "true" if tag.endswith("-any") else "false"
    files[f"{DIST_INFO}/METADATA"] = metadata().encode()
    files[f"{DIST_INFO}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: {NAME}_backend\nRoot-Is-Purelib: {pure}\n"
                                   f"Tag: {tag}\n").encode()
    record = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}\n")
    record.append(f"{DIST_INFO}/RECORD,,\n")
    files[f"{DIST_INFO}/RECORD"] = "".join(record).encode()
    file_name = f"{NAME}-{VERSION}-{tag}.whl"
    with zipfile.ZipFile(os.path.join(directory, file_name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)  # the fixed date makes equal contents equal wheels
            info.external_attr = (0o755 if ".so" in name else 0o644) << 16
            # libraries are large
            wheel.writestr(info, content, zipfile.ZIP_DEFLATED, compresslevel=1)
    return file_name


# ---- Hooks that pip calls.


def get_requires_for_build_wheel(config_settings=None):
    return []


def get_requires_for_build_editable(config_settings=None):
    return []


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    libraries = find_libraries(config_settings)
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sources()}
    files.update({f"{NAME}/lib/{path.name}": path.read_bytes() for path in libraries})
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return write_wheel(wheel_directory, f"py3-none-{platform if libraries else 'any'}", files)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds a link to this folder. It cannot hold libraries: the loader must find them."""
    if find_libraries(config_settings):
        raise ValueError("an editable install cannot hold libraries; leave `library` out and set LD_LIBRARY_PATH")
    return write_wheel(wheel_directory, "py3-none-any", {f"{NAME}.pth": f"{ROOT}\n".encode()})


def build_sdist(sdist_directory, config_settings=None):
    base = f"{NAME}-{VERSION}"
    with tarfile.open(os.path.join(sdist_directory, f"{base}.tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path in [ROOT / "pyproject.toml", pathlib.Path(__file__).resolve(), *sources()]:
            archive.add(path, f"{base}/{path.relative_to(ROOT)}")
        info = tarfile.TarInfo(f"{base}/PKG-INFO")
        content = metadata().encode()
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return f"{base}.tar.gz"
