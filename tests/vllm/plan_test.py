"""What the plug-in for vLLM decides without vLLM: plans of passes, settings, versions. Usage: plan_test.py BUILD"""

import ast
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest

import engines  # first
from engines import INSTALLED, environment, needs_installed

sys.path.insert(0, str(engines.PACKAGE))

from pqcached_vllm import plan, settings, versions  # noqa: E402
from pqcached_vllm.model import describe as describe_model  # noqa: E402
from pqcached_vllm.plan import Part, Plan, Planner, Scheduled  # noqa: E402
from pqcached_vllm.scheduler import extra_key  # noqa: E402

RECORDED = json.loads(pathlib.Path(__file__).with_name("signatures.json").read_text())


class Tokens(unittest.TestCase):
    def test_whole_blocks_are_loaded_and_the_last_token_is_computed(self):
        for stored, prompt, local, block, expected in (
                (0, 500, 0, 128, 0), (384, 500, 0, 128, 384), (384, 500, 128, 128, 256), (384, 500, 384, 128, 0), (384, 384, 0, 128, 256),
                (384, 385, 0, 128, 384), (128, 500, 256, 128, 0), (128, 129, 0, 128, 128), (128, 128, 0, 128, 0), (384, 500, 0, 256, 256),
                (128, 128, 0, 32, 96), (384, 500, 0, 16, 384)):
            with self.subTest(stored=stored, prompt=prompt, local=local, block=block):
                self.assertEqual(plan.tokens_to_load(stored, prompt, local, block), expected)

    def test_each_token_has_its_slot_and_each_block_is_listed(self):
        blocks = [7, 3, 9]
        self.assertEqual(plan.slots(blocks, 126, 130, 128), [7 * 128 + 126, 7 * 128 + 127, 3 * 128, 3 * 128 + 1])
        self.assertEqual(plan.blocks_of(blocks, 0, 256, 128), [7, 3])
        self.assertEqual(plan.blocks_of(blocks, 128, 257, 128), [3, 9])
        self.assertEqual(plan.blocks_of(blocks, 128, 128, 128), [])


class Plans(unittest.TestCase):
    def setUp(self):
        self.planner, self.tokens = Planner(4), list(range(10))
        self.planner.allocated("a", self.tokens, b"key", 4)

    def begin(self, computed=4, count=6):
        return self.planner.plan([Scheduled("a", [5, 6, 7], computed)], [], {}, {"a": count}, [])

    def test_a_request_begins_with_its_tokens_and_what_is_to_be_loaded(self):
        made = self.begin()
        (beginning,) = made.beginnings
        self.assertEqual((beginning.token_ids, beginning.extra_key), (tuple(range(10)), b"key"))
        self.assertEqual((beginning.local_tokens, beginning.loaded_tokens, beginning.first), (0, 4, 4))
        self.assertEqual(made.parts, (Part("a", 4, 6, 7),))

    def test_further_blocks_are_appended_or_replace_the_table(self):
        self.begin()
        made = self.planner.plan([], [Scheduled("a", [], 10)], {}, {"a": 1}, [])
        self.assertEqual(made.parts, (Part("a", 10, 1, 7),))
        made = self.planner.plan([], [Scheduled("a", [2], 12)], {}, {"a": 1}, [])
        self.assertEqual(made.parts, (Part("a", 12, 1, 2),))
        made = self.planner.plan([], [Scheduled("a", [], 13)], {"a": [1, 2, 3, 4]}, {"a": 1}, [])
        self.assertEqual(made.parts, (Part("a", 13, 1, 4),))

    def test_blocks_that_were_not_loaded_leave_vllms_cache_with_those_behind_them(self):
        self.planner.allocated("b", self.tokens, b"key", 0)
        self.planner.allocated("c", self.tokens, b"key", 0)
        self.planner.plan([Scheduled("a", [5, 6, 7], 4), Scheduled("b", [5, 8, 9], 4), Scheduled("c", [1, 2, 3], 4)], [], {},
                          {"a": 6, "b": 6, "c": 6}, [])
        self.assertEqual(self.planner.blocks_from({6}), {6, 7})
        self.planner.finished("a")  # aborted while the pass went on
        self.assertEqual(self.planner.blocks_from({5}), {5, 6, 7, 8, 9})
        self.planner.plan([], [Scheduled("b", [], 10)], {}, {"b": 1}, ["a", "c"])
        self.assertEqual((self.planner.blocks_from({5}), self.planner.blocks_from({1})), ({5, 8, 9}, {1}))

    def test_rows_of_requests_that_are_running_end_with_a_reset(self):
        self.begin()
        self.planner.forget()
        self.tokens += range(10, 300)
        made = self.planner.plan([], [Scheduled("a", range(80), 10)], {}, {"a": 1}, [])
        self.assertEqual((made.ended, made.names, len(made.parts)), (("a",), (), 1))
        self.assertEqual(self.planner.plan([], [Scheduled("a", [], 11)], {}, {"a": 1}, []).ended, ())
        self.planner.allocated("a", self.tokens, b"new", 0)  # it was preempted
        made = self.planner.plan([Scheduled("a", range(80), 0)], [], {}, {"a": 300}, ["a"])
        self.assertEqual((made.ended, made.beginnings[0].extra_key, len(made.beginnings[0].token_ids)), (("a",), b"new", 300))

    def test_a_request_that_comes_back_begins_anew(self):
        self.begin()
        self.planner.allocated("a", self.tokens + [10, 11], b"key", 8)
        made = self.planner.plan([Scheduled("a", [1, 2, 3], 8)], [], {}, {"a": 4}, ["a"])
        self.assertEqual((made.ended, made.beginnings[0].loaded_tokens, made.parts), (("a",), 8, (Part("a", 8, 4, 3),)))

    def test_replies_get_names_when_a_shared_group_is_complete(self):
        self.begin()
        self.tokens += range(10, 127)
        self.assertEqual(self.planner.plan([], [Scheduled("a", range(40), 10)], {}, {"a": 1}, []).names, ())
        self.tokens += [127, 128]
        (names,) = self.planner.plan([], [Scheduled("a", [], 127)], {}, {"a": 1}, []).names
        self.assertEqual((names.begin, names.token_ids), (10, tuple(range(10, 129))))
        self.tokens += range(129, 256)
        self.planner.finished("a")
        (names,) = self.planner.plan([], [], {}, {}, ["a"]).names
        self.assertEqual((names.begin, names.token_ids), (129, tuple(range(129, 256))))

    def test_a_request_that_must_not_be_stored_has_no_tokens_and_no_names(self):
        self.planner.allocated("b", list(range(300)), None, 0)
        made = self.planner.plan([Scheduled("b", range(90), 0)], [], {}, {"b": 300}, [])
        self.assertIsNone(made.beginnings[0].token_ids)
        self.planner.finished("b")
        self.assertEqual(self.planner.plan([], [], {}, {}, ["b"]).names, ())

    def test_the_rows_of_a_batch_are_found_by_the_block_that_is_written(self):
        parts = (Part("a", 4, 6, 7), Part("b", 3, 1, 9))
        rows = plan.rows_of(Plan(4, parts=parts), [9, 7], [4, 10], [0, 1, 7])
        self.assertEqual([(row.part.request_id, row.begin, row.end) for row in rows], [("b", 0, 1), ("a", 1, 7)])

    def test_a_batch_that_does_not_match_the_plan_has_no_rows(self):
        parts = (Part("a", 4, 6, 7), Part("b", 3, 1, 9))
        for last_blocks, lengths, starts in (([9, 8], [4, 10], [0, 1, 7]), ([9, 7], [4, 11], [0, 1, 7]), ([9, 7], [4, 10], [0, 1, 6]),
                                             ([9], [4], [0, 1]), ([9, 7, 7], [4, 10, 10], [0, 1, 7, 13])):
            with self.subTest(last_blocks=last_blocks, lengths=lengths):
                self.assertIsNone(plan.rows_of(Plan(4, parts=parts), last_blocks, lengths, starts))


class Keys(unittest.TestCase):
    @staticmethod
    def request(**changes):
        return types.SimpleNamespace(**{"prompt_token_ids": [1], "prompt_embeds": None, "mm_features": [], "lora_request": None,
                                        "cache_salt": None, **changes})

    @staticmethod
    def adapter(path, number=1, load_inplace=False):
        return types.SimpleNamespace(lora_name="a", lora_path=path, lora_int_id=number, load_inplace=load_inplace)

    def test_an_adapter_that_is_trained_again_at_its_path_has_other_keys_when_vllm_reads_it_again(self):
        def key(number, load_inplace=False):
            return extra_key(self.request(lora_request=self.adapter(folder, number, load_inplace)))

        folder = self.enterContext(tempfile.TemporaryDirectory())
        file = pathlib.Path(folder, "adapter_model.safetensors")
        file.write_text("first")
        os.utime(file, ns=(1, 1))
        before = key(1)
        self.assertEqual(key(2), before)
        os.utime(file, ns=(2, 2))
        again = key(3)
        file.write_text("longer")
        os.utime(file, ns=(2, 2))
        self.assertEqual([key(1), key(3)], [before, again])  # vLLM keeps what it has read
        self.assertEqual(len({before, again, key(4), key(1, load_inplace=True)}), 3)
        self.assertEqual(key(4), key(1, load_inplace=True))

    def test_rows_that_depend_on_more_than_tokens_are_kept_apart(self):
        lora = self.adapter("b")
        keys = [extra_key(self.request(**changes)) for changes in ({}, {"cache_salt": "s"}, {"cache_salt": "t"}, {"lora_request": lora},
                                                                   {"lora_request": lora, "cache_salt": "s"})]
        self.assertEqual(keys[0], b"")
        self.assertEqual(len(set(keys)), len(keys))

    def test_prompts_that_are_not_tokens_alone_are_not_stored(self):
        for changes in ({"prompt_token_ids": None}, {"prompt_embeds": "tensor"}, {"mm_features": ["image"]}):
            self.assertIsNone(extra_key(self.request(**changes)))


class Settings(unittest.TestCase):
    def test_defaults_are_exact(self):
        made = settings.read(None)
        self.assertEqual((made.decode, made.selection().ratio), ("exact", 1.0))

    def test_a_wrong_setting_is_refused_by_its_name(self):
        for extra, text in (({"rate": 1}, "rate: there is no such key"), ({"ratio": 1.5}, r"ratio: 1.5, must be in 0.001..1.0"),
                            ({"ratio": "x"}, "ratio: 'x', must be of type float"), ({"decode": "some"}, "decode: 'some', must be one of exact"),
                            ({"timeout_ms": 0}, "timeout_ms: 0, must be in 1"), ({"window_tokens": True}, "window_tokens: True"),
                            ({"window_tokens": 0}, "window_tokens: 0, must be in 1"), ({"ratio": 0.0}, "ratio: 0.0, must be in")):
            with self.subTest(extra=extra), self.assertRaisesRegex(settings.Refused, text):
                settings.read(extra)


def signatures_of(site):
    """The hooks and fields that versions.py names, read from the sources of an installed vLLM."""
    found = {}
    for path in (*versions.HOOKS, *versions.FIELDS):
        module, _, names = path.partition(":")
        node = ast.parse(pathlib.Path(site, *module.split(".")).with_suffix(".py").read_text())
        for name in names.split("."):
            node = next(each for each in node.body if getattr(each, "name", None) == name)
        if isinstance(node, ast.ClassDef):
            found[path] = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
        else:
            arguments = node.args
            listed = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            found[path] = [each.arg for each in listed if each]
    return found


class Models(unittest.TestCase):
    """What vLLM's configuration says about a model, with parts of it changed."""

    @staticmethod
    def describe(spec=(), model=(), groups=1, extra=(), length=4096, quantization=None, **parts):
        spec_type = type("FullAttentionSpec", (), {})
        made = spec_type()
        vars(made).update({"num_kv_heads": 2, "head_size": 32, "block_size": 128, "dtype": "torch.float32", "sliding_window": None, **dict(spec)})
        namespace = types.SimpleNamespace
        hf_config = namespace(to_dict=lambda: {"rope_theta": 1e4, "transformers_version": "5", **dict(model)})
        config = namespace(**{
            "parallel_config": namespace(pipeline_parallel_size=1, tensor_parallel_size=1), "device_config": namespace(device_type="cpu"),
            "cache_config": namespace(cache_dtype="auto"), "speculative_config": None,
            "model_config": namespace(dtype="torch.float32", hf_config=hf_config, model="m", revision=None,
                                      max_model_len=length, quantization=quantization,
                                      get_num_attention_heads=lambda _: 4), **parts})
        names = [f"model.layers.{number}.self_attn.attn" for number in (10, 2, 0)]
        cache_config = namespace(kv_cache_groups=[namespace(kv_cache_spec=made, layer_names=names)] * groups)
        return describe_model(config, cache_config, settings.read(dict(extra)), 0)

    def test_layers_are_in_their_order(self):
        made = self.describe()
        self.assertEqual(made.layer_names, [f"model.layers.{number}.self_attn.attn" for number in (0, 2, 10)])
        self.assertEqual((list(made.group.layers), made.group.kv_heads, made.group.query_heads, made.group.key_dim), ([0, 1, 2], 2, 4, 32))

    def test_the_fingerprint_has_all_that_rows_depend_on(self):
        longrope = {"rope_parameters": {"rope_type": "longrope"}}
        made = [self.describe(), self.describe(model={"rope_theta": 1e5}), self.describe(extra={"model": "other"}),
                self.describe(spec={"dtype": "torch.bfloat16"}), self.describe(quantization="fp8"), self.describe(quantization="awq"),
                self.describe(model=longrope), self.describe(model=longrope, length=8192)]
        self.assertEqual(len({each.fingerprint for each in made}), len(made))
        self.assertEqual(len({each.cache for each in made}), len(made))
        self.assertEqual([self.describe(model={"transformers_version": "6"}), self.describe(length=8192)], [made[0]] * 2)
        long = [self.describe(extra={"model": first + "x" * 1000}).fingerprint for first in "ab"]
        self.assertNotEqual(*long)
        self.assertLessEqual(len(long[0].encode()), 256)

    def test_what_cannot_be_served_is_refused_by_name(self):
        namespace = types.SimpleNamespace
        parallel = namespace(pipeline_parallel_size=2, tensor_parallel_size=1)
        for changes, text in (
                ({"groups": 2}, "layers of several kinds"), ({"spec": {"sliding_window": 64}}, "the last 64 tokens"),
                ({"spec": {"block_size": 100}}, "block_size 100"), ({"spec": {"head_size": 36}}, "36 dimensions"),
                ({"spec": {"head_size": 512}}, "512 dimensions"), ({"spec": {"dtype": "torch.uint8"}}, "torch.uint8"),
                ({"cache_config": namespace(cache_dtype="fp8")}, "kv_cache_dtype fp8"), ({"parallel_config": parallel}, "pipeline"),
                ({"device_config": namespace(device_type="cuda")}, "device cuda"), ({"speculative_config": object()}, "speculative decoding"),
                ({"extra": {"decode": "select", "subspaces": 5}}, "subspaces: 5, must divide 32")):
            with self.subTest(changes=changes), self.assertRaisesRegex(settings.Refused, text):
                self.describe(**changes)


class Versions(unittest.TestCase):
    def test_each_known_version_has_the_hooks(self):
        self.assertEqual({version.numbers for version in versions.VERSIONS}, {tuple(map(int, text.split(".")[:2])) for text in RECORDED})
        for text, recorded in RECORDED.items():
            for hook, expected in versions.HOOKS.items():
                with self.subTest(version=text, hook=hook):
                    self.assertEqual(recorded[hook], expected.split())
            for name, expected in versions.FIELDS.items():
                with self.subTest(version=text, type=name):
                    self.assertLessEqual(set(expected.split()), set(recorded[name]))

    def test_the_versions_differ_where_the_adapters_do(self):
        output = "vllm.v1.core.sched.output:SchedulerOutput"
        replaces = {text: "block_table_updates" in recorded[output] for text, recorded in RECORDED.items()}
        self.assertEqual(replaces, {"0.32.0": False, "0.31.0": True})
        changed = types.SimpleNamespace(block_table_updates={"a": ([1, 2],)})
        self.assertEqual(versions.find("0.31.0").replaced_blocks(changed), {"a": [1, 2]})
        self.assertEqual(versions.find("0.31.0").replaced_blocks(types.SimpleNamespace(block_table_updates=None)), {})
        self.assertEqual(versions.find("0.32.1").replaced_blocks(object()), {})

    def test_an_unknown_version_is_refused_in_one_line(self):
        for text in ("0.33.0", "0.30.0", "1.0", "0.32dev"):
            with self.subTest(version=text), self.assertRaisesRegex(settings.Refused, f"^vLLM {text}: only 0.32, 0.31 are known$"):
                versions.find(text)

    def test_a_changed_hook_is_refused_by_name(self):
        with self.assertRaisesRegex(settings.Refused, "json:dumps has the parameters"):
            versions.check_hooks({"json:dumps": "obj"}, {})
        with self.assertRaisesRegex(settings.Refused, "json:gone any more"):
            versions.check_hooks({"json:gone": "obj"}, {})
        with self.assertRaisesRegex(settings.Refused, "Plan has no gone any more"):
            versions.check_hooks({}, {"pqcached_vllm.plan:Plan": "parts gone"})
        versions.check_hooks({"pqcached_vllm.plan:slots": "blocks begin end block_tokens"}, {"pqcached_vllm.plan:Plan": "parts"})

    @needs_installed
    def test_the_installed_versions_are_as_recorded(self):
        for version in INSTALLED:
            (site,) = (environment.folder(version) / "lib").glob("python*/site-packages")
            self.assertEqual(signatures_of(site), RECORDED[version], version)


if __name__ == "__main__":
    unittest.main()
