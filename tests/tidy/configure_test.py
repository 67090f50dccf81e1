"""CMake configures each way of building without a warning.

Run as `configure_test.py CMAKE ROOT`. Ways that need clang are left out, as not every machine that builds has it.
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

CMAKE, ROOT = sys.argv[1:3]


class ConfigureTest(unittest.TestCase):
    def assert_quiet(self, *arguments):
        with tempfile.TemporaryDirectory() as directory:
            command = [CMAKE, "-S", ROOT, "-B", str(pathlib.Path(directory) / "build"), *arguments]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.assertEqual("", done.stderr)
        self.assertEqual(0, done.returncode)

    def test_the_quickstart_configures_without_a_warning(self):
        self.assert_quiet("--preset", "quickstart")

    def test_the_release_preset_configures_without_a_warning(self):
        self.assert_quiet("--preset", "release")

    def test_precompiled_headers_configure_without_a_warning(self):
        self.assert_quiet("--preset", "release", "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=OFF")

    def test_a_build_without_rpc_configures_without_a_warning(self):
        self.assert_quiet("--preset", "tsan")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
