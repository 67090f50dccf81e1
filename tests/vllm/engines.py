"""Engines of vLLM as processes of their own, with our plug-in or without it. Programs are run as `x.py BUILD ...`."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("client/python", "quality", ".")]

import children  # noqa: E402
import environment  # noqa: E402
from daemon import BUILD, SOURCE  # noqa: E402
from skip import skip_unless  # noqa: E402

INSTALLED = [version for version in environment.VERSIONS if environment.is_installed(version)]
IS_LONG = os.environ.get("PQCACHED_VLLM_LONG", "0") != "0"
IS_WANTED = IS_LONG or os.environ.get("PQCACHED_VLLM", "0") != "0" or "vllm" in os.environ.get("PQCACHED_REQUIRE", "").split(",")
needs_installed = skip_unless("vllm", INSTALLED, "vLLM is not installed: tests/vllm/environment.py")
needs_vllm = skip_unless("vllm", INSTALLED and IS_WANTED, "engines take minutes: PQCACHED_VLLM=1 starts them, after tests/vllm/environment.py")
PACKAGE = SOURCE / "client/engines/vllm"


def write_entry_point(folder):
    """Makes what pip would make of the package: vLLM finds plug-ins by their entry points."""
    info = pathlib.Path(folder, "pqcached_vllm-0.1.0.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: pqcached-vllm\nVersion: 0.1.0\n")
    info.joinpath("entry_points.txt").write_text("[vllm.general_plugins]\npqcached = pqcached_vllm:register\n")


def transfer_config(connector="PqcachedConnector", module="pqcached_vllm.connector", **extra):
    named = {"kv_connector": connector, "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    return {**named, "kv_connector_module_path": module} if module else named


class Engine:
    """ours: settings of the plug-in, or None for stock vLLM. package: the folder of the plug-in. more: arguments of vllm.LLM."""

    def __init__(self, model, ours=None, version=None, threads=1, package=PACKAGE, **more):
        self._folder = tempfile.TemporaryDirectory()
        write_entry_point(self._folder.name)
        options = {"max_model_len": 2048, **more}
        if ours is not None:
            options["kv_transfer_config"] = transfer_config(**ours)
        paths = [self._folder.name, str(SOURCE / "client/python"), str(package)]
        self.log = pathlib.Path(self._folder.name, "log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [environment.folder(version or INSTALLED[0]) / "bin/python", pathlib.Path(__file__).with_name("engine.py"), model,
                 json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=children.end_with_parent,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": str(BUILD / "client"), "PYTHONDONTWRITEBYTECODE": "1",
                     "OMP_NUM_THREADS": str(threads), "VLLM_NO_USAGE_STATS": "1"})

    def wait_ready(self):
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("vLLM did not start:\n" + self.log.read_text()[-4000:])
        return self

    def send(self, requests=(), passes=None, abort=()):
        self.process.stdin.write(json.dumps({"requests": list(requests), "passes": passes, "abort": list(abort)}) + "\n")
        self.process.stdin.flush()

    def receive(self, seconds=300):
        """The answer; an engine that takes longer is killed."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line.startswith("answer "):
            raise RuntimeError("vLLM has ended:\n" + self.log.read_text()[-4000:])
        return json.loads(line[len("answer "):])

    def run(self, requests=(), passes=None, abort=()):
        self.send(requests, passes, abort)
        return self.receive()

    def lines(self):
        """What our plug-in has printed."""
        return [line[line.index("pqcached: "):] for line in self.log.read_text().splitlines() if "pqcached: " in line]

    def close(self, kill=False):
        if kill:
            self.process.kill()
        self.process.stdin.close()
        self.process.wait(timeout=120)
        self.process.stdout.close()
        self._folder.cleanup()


@contextlib.contextmanager
def running(*engines):
    """Waits for engines that start at the same time, and ends them."""
    try:
        yield [engine.wait_ready() for engine in engines]
    finally:
        for engine in engines:
            engine.close(kill=True)
