"""The wheels of client/python, and their installation in fresh virtual environments, without network.

Usage: install_test.py BUILD
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

from daemon import BUILD, SOURCE, running  # finds skip: first
from skip import skip_unless

PACKAGE = SOURCE / "client/python"
sys.path.insert(0, str(PACKAGE))

import build_wheel  # noqa: E402

# Whatever this process has been told about libraries must not reach the interpreters under test.
for variable in ("LD_LIBRARY_PATH", "PYTHONPATH", "PQCACHED_LIBRARY_DIR"):
    os.environ.pop(variable, None)
# With the system's packages a virtual environment has the system's pip, if there is one.
SYSTEMS_PIP = importlib.util.find_spec("pip") is not None
HAVE_PIP = SYSTEMS_PIP or importlib.util.find_spec("ensurepip") is not None
needs_tools = skip_unless("wheel_tools", build_wheel.have_tools(), "run client/python/build_wheel.py --tools")
SANITIZED = "LD_PRELOAD" in os.environ  # the sanitizer's runtime would be carried, too

PROGRAM = """
import sys, numpy, pqcached
print(pqcached.__file__)
print(pqcached.library_path())
with pqcached.Client(sys.argv[1], timeout_ms=60000) as client:
    group = pqcached.LayerGroup([0], 2, 4, 64, 64, pqcached.DType.F32)
    cache = client.open_cache("c", model_fingerprint="1", groups=[group], capacity_bytes=16 << 20)
    with cache.create_sequence() as sequence:
        rows = numpy.ones((20, 2, 64), numpy.float32)
        sequence.ingest(0, 0, rows, rows)
        print(sequence.describe().token_count, client.path.name)
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}))
"""


class FolderTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


@needs_tools
class BackendTest(FolderTest):
    def names(self, wheel):
        with zipfile.ZipFile(wheel) as archive:
            self.assertIsNone(archive.testzip())
            return set(archive.namelist())

    def test_without_libraries_the_wheel_is_pure_and_repeatable(self):
        wheel = build_wheel.call("build_wheel", self.folder)
        self.assertEqual(wheel.name, "pqcached-0.1.0-py3-none-any.whl")
        names, first = self.names(wheel), wheel.read_bytes()
        self.assertLessEqual({"pqcached/__init__.py", "pqcached/py.typed", "pqcached/transformers/__init__.py",
                              "pqcached-0.1.0.dist-info/RECORD"}, names)
        self.assertFalse([name for name in names if ".so" in name or "cache__" in name or "hatch" in name])
        self.assertEqual(build_wheel.call("build_wheel", self.folder).read_bytes(), first)

    def test_libraries_come_from_a_build_folder_or_an_installed_prefix(self):
        expected = {"pqcached/lib/libpqcached_client.so.1", "pqcached/lib/libpqcached_rpc.so"}
        prefix = self.folder / "prefix"
        (prefix / "lib").mkdir(parents=True)
        for name in ("libpqcached_client.so.1", "libpqcached_rpc.so"):
            shutil.copy(BUILD / "client" / name, prefix / "lib")
        for folder in (BUILD, BUILD / "client", prefix):
            wheel = build_wheel.call("build_wheel", self.folder, PQCACHED_LIBRARY_DIR=str(folder))
            built_gpu = folder != prefix and (BUILD / "client/libpqcached_gpu.so").is_file()
            self.assertEqual("pqcached/lib/libpqcached_gpu.so" in self.names(wheel), built_gpu)
            self.assertIn("-py3-none-linux_", wheel.name)
            self.assertLessEqual(expected, self.names(wheel))

    def test_a_folder_without_libraries_is_refused_with_the_places(self):
        with self.assertRaisesRegex(RuntimeError, f"FileNotFoundError.*{self.folder}/lib"):
            build_wheel.call("build_wheel", self.folder, PQCACHED_LIBRARY_DIR=str(self.folder))

    def test_the_source_distribution_has_what_a_wheel_is_built_from(self):
        with tarfile.open(build_wheel.call("build_sdist", self.folder)) as file:
            packed = {name.partition("/")[2] for name in file.getnames()}
        wheel = {name for name in self.names(build_wheel.call("build_wheel", self.folder)) if name.startswith("pqcached/")}
        self.assertLessEqual(wheel | {"pyproject.toml", "hatch_build.py", "PKG-INFO"}, packed)
        self.assertFalse([name for name in packed if ".so" in name or name.startswith("generate")])


@needs_tools
@skip_unless("pip", HAVE_PIP, "neither pip nor ensurepip is installed (Debian: python3-venv)")
class PipTest(FolderTest):
    def setUp(self):
        super().setUp()
        subprocess.run([sys.executable, "-m", "venv", "--system-site-packages",  # numpy
                        *(["--without-pip"] if SYSTEMS_PIP else []), self.folder / "venv"], check=True)

    def install(self, wheel):
        done = subprocess.run([self.folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index",
                               "--disable-pip-version-check", wheel], cwd=self.folder, check=False, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        self.assertEqual(done.returncode, 0, done.stdout)

    def run_python(self, program, *arguments, **environment):
        done = subprocess.run([self.folder / "venv/bin/python", "-c", program, *arguments], cwd=self.folder, check=False,
                              env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout.splitlines()

    @skip_unless("plain_build", not SANITIZED, "the libraries need the runtime of a sanitizer")
    def test_the_wheel_has_all_libraries_and_works_with_a_daemon(self):
        (self.folder / "dist").mkdir()
        wheel = build_wheel.build_wheel(BUILD, self.folder / "dist")
        self.assertRegex(wheel.name, r"^pqcached-0\.1\.0-py3-none-manylinux_2_\d+_\w+\.whl$")
        self.install(wheel)
        with running() as daemon:
            file, library, rows, loaded = self.run_python(PROGRAM, daemon.endpoint)
        site = str(pathlib.Path(file).parent.parent)
        self.assertTrue(site.startswith(str(self.folder / "venv")), file)
        self.assertEqual(library, f"{site}/pqcached/lib/libpqcached_client.so.1")
        self.assertEqual(rows, "20 LOCAL")
        own = [path for path in loaded.split() if any(part in path for part in ("pqcached", "grpc", "proto", "absl"))]
        self.assertGreater(len(own), 10)
        self.assertEqual([path for path in own if not path.startswith(site)], [])

    def test_without_libraries_the_loader_finds_them_or_the_error_says_how(self):
        self.install(build_wheel.call("build_wheel", self.folder))
        with running() as daemon:
            library, rows = self.run_python(PROGRAM, daemon.endpoint, LD_LIBRARY_PATH=str(BUILD / "client"))[1:3]
        self.assertEqual((library, rows), ("libpqcached_client.so.1", "20 LOCAL"))
        said = "\n".join(self.run_python(
            "import pqcached\ntry:\n    pqcached.library_path()\nexcept pqcached.FailedPrecondition as e:\n    print(e)"))
        for part in ("libpqcached_client.so.1 cannot be loaded", "PQCACHED_LIBRARY_DIR=DIR", "LD_LIBRARY_PATH"):
            self.assertIn(part, said)

    def test_an_editable_installation_reads_the_sources(self):
        self.install(build_wheel.call("build_editable", self.folder))
        self.assertEqual(self.run_python("import pqcached; print(pqcached.__file__)"),
                         [str(PACKAGE / "pqcached/__init__.py")])
        with self.assertRaisesRegex(RuntimeError, "cannot hold libraries"):
            build_wheel.call("build_editable", self.folder, PQCACHED_LIBRARY_DIR=str(BUILD))


if __name__ == "__main__":
    unittest.main()
