#!/usr/bin/env python3
"""Writes models of the Llama architecture with random weights as GGUF files, for tests and benches of the llama.cpp plug-in.

gguf_model.py FILE [--layers N] [--width N] [--heads N] [--kv-heads N] [--head-dim N] [--hidden N] [--vocabulary N] [--context N]
              [--type f32|f16|q4_0] [--seed N]
"""

import argparse
import struct

import numpy as np

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
U32, F32, STRING = 4, 6, 8  # types of values
TYPES = {"f32": 0, "f16": 1, "q4_0": 2}
Q4_0_BLOCK = 32  # elements that share a scale


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, value):
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", F32, value)
    return text(key) + struct.pack("<II", U32, value)


def encode(array, kind):
    if kind == "f32":
        return array.astype("<f4").tobytes()
    if kind == "f16":
        return array.astype("<f2").tobytes()
    blocks = array.reshape(-1, Q4_0_BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 7
    codes = np.clip(np.rint(blocks / np.where(scales == 0, 1, scales)) + 8, 0, 15).astype(np.uint8)
    packed = codes[:, : Q4_0_BLOCK // 2] | codes[:, Q4_0_BLOCK // 2:] << 4
    return np.concatenate([scales.astype("<f2").view(np.uint8).reshape(-1, 2), packed], axis=1).tobytes()


def write(path, metadata, tensors):
    """tensors: (name, array [rows, columns] or [columns], type)."""
    infos, data, offset = b"", [], 0
    for name, array, kind in tensors:
        encoded = encode(array, kind)
        infos += text(name) + struct.pack("<I", array.ndim)
        infos += struct.pack(f"<{array.ndim}Q", *reversed(array.shape)) + struct.pack("<IQ", TYPES[kind], offset)
        data.append(encoded + bytes(-len(encoded) % ALIGNMENT))
        offset += len(data[-1])
    head = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    head += b"".join(pair(key, value) for key, value in metadata.items()) + infos
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for each in data:
            file.write(each)


def llama_metadata(shape):
    return {
        "general.architecture": "llama",
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.width,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.hidden,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": shape.vocabulary,
        "tokenizer.ggml.model": "no_vocab",
    }


def random_model(path, shape):
    random = np.random.default_rng(shape.seed)

    def matrix(rows, columns, scale=1.0):
        # One random block, repeated: the values do not matter, and large models take seconds.
        count = rows * columns
        block = random.standard_normal(min(count, 1 << 20)).astype(np.float32)
        return np.resize(block, count).reshape(rows, columns) * np.float32(scale / columns**0.5)

    keys = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    ones = np.ones(shape.width, np.float32)
    tensors = [("token_embd.weight", matrix(shape.vocabulary, shape.width, shape.width**0.5), shape.head_type)]
    for layer in range(shape.layers):
        def add(name, rows, columns, scale=1.0):
            tensors.append((f"blk.{layer}.{name}.weight", matrix(rows, columns, scale), shape.type))
        tensors.append((f"blk.{layer}.attn_norm.weight", ones, "f32"))
        add("attn_q", keys, shape.width, shape.sharpness)
        add("attn_k", kv, shape.width, shape.sharpness)
        add("attn_v", kv, shape.width)
        add("attn_output", shape.width, keys)
        tensors.append((f"blk.{layer}.ffn_norm.weight", ones, "f32"))
        add("ffn_gate", shape.hidden, shape.width)
        add("ffn_up", shape.hidden, shape.width)
        add("ffn_down", shape.width, shape.hidden)
    tensors += [("output_norm.weight", ones, "f32"), ("output.weight", matrix(shape.vocabulary, shape.width), shape.head_type)]
    write(path, llama_metadata(shape), tensors)


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=128)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--type", choices=sorted(TYPES), default="f16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sharpness", type=float, default=2.0, help="of attention: above 1, logits have a deviation above 1")
    options = parser.parse_args(words)
    options.head_type = "f32" if options.type == "f32" else "f16"  # of the embeddings
    return options


if __name__ == "__main__":
    options = arguments()
    random_model(options.file, options)
