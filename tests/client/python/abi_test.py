"""Python's view of the C ABI, compared with the headers and the compiler. Usage: abi_test.py BUILD CC"""

import ctypes
import os
import pickle
import re
import subprocess
import sys
import tempfile
import unittest

CC = sys.argv.pop(2).split(";")  # a compiler, and its launcher before it if there is one

from daemon import SOURCE  # noqa: E402  (takes its argument from what is left)

import generate_abi  # noqa: E402
import pqcached  # noqa: E402
from pqcached import _abi, _enums, _errors, _library  # noqa: E402

HEADERS = generate_abi.Interface(generate_abi.HEADERS)
ENUMS = {"pqc_status": (_errors.Status, "PQC_"), "pqc_dtype": (_enums.DType, "PQC_"), "pqc_device": (_enums.Device, "PQC_"),
         "pqc_path": (_enums.Path, "PQC_PATH_"), "pqc_path_choice": (_enums.PathChoice, "PQC_PATH_"),
         "pqc_layer_kind": (_enums.LayerKind, "PQC_LAYERS_"), "pqc_rope_layout": (_enums.RopeLayout, "PQC_ROPE_"),
         "pqc_subspace_layout": (_enums.SubspaceLayout, "PQC_SUBSPACES_"),
         "pqc_index_kind": (_enums.IndexKind, "PQC_INDEX_"), "pqc_group_rule": (_enums.GroupRule, "PQC_"),
         "pqc_budget_kind": (_enums.BudgetKind, "PQC_BUDGET_"), "pqc_verdict": (_enums.Verdict, "PQC_"),
         "pqc_head_rule": (_enums.HeadRule, "PQC_HEADS_"), "pqc_row_part": (_enums.RowPart, "PQC_"),
         "pqc_log_base": (_enums.LogBase, "PQC_LOG_"), "pqc_gpu_policy": (_enums.GpuPolicy, "PQC_GPU_"),
         "pqc_event_kind": (_enums.EventKind, "PQC_EVENT_"),
         "pqc_cache_event_kind": (_enums.CacheEventKind, "PQC_CACHE_"),
         "pqc_page_outcome": (_enums.PageOutcome, "PQC_PAGE_")}
NOT_CALLED = {  # the package calls their longer forms, and waits for operations in asyncio or as Load does
    "pqc_append", "pqc_decoder_decode", "pqc_decoder_prefill", "pqc_gpu_ingest", "pqc_ingest", "pqc_match_prefix",
    "pqc_operation_wait", "pqc_sequence_create", "pqc_status_name", "pqc_step_end"}
NOT_USED = {  # threads of an engine cannot be those of Python; contexts of callbacks; must be 0 in this version
    "parallel_for", "parallel_for_context", "callback_context", "values_alias_keys"}
NOT_IN_PYTHON = {"pqc_step_flag", "pqc_page_flag"}  # arguments of Client.begin_step and Step.topk_pages


def run(program):
    """What a C program with this main prints."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = os.path.join(folder, "a.c"), os.path.join(folder, "a")
        with open(source, "w", encoding="utf-8") as file:
            file.write("#include <stddef.h>\n#include <stdio.h>\n#include \"pqcached/gpu.h\"\n"
                       "#include \"pqcached/cache_events.h\"\n#include \"pqcached/operation.h\"\n#include \"pqcached/page_cache.h\"\n"
                       f"int main(void) {{\n{program}\nreturn 0;\n}}\n")
        subprocess.run([*CC, f"-I{SOURCE / 'client/include'}", source, "-o", binary], check=True)
        return subprocess.run([binary], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


class AbiTest(unittest.TestCase):
    maxDiff = None

    def test_the_generated_module_is_that_of_the_headers(self):
        self.assertEqual(generate_abi.OUTPUT.read_text(encoding="utf-8"), HEADERS.python(),
                         "the headers have changed: run `python3 client/python/generate_abi.py`")

    def test_structs_lie_as_the_compiler_lays_them(self):
        program, expected = [], []
        for name, fields in HEADERS.structs.items():
            struct = getattr(_abi, HEADERS.types[name])
            program.append(f'printf("{name} %zu\\n", sizeof({name}));')
            expected.append(f"{name} {ctypes.sizeof(struct)}")
            for field in fields:
                member = f"(({name}*)0)->{field}"
                program.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof({member}));')
                place = getattr(struct, field)
                expected.append(f"{name}.{field} {place.offset} {place.size}")
        self.assertEqual(run("\n".join(program)), expected)

    def test_numbers_are_those_of_the_compiler(self):
        names = [*HEADERS.constants, *(name for members in HEADERS.enums.values() for name in members)]
        program = [f'printf("{name} %u\\n", (unsigned){name});' for name in names]
        self.assertEqual(run("\n".join(program)), [f"{name} {getattr(_abi, name)}" for name in names])

    def test_the_generator_overlooks_no_declaration(self):
        text = "".join(header.read_text(encoding="utf-8") for header in generate_abi.HEADERS.glob("*.h"))
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        self.assertEqual(set(re.findall(r"PQC_API [^;(]*?\b(pqc_\w+)\(", text)), set(_abi.PROTOTYPES))
        self.assertEqual(set(re.findall(r"typedef enum (\w+)", text)), set(HEADERS.enums))
        found = {name: re.findall(r"(\w+)(?:\[\d+\])?;", body)
                 for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.DOTALL)}
        self.assertEqual(found, {name: list(fields) for name, fields in HEADERS.structs.items()})

    def test_enums_have_the_members_of_the_headers(self):
        self.assertEqual(set(ENUMS), set(HEADERS.enums) - NOT_IN_PYTHON)
        for name, (enum, prefix) in ENUMS.items():
            self.assertEqual({prefix + member.name: member.value for member in enum}, HEADERS.enums[name], name)

    def test_every_function_and_field_has_a_use(self):
        sources = "".join(path.read_text(encoding="utf-8") for path in (SOURCE / "client/python/pqcached").glob("*.py")
                          if path.name != "_abi.py")
        self.assertEqual({name for name in _abi.PROTOTYPES if not re.search(rf"\.{name}\b", sources)}, NOT_CALLED)
        fields = {field for struct in HEADERS.structs.values() for field in struct if field != "reserved"}
        self.assertEqual({field for field in fields if not re.search(rf"\b{field}\b", sources)}, NOT_USED)

    def test_versions_agree(self):
        cmake = re.search(r"project\(pqcached VERSION (\S+)", (SOURCE / "CMakeLists.txt").read_text()).group(1)
        self.assertEqual(pqcached.__version__, cmake)
        self.assertIn(f'version = "{cmake}"', (SOURCE / "client/python/pyproject.toml").read_text())

    def test_each_status_has_one_class(self):
        for status in pqcached.Status:
            if status is pqcached.Status.OK:
                continue
            error = _errors.ERRORS[status]
            self.assertTrue(issubclass(error, pqcached.Error))
            self.assertIs(error.status, status)
            self.assertEqual(error.__name__, "".join(word.title() for word in status.name.split("_")))
            self.assertIs(getattr(pqcached, error.__name__), error)
            self.assertEqual(_library.library().pqc_status_name(status).decode(), status.name)
            self.assertEqual(str(error("why")), f"{status.name}: why")

    def test_errors_keep_field_and_retry_time_between_processes(self):
        error = pickle.loads(pickle.dumps(pqcached.Unavailable("why", "endpoint", 1500)))
        self.assertEqual((type(error), error.message, error.field, error.retry_ms, error.retry_after),
                         (pqcached.Unavailable, "why", "endpoint", 1500, 1.5))
        self.assertIsNone(pqcached.Unavailable("why").retry_after)  # not worthwhile, in contrast to: at once


if __name__ == "__main__":
    unittest.main()
