#!/usr/bin/env python3
"""Writes the test engine's model with rotary keys (tests/tinylm/rope) as a GGUF file of the architecture llama.

tinylm_gguf.py FILE
"""

import json
import pathlib
import sys
import types

import numpy as np

import gguf_model

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tinylm/rope"
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down"}


def read_safetensors(path):
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    result = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        kind = {"F16": "<f2", "F32": "<f4"}[entry["dtype"]]
        result[name] = np.frombuffer(data[begin + first:begin + last], kind).reshape(entry["shape"]).astype(np.float32)
    return result


def interleaved(weight, heads):
    """Rows of a projection of queries or keys: llama.cpp rotates neighbours, the model row i of a head with row i + dim / 2."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path):
    config = json.loads((FOLDER / "model/config.json").read_text())
    weights = read_safetensors(FOLDER / "model/model.safetensors")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = [("token_embd.weight", weights["model.embed_tokens.weight"], "f32"),
               ("output_norm.weight", weights["model.norm.weight"], "f32")]
    for layer in range(config["num_hidden_layers"]):
        for name, to in NAMES.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            tensors.append((f"blk.{layer}.{to}.weight", interleaved(weight, heads[to]) if to in heads else weight, "f32"))
    metadata = gguf_model.llama_metadata(types.SimpleNamespace(
        context=config["max_position_embeddings"], width=config["hidden_size"], layers=config["num_hidden_layers"],
        hidden=config["intermediate_size"], heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"], vocabulary=config["vocab_size"]))
    gguf_model.write(path, metadata | {"llama.rope.freq_base": config["rope_theta"],
                                       "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}, tensors)


if __name__ == "__main__":
    write(sys.argv[1])
