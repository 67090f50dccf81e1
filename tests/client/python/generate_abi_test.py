"""The translation of headers to ctypes, and the refusal of all other C. Usage: generate_abi_test.py BUILD"""

import pathlib
import tempfile
import unittest

from daemon import SOURCE  # finds generate_abi: first

import generate_abi

TENSOR = "typedef struct pqc_tensor { size_t struct_size; void* ptr; } pqc_tensor;\n"


def interface_of(**headers):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in headers.items():
            (pathlib.Path(folder) / f"{name}.h").write_text(text, encoding="utf-8")
        return generate_abi.Interface(pathlib.Path(folder))


class TranslationTest(unittest.TestCase):
    maxDiff = None

    def test_fields(self):
        interface = interface_of(a=TENSOR + """
typedef enum pqc_kind { PQC_A = 0, PQC_B = 7, } pqc_kind;
typedef struct pqc_handle pqc_handle;
typedef struct pqc_all {
  int32_t number; /* ; } */
  const uint32_t* read;
  uint32_t* written;
  const char* name;
  const void* key;
  void* stream;
  pqc_kind kind;
  pqc_tensor inside;
  const pqc_tensor* beside;
  pqc_handle* handle;
  uint64_t reserved[3];
  void (*body)(void* context, double at);
} pqc_all;""")
        self.assertEqual(interface.enums, {"pqc_kind": {"PQC_A": 0, "PQC_B": 7}})
        self.assertEqual(interface.structs["pqc_all"], {
            "number": "c_int32", "read": "POINTER(c_uint32)", "written": "c_void_p", "name": "c_char_p",
            "key": "c_char_p", "stream": "c_void_p", "kind": "c_uint32", "inside": "Tensor", "beside": "POINTER(Tensor)",
            "handle": "c_void_p", "reserved": "c_uint64 * 3", "body": "CFUNCTYPE(None, c_void_p, c_double)"})

    def test_functions_and_callbacks(self):
        interface = interface_of(a=TENSOR + """
typedef struct pqc_handle pqc_handle;
typedef int (*pqc_hook)(const pqc_tensor* at, void (*body)(void* context));
PQC_API const char* pqc_none(void);
PQC_API void pqc_all(const pqc_handle* handle, pqc_handle** made, char** text, const float* read, uint64_t* count,
                     pqc_tensor by_value, pqc_hook hook);""")
        self.assertEqual(interface.callbacks, {"pqc_hook": "CFUNCTYPE(c_int, POINTER(Tensor), CFUNCTYPE(None, c_void_p))"})
        self.assertEqual(interface.functions, {
            "pqc_none": ("c_char_p", []),
            "pqc_all": ("None", ["c_void_p", "POINTER(c_void_p)", "POINTER(c_void_p)", "c_void_p", "c_void_p", "Tensor",
                                 "Hook"])})

    def test_headers_are_read_once_and_in_the_order_of_their_includes(self):
        interface = interface_of(a='#ifndef A_H_\n#define A_H_\n#include "pqcached/z.h"\nPQC_API int pqc_a(void);\n#endif\n',
                                 z='#include <stddef.h>\n#include "pqcached/a.h"\nPQC_API int pqc_z(void);\n')
        self.assertEqual(list(interface.functions), ["pqc_z", "pqc_a"])

    def test_cplusplus_is_left_out_and_macros_of_numbers_are_constants(self):
        interface = interface_of(a="""#define PQC_VERSION 3u
#ifdef __cplusplus
extern "C" {
#define PQC_CPLUSPLUS 1
#else
PQC_API int pqc_c(void);
#endif
#if defined(__GNUC__)
PQC_API int pqc_gnu(void);
#else
PQC_API int pqc_other(void);
#endif
""")
        self.assertEqual(interface.constants, {"PQC_VERSION": 3})
        self.assertEqual(list(interface.functions), ["pqc_c", "pqc_gnu"])

    def test_a_struct_without_its_size_is_a_plain_one(self):
        python = interface_of(a=TENSOR + "typedef struct pqc_range { int32_t begin; } pqc_range;").python()
        self.assertIn('class Tensor(Sized):\n    _fields_ = [\n        ("struct_size", c_size_t),', python)
        self.assertIn('class Range(Structure):\n    _fields_ = [\n        ("begin", c_int32),\n    ]', python)


class RefusalTest(unittest.TestCase):
    def assert_refused(self, text, reason):
        with self.assertRaises(generate_abi.Refused) as caught:
            interface_of(a="\n" + text)
        message = str(caught.exception)
        self.assertEqual(message[message.index("/a.h:") + len("/a.h:"):], reason, text)

    def test_fields(self):
        for field, reason in (("uint32_t a : 3;", ": instead of ;"), ("uint32_t a, b;", ", instead of ;"),
                              ("uint32_t a[2][2];", "[ instead of ;"), ("uint32_t a[N];", "N instead of a number"),
                              ("unsigned a;", "unknown type unsigned"), ("struct pqc_b* a;", "unknown type struct"),
                              ("union { int b; } a;", "unknown type union"), ("pqc_missing* a;", "unknown type pqc_missing"),
                              ("volatile int a;", "unknown type volatile"), ("int const* a;", "* instead of ;"),
                              ("void a;", "a value of type void"), ("void (*a[2])(int b);", "[ instead of )")):
            self.assert_refused(f"typedef struct pqc_a {{\n{field}\n}} pqc_a;", f"3: {reason}")

    def test_declarations(self):
        for text, reason in (
                ("int pqc_a(void);", "2: int instead of typedef"),
                ("static inline int pqc_a(void) { return 1; }", "2: static instead of typedef"),
                ("PQC_API int pqc_a();", "2: ) instead of a name"),
                ("PQC_API int pqc_a(int a, ...);", "2: . instead of a name"),
                ("PQC_API int pqc_a(int);", "2: ) instead of a name"),
                ("PQC_API int pqc_a(int a[]);", "2: [ instead of ,"),
                ("PQC_API int pqc_a(void) __attribute__((cold));", "2: __attribute__ instead of ;"),
                ("typedef uint32_t pqc_a;", "2: pqc_a instead of ("),
                ("typedef struct pqc_a {\nint a;\n} pqc_b;", "4: pqc_b instead of pqc_a"),
                ("typedef struct {\nint a;\n} pqc_a;", "2: { instead of a name"),
                ("typedef struct pqc_a pqc_a;\nPQC_API void pqc_f(pqc_a a);", "3: unknown type pqc_a"),
                ("typedef enum pqc_a { PQC_A } pqc_a;", "2: } instead of ="),
                ("typedef enum pqc_a { PQC_A = -1 } pqc_a;", "2: - instead of a number"),
                ("typedef enum pqc_a { PQC_A = 1 << 2 } pqc_a;", "2: < instead of }"),
                ("// A comment of C++.", "2: / instead of typedef")):
            self.assert_refused(text, reason)

    def test_directives(self):
        for text in ("#pragma pack(1)", "#define PQC_A (1 << 2)", "#define PQC_MAX(a, b) a", "#if PQC_A", "#ifdef PQC_A",
                     "#include <sys/types.h>", '#include "other/a.h"', "#else", "#endif", "#undef PQC_A"):
            self.assert_refused(text, f"2: {text}")
        self.assert_refused("#ifdef __cplusplus\n#if PQC_A", "3: #if PQC_A")
        self.assert_refused("#ifdef __cplusplus\nclass A;", " an #if without #endif")

    def test_an_unfinished_declaration(self):
        with self.assertRaisesRegex(generate_abi.Refused, "the end instead of a name"):
            interface_of(a="PQC_API int")


if __name__ == "__main__":
    unittest.main()
