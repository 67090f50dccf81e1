"""The mirror of client.h in Python, held against the header and the compiler. Usage: abi_test.py BUILD CC"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import unittest

CC = sys.argv.pop(2).split(";")  # a compiler, and its launcher before it if there is one

from daemon import SOURCE  # noqa: E402  (takes its argument from what is left)

import pqcached  # noqa: E402
from pqcached import _abi, _enums, _errors  # noqa: E402

HEADERS = [SOURCE / "client/include/pqcached" / name for name in ("status.h", "tensor.h", "client.h", "query.h", "step.h", "gpu.h")]

STRUCTS = {"pqc_client_counts": _abi.ClientCounts, "pqc_sequence_options": _abi.SequenceOptions,
           "pqc_block_table": _abi.BlockTable, "pqc_tensor": _abi.Tensor, "pqc_client_options": _abi.ClientOptions,
           "pqc_layer_group": _abi.LayerGroup, "pqc_index": _abi.Index, "pqc_cache_spec": _abi.CacheSpec,
           "pqc_sequence_info": _abi.SequenceInfo, "pqc_layer_rows": _abi.LayerRows,
           "pqc_build_progress": _abi.BuildProgress, "pqc_build_options": _abi.BuildOptions,
           "pqc_token_range": _abi.TokenRange, "pqc_selection": _abi.Selection, "pqc_query": _abi.Query,
           "pqc_positions": _abi.Positions, "pqc_attention": _abi.Attention,
           "pqc_step_item": _abi.StepItem, "pqc_step_options": _abi.StepOptions,
           "pqc_step_positions": _abi.StepPositions, "pqc_step_attention": _abi.StepAttention,
           "pqc_gpu_options": _abi.GpuOptions, "pqc_gpu_counts": _abi.GpuCounts, "pqc_gpu_positions": _abi.GpuPositions}
ENUMS = [(_enums.DType, "PQC_"), (_enums.LayerKind, "PQC_LAYERS_"), (_enums.RopeLayout, "PQC_ROPE_"),
         (_enums.IndexKind, "PQC_INDEX_"), (_enums.BudgetKind, "PQC_BUDGET_"), (_enums.Path, "PQC_PATH_"),
         (_enums.PathChoice, "PQC_PATH_"), (_errors.Status, "PQC_"), (_enums.Device, "PQC_"),
         (_enums.GroupRule, "PQC_"), (_enums.RowPart, "PQC_"), (_enums.GpuPolicy, "PQC_GPU_")]


def run(program):
    """What a C program with this main prints."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = os.path.join(folder, "a.c"), os.path.join(folder, "a")
        with open(source, "w", encoding="utf-8") as file:
            file.write("#include <stddef.h>\n#include <stdio.h>\n#include \"pqcached/gpu.h\"\n"
                       f"int main(void) {{\n{program}\nreturn 0;\n}}\n")
        subprocess.run([*CC, f"-I{SOURCE / 'client/include'}", source, "-o", binary], check=True)
        return subprocess.run([binary], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def header_text() -> str:
    return "".join(header.read_text(encoding="utf-8") for header in HEADERS)


class AbiTest(unittest.TestCase):
    maxDiff = None

    def test_structs_lie_as_the_compiler_lays_them(self):
        program, expected = [], []
        for name, struct in STRUCTS.items():
            program.append(f'printf("{name} %zu\\n", sizeof({name}));')
            expected.append(f"{name} {ctypes.sizeof(struct)}")
            for field, *_ in struct._fields_:
                member = f"(({name}*)0)->{field}"
                program.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof({member}));')
                place = getattr(struct, field)
                expected.append(f"{name}.{field} {place.offset} {place.size}")
        self.assertEqual(run("\n".join(program)), expected)

    def test_every_field_of_the_header_is_mirrored(self):
        text = re.sub(r"/\*.*?\*/", "", header_text(), flags=re.DOTALL)
        found = dict((name, body) for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.DOTALL))
        for name, struct in STRUCTS.items():
            fields = [re.search(r"(\w+)(\[\d+\])?$", line.strip()).group(1)
                      for line in found[name].split(";") if line.strip()]
            self.assertEqual([field for field, *_ in struct._fields_], fields, name)
        print("structs of the header that Python does not use:", sorted(set(found) - set(STRUCTS)))

    def test_enums_have_the_numbers_of_the_header(self):
        program, expected = [], []
        for enum, prefix in ENUMS:
            for member in enum:
                program.append(f'printf("%u\\n", (unsigned){prefix}{member.name});')
                expected.append(str(int(member)))
        program.append('printf("%u\\n", PQC_ABI_VERSION);')
        expected.append(str(_abi.ABI_VERSION))
        self.assertEqual(run("\n".join(program)), expected)

    def test_functions_are_those_of_the_header(self):
        declared = set(re.findall(r"PQC_API [^;(]*?\b(pqc_\w+)\(", header_text()))
        self.assertLessEqual(set(_abi.PROTOTYPES), declared)
        print("functions of the header that Python does not use:", sorted(declared - set(_abi.PROTOTYPES)))

    def test_versions_agree(self):
        cmake = re.search(r"project\(pqcached VERSION (\S+)", (SOURCE / "CMakeLists.txt").read_text()).group(1)
        self.assertEqual(pqcached.__version__, cmake)
        backend = (SOURCE / "client/python/build_backend/pqcached_backend.py").read_text()
        self.assertIn(f'VERSION = "{cmake}"', backend)

    def test_each_status_has_one_class(self):
        for status in pqcached.Status:
            if status is pqcached.Status.OK:
                continue
            error = _errors.ERRORS[status]
            self.assertTrue(issubclass(error, pqcached.Error))
            self.assertIs(error.status, status)
            self.assertEqual(error.__name__, "".join(word.title() for word in status.name.split("_")))
            self.assertIs(getattr(pqcached, error.__name__), error)
            self.assertEqual(_abi.library().pqc_status_name(status).decode(), status.name)
            self.assertEqual(str(error("why")), f"{status.name}: why")


if __name__ == "__main__":
    unittest.main()
