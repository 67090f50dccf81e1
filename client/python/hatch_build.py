"""Adds the client libraries to the wheel: the two, and that for GPUs if it is in the same folder.

The environment's PQCACHED_LIBRARY_DIR names the folder of the libraries: a build folder, an
installed prefix, or the folder that contains them. Without it the wheel has no libraries, and the
loader must find libpqcached_client.so.1 at run time. build_wheel.py also adds the libraries that
these need.
"""

from __future__ import annotations

import os
import pathlib
import sysconfig
from typing import Any, Dict, List

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CLIENT, RPC, GPU = "libpqcached_client.so.1", "libpqcached_rpc.so", "libpqcached_gpu.so"


def find_libraries(named: str) -> List[pathlib.Path]:
    """Raises FileNotFoundError, with the places that were searched."""
    folder = pathlib.Path(named).expanduser().resolve()
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    tried = [folder, folder / "client", folder / "lib", folder / "lib64", folder / "lib" / multiarch]
    for place in tried:
        if (place / CLIENT).is_file() and (place / RPC).is_file():
            return [place / name for name in (CLIENT, RPC, GPU) if (place / name).is_file()]
    raise FileNotFoundError(f"{CLIENT} and {RPC} are not together in any of: {', '.join(map(str, tried))}")


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        named = os.environ.get("PQCACHED_LIBRARY_DIR")
        if not named:
            return
        if version == "editable":
            raise ValueError("an editable install cannot hold libraries: unset PQCACHED_LIBRARY_DIR and set LD_LIBRARY_PATH")
        for library in find_libraries(named):
            build_data["force_include"][str(library)] = f"pqcached/lib/{library.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        # The libraries are no extension of Python: ctypes loads them.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
