"""`pip install` of client/python in fresh virtual environments, without network. Usage: install_test.py BUILD"""

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

from daemon import BUILD, SOURCE  # finds pqcached: first
from skip import skip_unless

PACKAGE = SOURCE / "client/python"
# Whatever this process has been told about libraries must not reach the interpreters under test.
CLEAN = {name: value for name, value in os.environ.items()
         if name not in ("LD_LIBRARY_PATH", "PYTHONPATH", "PQCACHED_LIBRARY_DIR")}
# With the system's packages a virtual environment has the system's pip, if there is one.
SYSTEMS_PIP = importlib.util.find_spec("pip") is not None
HAVE_PIP = SYSTEMS_PIP or importlib.util.find_spec("ensurepip") is not None

# UNAVAILABLE says that both libraries were found: gRPC's was loaded, and nobody listened.
PROGRAM = """
import pqcached
print(pqcached.__file__)
print(pqcached.library_path())
try:
    pqcached.Client("unix:///nobody/listens/here", timeout_ms=2000)
except pqcached.Error as error:
    print(type(error).__name__)
"""


class Backend:
    """The build backend, called as pip calls it: in a process of its own, in the folder of the package."""

    def __init__(self, folder, **environment):
        self.folder, self.environment = folder, {**CLEAN, "PYTHONDONTWRITEBYTECODE": "1", **environment}

    def build(self, hook, settings=None):
        program = (f"import sys; sys.path.insert(0, 'build_backend'); import pqcached_backend as backend; "
                   f"print(backend.{hook}({str(self.folder)!r}, {settings!r}))")
        done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE, env=self.environment, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return pathlib.Path(self.folder, done.stdout.strip())


class FolderTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


class BackendTest(FolderTest):
    def names(self, wheel):
        with zipfile.ZipFile(wheel) as archive:
            self.assertIsNone(archive.testzip())
            return set(archive.namelist())

    def test_without_libraries_the_wheel_is_pure_and_repeatable(self):
        wheel = Backend(self.folder).build("build_wheel")
        self.assertEqual(wheel.name, "pqcached-0.1.0-py3-none-any.whl")
        names, first = self.names(wheel), wheel.read_bytes()
        self.assertLessEqual({"pqcached/__init__.py", "pqcached/py.typed", "pqcached/transformers/__init__.py",
                              "pqcached-0.1.0.dist-info/RECORD"}, names)
        self.assertFalse([name for name in names if ".so" in name or "cache__" in name])
        self.assertEqual(Backend(self.folder).build("build_wheel").read_bytes(), first)

    def test_libraries_come_from_the_setting_or_the_environment(self):
        expected = {"pqcached/lib/libpqcached_client.so.1", "pqcached/lib/libpqcached_rpc.so"}
        prefix = self.folder / "prefix"
        (prefix / "lib").mkdir(parents=True)
        for name in ("libpqcached_client.so.1", "libpqcached_rpc.so"):
            shutil.copy(BUILD / "client" / name, prefix / "lib")
        for number, (settings, environment) in enumerate(((  # build folder, its client/, an installed prefix
                {"library": str(BUILD)}, {}), ({"library": str(BUILD / "client")}, {}),
                (None, {"PQCACHED_LIBRARY_DIR": str(prefix)}))):
            (self.folder / str(number)).mkdir()
            wheel = Backend(self.folder / str(number), **environment).build("build_wheel", settings)
            built_gpu = settings is not None and (BUILD / "client/libpqcached_gpu.so").is_file()
            self.assertEqual("pqcached/lib/libpqcached_gpu.so" in self.names(wheel), built_gpu)
            self.assertIn("-py3-none-linux_", wheel.name)
            self.assertLessEqual(expected, self.names(wheel))

    def test_a_folder_without_libraries_is_refused_with_the_places(self):
        with self.assertRaisesRegex(RuntimeError, f"FileNotFoundError.*{self.folder}/lib"):
            Backend(self.folder).build("build_wheel", {"library": str(self.folder)})

    def test_the_source_distribution_builds_the_same_wheel(self):
        archive = Backend(self.folder).build("build_sdist")
        wheel = Backend(self.folder).build("build_wheel").read_bytes()
        with tarfile.open(archive) as file:
            file.extractall(self.folder)
        unpacked = self.folder / "pqcached-0.1.0"
        self.assertTrue((unpacked / "PKG-INFO").is_file())
        subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, 'build_backend'); "
                        "import pqcached_backend; pqcached_backend.build_wheel('.')"], cwd=unpacked, check=True)
        self.assertEqual((unpacked / "pqcached-0.1.0-py3-none-any.whl").read_bytes(), wheel)


@skip_unless("pip", HAVE_PIP, "neither pip nor ensurepip is installed (Debian: python3-venv)")
class PipTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        subprocess.run([sys.executable, "-m", "venv", "--system-site-packages",
                        *(["--without-pip"] if SYSTEMS_PIP else []), cls.folder / "venv"], check=True, env=CLEAN)

    def pip(self, *arguments):
        environment = {**CLEAN, "PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_CACHE_DIR": "1"}
        done = subprocess.run([self.folder / "venv/bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check",
                               *arguments], cwd=self.folder, check=False, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)

    def install(self, *arguments):
        self.addCleanup(self.pip, "uninstall", "--yes", "pqcached")
        self.pip("install", "--no-index", *arguments)  # no index: what needs the network fails

    def run_python(self, program, **environment):
        done = subprocess.run([self.folder / "venv/bin/python", "-c", program], cwd=self.folder, check=False,
                              env={**CLEAN, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout.splitlines()

    def test_an_installation_with_libraries_needs_nothing_else(self):
        self.install("--config-settings", f"library={BUILD}", PACKAGE)
        file, library, error = self.run_python(PROGRAM)
        self.assertTrue(file.startswith(str(self.folder / "venv")), file)
        self.assertEqual(library, str(pathlib.Path(file).parent / "lib/libpqcached_client.so.1"))
        self.assertEqual(error, "Unavailable")

    def test_without_libraries_the_loader_finds_them_or_the_error_says_how(self):
        self.install(PACKAGE)
        library, error = self.run_python(PROGRAM, LD_LIBRARY_PATH=str(BUILD / "client"))[1:]
        self.assertEqual((library, error), ("libpqcached_client.so.1", "Unavailable"))
        said = "\n".join(self.run_python(
            "import pqcached\ntry:\n    pqcached.library_path()\nexcept pqcached.FailedPrecondition as e:\n    print(e)"))
        for part in ("libpqcached_client.so.1 cannot be loaded", "--config-settings library=DIR", "LD_LIBRARY_PATH"):
            self.assertIn(part, said)

    def test_an_editable_installation_reads_the_sources(self):
        self.install("--editable", PACKAGE)
        self.assertEqual(self.run_python("import pqcached; print(pqcached.__file__)"),
                         [str(PACKAGE / "pqcached/__init__.py")])


if __name__ == "__main__":
    unittest.main()
