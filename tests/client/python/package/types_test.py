"""The package is typed: mypy finds nothing in it, in its tutorial and in the packages for engines, and finds wrong calls of programs
that use it. Usage: types_test.py BUILD
"""

import os
import re
import shutil
import subprocess
import tempfile
import types
import unittest

from daemon import SOURCE  # finds pqcached: first

import pqcached
from skip import skip_unless

MYPY = shutil.which("mypy")
PACKAGE = SOURCE / "client/python"

# Each call is right but for what its comment says, which mypy must report in this line, and nothing else.
PROGRAM = """
import asyncio
from typing import Any, List
import numpy as np
import pqcached

def decode(client: pqcached.Client, sequence: pqcached.Sequence, rows: "np.ndarray[Any, np.dtype[np.float32]]") -> None:
    selection = pqcached.Selection(ratio=0.1, sink_tokens=4, window_tokens=64)
    with client.begin_step([pqcached.StepItem(sequence, 12)], selection, timeout_ms=pqcached.TIMEOUT_POLL) as step:
        output = step.attend(0, rows).output
        pages: List[int] = step.topk_pages(0, rows, 16)  # assignment
        step.end({0: (rows, pqcached.Paged(rows, [1, 2], 20))})
    client.begin_step(sequence)  # arg-type
    with sequence.decoder(selection) as decoder:
        decoder.prefill("0", rows, rows)  # arg-type
    sequence.flush(1)  # call-arg

def plan(cache: pqcached.Cache, sequence: pqcached.Sequence) -> int:
    sequence.pin(ttl_ms=1000)
    admission: pqcached.Admission = cache.admit(1000)
    loading = sequence.begin_load((0, 128), {0: (None, np.zeros((128, 2, 64), np.float32))})
    loading.wait_layers(1)
    for event in cache.events():
        key: str = event.key  # assignment
    return admission.verdict.name  # return-value

async def watch(client: pqcached.Client, sequence: pqcached.Sequence) -> None:
    try:
        await sequence.build_index_async(sink_tokens=4)
    except pqcached.Unavailable as error:
        await asyncio.sleep(error.retry_after or 0)
        error.retry_time  # attr-defined
    async for event in client.events():
        event.kind is pqcached.EventKind.NEW_WORKER
"""


def mypy(cache, *arguments, folder=PACKAGE, config=PACKAGE, python="3.9"):
    # Debian's mypy knows the oldest Python of the package; newer ones do not.
    version = tuple(int(part) for part in re.findall(r"\d+", subprocess.check_output([MYPY, "--version"], text=True))[:2])
    oldest = ["--python-version", python] if version < (1, 18) else []
    return subprocess.run([MYPY, "--config-file", config / "pyproject.toml", "--cache-dir", cache, "--no-error-summary",
                           *oldest, *arguments], cwd=folder, env={**os.environ, "MYPYPATH": str(PACKAGE)}, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class NamesTest(unittest.TestCase):
    def test_all_public_names_are_exported(self):
        public = {name for name, value in vars(pqcached).items() if name[0] != "_" and not isinstance(value, types.ModuleType)}
        self.assertEqual(set(pqcached.__all__), public - {"annotations"})
        self.assertEqual(len(pqcached.__all__), len(set(pqcached.__all__)))


@skip_unless("mypy", MYPY, "mypy is not installed (Debian: mypy)")
class TypesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()  # both tests read numpy's types, which takes most of the time
        cls.addClassCleanup(folder.cleanup)
        cls.cache = folder.name

    def test_mypy_finds_nothing_in_the_package_and_its_tutorial(self):
        done = mypy(self.cache, "pqcached", "tutorial.py")
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_mypy_finds_nothing_in_the_packages_for_engines(self):
        for project in sorted((SOURCE / "client/engines").glob("*/pyproject.toml")):
            folder = project.parent
            done = mypy(self.cache, f"pqcached_{folder.name}", folder=folder, config=folder, python="3.10")
            self.assertEqual((done.returncode, done.stdout), (0, ""), folder.name)

    def test_wrong_calls_of_programs_are_reported_and_right_ones_are_not(self):
        expected = {(number, kind) for number, line in enumerate(PROGRAM.splitlines(), 1)
                    for kind in re.findall(r"  # ([a-z-]+)$", line)}
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/program.py", "w", encoding="utf-8") as file:
                file.write(PROGRAM)
            done = mypy(self.cache, "program.py", folder=folder)
        found = {(int(number), kind) for number, kind in re.findall(r"^program.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M)}
        self.assertEqual(found, expected, done.stdout)
        self.assertTrue(expected)


if __name__ == "__main__":
    unittest.main()
