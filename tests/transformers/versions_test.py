"""The version table against what versions of Transformers really have. Usage: versions_test.py BUILD

signatures.json has the parameters of the hooks in several versions. versions_test.py --record FOLDER... adds those of unpacked packages.
"""

import ast
import json
import pathlib
import sys
import unittest
import unittest.mock

SIGNATURES = pathlib.Path(__file__).resolve().parent / "signatures.json"
HOOKS = {
    "cache_utils.py": {"Cache": ("update", "get_seq_length", "get_mask_sizes", "crop", "reset", "reorder_cache",
                                 "batch_repeat_interleave", "batch_select_indices"),
                       "CacheLayerMixin": ("update", "lazy_initialization", "get_seq_length", "get_mask_sizes", "reset",
                                           "reorder_cache", "get_max_length", "get_max_cache_shape", "offload", "prefetch"),
                       "DynamicCache": ("__init__",)},
    "masking_utils.py": {"sdpa_mask": (), "sdpa_mask_recent_torch": (), "causal_mask_function": ()},
    "integrations/sdpa_attention.py": {"sdpa_attention_forward": ()},
}


def parameters_of(function):
    listed = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return listed + [f"*{each.arg}" for each in (function.args.vararg,) if each] + [f"**{each.arg}" for each in (function.args.kwarg,) if each]


def signatures_of(package):
    """Parameters of the hooks of a package, read from its source."""
    found = {}
    for file, names in HOOKS.items():
        for node in ast.parse((package / file).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                found[node.name] = parameters_of(node)
            elif isinstance(node, ast.ClassDef) and node.name in names:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name in names[node.name]:
                        found[f"{node.name}.{method.name}"] = parameters_of(method)
                        if any(getattr(each, "id", "") == "abstractmethod" for each in method.decorator_list):
                            found[f"{node.name}.{method.name}"].append("abstract")
    return dict(sorted(found.items()))


if "--record" in sys.argv:
    recorded = json.loads(SIGNATURES.read_text()) if SIGNATURES.exists() else {}
    for name in sys.argv[sys.argv.index("--record") + 1:]:
        folder = pathlib.Path(name)
        version = folder.name.split("-")[1]
        recorded[version] = signatures_of(folder / "transformers")
    order = sorted(recorded, key=lambda text: [int(part) for part in text.split(".")])
    lines = [f' "{version}": {{\n' + ",\n".join(f"  {json.dumps(hook)}: {json.dumps(recorded[version][hook])}"
                                              for hook in recorded[version]) + "\n }" for version in order]
    SIGNATURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.exit()

import models  # noqa: E402  (first of the imports that need more than Python)
from models import needs_transformers  # noqa: E402

from daemon import pqcached  # noqa: E402


@needs_transformers
class Versions(unittest.TestCase):
    def setUp(self):
        from pqcached.transformers import _versions
        self.table = _versions
        self.recorded = json.loads(SIGNATURES.read_text())

    def test_each_recorded_version_has_what_the_table_says(self):
        for version, hooks in self.recorded.items():
            with self.subTest(version=version):
                entry = self.table.version_of(version)
                mask = hooks.get("sdpa_mask") or hooks["sdpa_mask_recent_torch"]
                self.assertIn("cache_position" if entry.mask_argument == "cache_position" else "q_length", mask)
                for owner in ("Cache", "CacheLayerMixin"):
                    self.assertEqual(hooks[f"{owner}.get_mask_sizes"][1], entry.mask_argument)
                self.assertLessEqual({"batch_size", "kv_length", "kv_offset", "mask_function", "attention_mask", "local_size"}, set(mask))
                self.assertLessEqual({"key_states", "value_states"}, set(hooks["CacheLayerMixin.update"]))
                self.assertIn("config", hooks["DynamicCache.__init__"])

    def test_a_layer_implements_all_abstract_methods_of_each_recorded_version(self):
        from pqcached.transformers import PqcLayer
        for version, hooks in self.recorded.items():
            abstract = {name.split(".")[1] for name, listed in hooks.items() if listed[-1] == "abstract"}
            with self.subTest(version=version):
                self.assertTrue(abstract)
                self.assertLessEqual(abstract, set(vars(PqcLayer)))

    def test_the_installed_version_is_recorded_or_like_one(self):
        import transformers
        installed = signatures_of(pathlib.Path(transformers.__file__).parent)
        newest = list(self.recorded.values())[-1]
        self.assertEqual(self.recorded.get(transformers.__version__, newest), installed)

    def test_versions_that_are_too_old_are_refused(self):
        for text in ("4.56.2", "4.40", "5.0.0", "5.3.1"):
            with self.subTest(version=text), self.assertRaisesRegex(pqcached.Unimplemented, f"version {text}"):
                self.table.version_of(text)
        self.assertEqual(self.table.version_of("4.57.1").mask_argument, "cache_position")
        self.assertEqual(self.table.version_of("6.1.0.dev0"), self.table.TABLE[-1])

    def test_a_changed_hook_is_refused_by_name(self):
        from pqcached.transformers import PqcLayer
        from transformers import cache_utils, masking_utils
        changes = (
            ("CacheLayerMixin.update", cache_utils.CacheLayerMixin, "update", lambda self, states: None),
            ("Cache.get_mask_sizes", cache_utils.Cache, "get_mask_sizes", lambda self, tokens, layer_idx: None),
            ("Cache.reorder_cache", cache_utils.Cache, "reorder_cache", lambda self, beams: None),
            ("sdpa_mask", masking_utils, "sdpa_mask", lambda batch_size, kv_length: None))
        for name, owner, attribute, changed in changes:
            with self.subTest(hook=name), unittest.mock.patch.object(owner, attribute, changed):
                with self.assertRaisesRegex(pqcached.Unimplemented, f"{name} has no parameter"):
                    self.table.check(PqcLayer)
        with unittest.mock.patch.object(PqcLayer, "__abstractmethods__", frozenset({"new_method"})):
            with self.assertRaisesRegex(pqcached.Unimplemented, "new_method"):
                self.table.check(PqcLayer)
        self.table.check(PqcLayer)


if __name__ == "__main__":
    unittest.main()
