"""What the public C headers declare only grows: everything that 0.1 had is still there, unchanged."""

import ctypes
import importlib.util
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EARLIER = pathlib.Path(__file__).resolve().parent / "0.1/include/pqcached"
TODAY = ROOT / "client/include/pqcached"
# Members of other structs: they cannot grow, because the fields behind them would move.
MEMBERS = {"pqc_tensor", "pqc_index", "pqc_positions"}


def interface(folder):
    spec = importlib.util.spec_from_file_location("generate_abi", ROOT / "client/python/generate_abi.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_abi"] = module
    spec.loader.exec_module(module)
    return module.Interface(folder)


def layouts(declared):
    """The ctypes classes of the structs: C name -> class."""
    module = {}
    exec(compile(declared.python(), "_abi.py", "exec"), module)  # as the Python package has them
    return {name: module["".join(word.title() for word in name.removeprefix("pqc_").split("_"))] for name in declared.structs}


def in_padding(earlier, today):
    """New fields that lie where earlier programs had padding, whose bytes may be anything."""
    then, now = layouts(earlier), layouts(today)
    return [f"{struct}.{field}" for struct in then for field in list(today.structs[struct])[len(earlier.structs[struct]):]
            if getattr(now[struct], field).offset < ctypes.sizeof(then[struct])]


def breaks(earlier, today):
    """What a program of `earlier` would no longer find, one line each."""
    found = []
    for kind in ("constants", "callbacks", "functions"):
        then, now = getattr(earlier, kind), getattr(today, kind)
        found += [f"{kind}: {name} was {then[name]}, is {now.get(name)}" for name in then if now.get(name) != then[name]]
    for enum, values in earlier.enums.items():
        now = today.enums.get(enum, {})
        found += [f"{enum}: {name} was {value}, is {now.get(name)}" for name, value in values.items() if now.get(name) != value]
    for struct, fields in earlier.structs.items():
        then, now = list(fields.items()), list(today.structs.get(struct, {}).items())
        if now[:len(then)] != then:
            found.append(f"{struct}: its first fields are not those that it had")
        elif len(now) > len(then) and (struct in MEMBERS or "struct_size" not in fields):
            found.append(f"{struct}: it may not grow")
    return found


class GrowthTest(unittest.TestCase):
    def setUp(self):
        self.earlier, self.today = interface(EARLIER), interface(TODAY)

    def test_what_0_1_declares_is_still_there(self):
        self.assertGreater(len(self.earlier.functions), 50)
        self.assertEqual(breaks(self.earlier, self.today), [])

    def test_no_new_field_lies_in_padding(self):
        self.assertEqual(in_padding(self.earlier, self.today), [])
        narrow, wide = interface(EARLIER), interface(EARLIER)
        narrow.structs["pqc_step_options"]["flags"] = "c_uint32"
        wide.structs["pqc_step_options"]["flags"] = "c_uint64"
        self.assertEqual(in_padding(self.earlier, narrow), ["pqc_step_options.flags"])
        self.assertEqual(in_padding(self.earlier, wide), [])

    def test_each_kind_of_break_is_found(self):
        def broken(change):
            today = interface(EARLIER)
            change(today)
            return breaks(self.earlier, today)

        self.assertEqual(broken(lambda today: None), [])
        self.assertEqual(broken(lambda today: today.functions.update(pqc_new=("c_int", []))), [])
        self.assertEqual(broken(lambda today: today.structs["pqc_step_options"].update(flags="c_uint32")), [])
        self.assertEqual(broken(lambda today: today.enums["pqc_budget_kind"].update(PQC_BUDGET_NEW=3)), [])
        changes = {
            "functions": lambda today: today.functions.pop("pqc_topk"),
            "pqc_status": lambda today: today.enums["pqc_status"].update(PQC_ABORTED=11),
            "pqc_selection": lambda today: today.structs["pqc_selection"].pop("ratio"),
            "pqc_query": lambda today: today.structs["pqc_query"].update(layer="c_uint64"),
            "pqc_tensor": lambda today: today.structs["pqc_tensor"].update(more="c_uint64"),
            "pqc_token_range": lambda today: today.structs["pqc_token_range"].update(more="c_uint64"),
            "constants": lambda today: today.constants.update(PQC_ABI_VERSION=2),
        }
        for name, change in changes.items():
            with self.subTest(name):
                found = broken(change)
                self.assertEqual(len(found), 1)
                self.assertTrue(found[0].startswith(name))


if __name__ == "__main__":
    unittest.main()
