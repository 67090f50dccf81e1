"""C, C++ and Python expose the same things: what a C header has and a wrapper lacks is an error here."""

import importlib.util
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = ROOT / "client/include/pqcached"
PACKAGE = ROOT / "client/python/pqcached"

# What a wrapper leaves out, and why.
LEFT_OUT = {
    "C++": {
        "pqc_layer_group.values_alias_keys": "must be 0",
        "pqc_abi_version": "the headers and the library are found together, and the loader checks the soname",
    },
    "Python": {
        "pqc_layer_group.values_alias_keys": "must be 0",
        "pqc_client_options.parallel_for": "threads of the library cannot run Python code at the speed of a step",
        "pqc_client_options.parallel_for_context": "threads of the library cannot run Python code at the speed of a step",
        "pqc_build_options.callback_context": "the callback is a Python object",
        "pqc_operation_wait": "a coroutine awaits, and the plain calls wait",
        "pqc_status_name": "the classes of the errors have the names",
    },
}


def interface():
    spec = importlib.util.spec_from_file_location("generate_abi", ROOT / "client/python/generate_abi.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_abi"] = module
    spec.loader.exec_module(module)
    return module.Interface(HEADERS)


def has(text, name):
    return re.search(rf"\b{name}\b", text) is not None


def lacks_functions(c, text):
    """A wrapper may call the form with options instead of the plain one."""
    return [name for name in c.functions if not has(text, name) and not (name + "_with" in c.functions and has(text, name + "_with"))]


def lacks_cxx(c, text):
    """What the C++ wrapper lacks. It takes and returns C's enums, and some of C's structs as they are."""
    whole = {struct for struct in c.structs if re.search(rf"\bResult<{struct}>|\b{struct}\*|\b{struct}& ", text)}
    fields = [(struct, name) for struct, names in c.structs.items() if struct not in whole for name in names]
    return lacks_functions(c, text) + [
        f"{struct}.{name}" for struct, name in fields if name != "struct_size" and not has(text, name)]


def lacks_python(c, text):
    """What the Python package lacks, outside the generated declarations."""
    fields = [(struct, name) for struct, names in c.structs.items() for name in names]
    return lacks_functions(c, text) + [
        f"{struct}.{name}" for struct, name in fields if name != "struct_size" and not has(text, name)] + [
        f"{enum}.{name}" for enum, names in c.enums.items() for name in names if not has(text, name)]


class ParityTest(unittest.TestCase):
    def setUp(self):
        self.c = interface()
        self.cxx = "\n".join(path.read_text() for path in sorted(HEADERS.glob("*.hpp")))
        self.python = "\n".join(path.read_text() for path in sorted(PACKAGE.glob("*.py")) if path.name != "_abi.py")

    def test_cxx_has_what_c_has(self):
        self.assertEqual(sorted(lacks_cxx(self.c, self.cxx)), sorted(LEFT_OUT["C++"]))

    def test_python_has_what_c_has(self):
        self.assertEqual(sorted(lacks_python(self.c, self.python)), sorted(LEFT_OUT["Python"]))

    def test_what_is_missing_is_found(self):
        self.assertIn("pqc_admit", lacks_python(self.c, self.python.replace("pqc_admit", "")))
        self.assertIn("pqc_layer_group.rope_theta", lacks_cxx(self.c, self.cxx.replace("rope_theta", "")))
        self.assertIn("pqc_verdict.PQC_FITS_LATER", lacks_python(self.c, self.python.replace("PQC_FITS_LATER", "")))


if __name__ == "__main__":
    unittest.main()
