"""Layer groups from config.json files of the kinds that models have. Usage: model_config_test.py BUILD"""

import json
import pathlib
import tempfile
import unittest

from daemon import pqcached

LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
         "torch_dtype": "bfloat16", "rope_theta": 500000.0, "sliding_window": None}


class ModelConfigTest(unittest.TestCase):
    def test_all_layers_of_a_plain_model_are_selected(self):
        group, = pqcached.groups_of(LLAMA)
        self.assertEqual(group, pqcached.LayerGroup(
            [0, 1, 2, 3], kv_heads=8, query_heads=32, key_dim=128, value_dim=128, dtype=pqcached.DType.BF16,
            rope_layout=pqcached.RopeLayout.HALF, rope_theta=500000.0, rotary_dim=128))

    def test_a_file_and_an_object_are_read_too(self):
        class Config:
            def to_dict(self):
                return dict(LLAMA)

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(LLAMA))
            self.assertEqual(pqcached.groups_of(path), pqcached.groups_of(LLAMA))
            self.assertEqual(pqcached.groups_of(str(path)), pqcached.groups_of(LLAMA))
        self.assertEqual(pqcached.groups_of(Config()), pqcached.groups_of(LLAMA))

    def test_kinds_of_layers_become_groups(self):
        gemma = {"text_config": {
            "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2560,
            "dtype": "float32", "sliding_window": 1024, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "linear_attention",
                            "sliding_attention", "full_attention"]}}
        selected, window = pqcached.groups_of(gemma)
        self.assertEqual((selected.layers, selected.kind), ([2, 5], pqcached.LayerKind.SELECTED))
        self.assertEqual((window.layers, window.kind), ([0, 1, 4], pqcached.LayerKind.WINDOW))
        self.assertEqual((selected.window_tokens, window.window_tokens), (0, 1024))
        self.assertEqual((selected.softmax_scale, selected.softcap), (1 / 16, 50.0))
        self.assertEqual((selected.key_dim, selected.dtype), (256, pqcached.DType.F16))
        self.assertEqual(pqcached.groups_of(gemma, dtype=pqcached.DType.BF16)[1].dtype, pqcached.DType.BF16)

    def test_heads_default_to_one_kv_head_each_and_partial_rotation_is_kept(self):
        group, = pqcached.groups_of({"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 256,
                                     "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})
        self.assertEqual((group.kv_heads, group.query_heads, group.key_dim, group.rotary_dim), (4, 4, 64, 32))
        granite, = pqcached.groups_of({**LLAMA, "attention_multiplier": 0.0078125})
        self.assertEqual(granite.softmax_scale, 0.0078125)

    def test_the_layout_of_rotary_pairs_is_that_of_the_model_type(self):
        layouts = pqcached.RopeLayout
        for config, layout in (({**LLAMA, "model_type": "llama"}, layouts.HALF), ({**LLAMA, "model_type": "cohere"}, layouts.INTERLEAVED),
                               ({**LLAMA, "model_type": "cohere2"}, layouts.NONE),
                               ({**LLAMA, "rope_theta": None}, layouts.UNKNOWN)):
            group, = pqcached.groups_of(config)
            self.assertEqual(group.rope_layout, layout)
        # Parameters for each kind of layers.
        each = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
        full, window = pqcached.groups_of({**LLAMA, "rope_parameters": each, "sliding_window": 512,
                                           "layer_types": ["full_attention", "sliding_attention"] * 2})
        self.assertEqual((full.rope_theta, window.rope_theta, full.rotary_dim), (1e6, 1e4, 128))

    def test_a_text_that_is_no_json_object_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            for text in ("", "[1]", "{", '{"a": NaNa}', "7", "\0{}", json.dumps(LLAMA) + "\0"):
                path.write_text(text)
                with self.subTest(text=text), self.assertRaises(pqcached.InvalidArgument) as raised:
                    pqcached.groups_of(path)
                self.assertEqual(raised.exception.field, "config")

    def test_numbers_that_json_lacks_are_read_as_missing(self):
        groups = pqcached.groups_of(LLAMA)
        for value in (float("inf"), float("nan"), [0.0, float("-inf")]):
            self.assertEqual(pqcached.groups_of({**LLAMA, "time_step_limit": value}), groups)
        self.assertEqual(pqcached.groups_of({**LLAMA, "note": 'a "NaN" \\', "more": "NaN"}), groups)

    def test_a_dtype_that_is_given_replaces_any_other(self):
        for config in ({**LLAMA, "torch_dtype": "float8"}, {"text_config": {**LLAMA, "dtype": "auto"}}):
            group, = pqcached.groups_of(config, dtype=pqcached.DType.BF16)
            self.assertEqual(group.dtype, pqcached.DType.BF16)

    def test_a_window_that_is_switched_off_is_none(self):
        group, = pqcached.groups_of({**LLAMA, "sliding_window": 4096, "use_sliding_window": False})
        self.assertEqual((group.kind, group.window_tokens), (pqcached.LayerKind.SELECTED, 0))
        group, = pqcached.groups_of({**LLAMA, "sliding_window": 4096, "use_sliding_window": None})
        self.assertEqual(group.kind, pqcached.LayerKind.SELECTED)

    def test_what_cannot_be_served_is_named(self):
        def without(name):
            return {key: value for key, value in LLAMA.items() if key != name}

        for config, field in ((without("num_hidden_layers"), "config.num_hidden_layers"),
                              (without("num_attention_heads"), "config.num_attention_heads"),
                              (without("hidden_size"), "config.hidden_size"),
                              ({**LLAMA, "num_hidden_layers": "4"}, "config.num_hidden_layers"),
                              ({**LLAMA, "num_hidden_layers": 2.5}, "config.num_hidden_layers"),
                              ({**LLAMA, "num_hidden_layers": 1025}, "config.num_hidden_layers"),
                              ({**LLAMA, "num_key_value_heads": -1}, "config.num_key_value_heads"),
                              ({**LLAMA, "attn_logit_softcapping": "50"}, "config.attn_logit_softcapping"),
                              ({**LLAMA, "kv_lora_rank": "512"}, "config.kv_lora_rank"),
                              ({**LLAMA, "dtype": 5}, "config.dtype"),
                              ({**LLAMA, "partial_rotary_factor": 1e300}, "config.partial_rotary_factor"),
                              ({**LLAMA, "hidden_size": 16}, "config.hidden_size"),
                              ({**LLAMA, "torch_dtype": "float8"}, "config.dtype"),
                              ({**LLAMA, "kv_lora_rank": 512}, "config.kv_lora_rank"),
                              ({**LLAMA, "sliding_window": 4096}, "config.layer_types"),
                              ({**LLAMA, "layer_types": ["full_attention"]}, "config.layer_types"),
                              ({**LLAMA, "layer_types": ["linear_attention"] * 4}, "config.layer_types"),
                              ({**LLAMA, "layer_types": ["full_attention"] * 3 + ["new"]}, "config.layer_types[3]"),
                              ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "config.sliding_window")):
            with self.subTest(field=field), self.assertRaises(pqcached.InvalidArgument) as raised:
                pqcached.groups_of(config)
            self.assertEqual(raised.exception.field, field)


if __name__ == "__main__":
    unittest.main()
