#!/usr/bin/env python3
"""Writes tiny models of several architectures with random weights as GGUF files: each has another graph of attention.

architectures.py FOLDER [NAME...]
"""

import pathlib
import sys

import numpy as np

import gguf_model

WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 128, 4, 2, 32, 128, 128
LATENT, ROTATED = 64, 32  # of DeepSeek: the dims of a latent row, and those of the rotated key behind it
EXPERTS = 2  # all are used: with fewer, a rounding would choose another one now and then


class Model:
    """Metadata and tensors of a model. Weights of products have a deviation that keeps activations near 1."""

    def __init__(self, architecture, layers, **metadata):
        self._random = np.random.default_rng(3)
        self._architecture = architecture
        self._metadata = {
            "general.architecture": architecture,
            "tokenizer.ggml.model": "no_vocab",
            f"{architecture}.vocab_size": VOCABULARY,
            f"{architecture}.context_length": 1 << 16,
            f"{architecture}.embedding_length": WIDTH,
            f"{architecture}.block_count": layers,
            f"{architecture}.feed_forward_length": HIDDEN,
            f"{architecture}.attention.head_count": HEADS,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        }
        self.set(**metadata)
        self._tensors = []
        self.matrix("token_embd.weight", VOCABULARY, WIDTH, scale=WIDTH**0.5)
        self.matrix("output.weight", VOCABULARY, WIDTH)

    def set(self, **metadata):
        """Sets keys of the architecture; two underscores are a dot."""
        for key, value in metadata.items():
            self._metadata[f"{self._architecture}.{key.replace('__', '.')}"] = value
        return self

    def matrix(self, name, *shape, scale=1.0):
        values = self._random.standard_normal(shape).astype(np.float32) * np.float32(scale / shape[-1]**0.5)
        self._tensors.append((name, values, "f32"))

    def values(self, name, *shape, scale=0.1):
        self._tensors.append((name, self._random.standard_normal(shape).astype(np.float32) * np.float32(scale), "f32"))

    def ones(self, *names, count=WIDTH):
        for name in names:
            self._tensors.append((name, np.ones(count, np.float32), "f32"))

    def attention(self, prefix, heads=HEADS, kv_heads=KV_HEADS, output="attn_output", infix="attn"):
        self.matrix(f"{prefix}.{infix}_q.weight", heads * HEAD_DIM, WIDTH, scale=2.0)
        self.matrix(f"{prefix}.{infix}_k.weight", kv_heads * HEAD_DIM, WIDTH, scale=2.0)
        self.matrix(f"{prefix}.{infix}_v.weight", kv_heads * HEAD_DIM, WIDTH)
        self.matrix(f"{prefix}.{output}.weight", WIDTH, heads * HEAD_DIM)

    def feed_forward(self, prefix, names=("ffn_gate", "ffn_up")):
        for name in names:
            self.matrix(f"{prefix}.{name}.weight", HIDDEN, WIDTH)
        self.matrix(f"{prefix}.ffn_down.weight", WIDTH, HIDDEN)

    def experts(self, prefix, suffix="exps"):
        for name in ("gate", "up"):
            self.matrix(f"{prefix}.ffn_{name}_{suffix}.weight", EXPERTS, HIDDEN, WIDTH)
        self.matrix(f"{prefix}.ffn_down_{suffix}.weight", EXPERTS, WIDTH, HIDDEN)
        self.matrix(f"{prefix}.ffn_gate_inp.weight", EXPERTS, WIDTH)

    def biases(self, prefix, **counts):
        for name, count in counts.items():
            self.values(f"{prefix}.{name}.bias", *(count if isinstance(count, tuple) else (count,)))

    def write(self, path):
        gguf_model.write(path, self._metadata, self._tensors)


def grouped(architecture, layers, **metadata):
    """A model with groups of query heads, and rotary keys."""
    model = Model(architecture, layers, attention__head_count_kv=KV_HEADS, attention__key_length=HEAD_DIM, attention__value_length=HEAD_DIM,
                  rope__dimension_count=HEAD_DIM, rope__freq_base=10000.0, **metadata)
    model.ones("output_norm.weight")
    return model


def blocks(count):
    return [f"blk.{layer}" for layer in range(count)]


def llama():
    model = grouped("llama", 2)
    for block in blocks(2):
        model.ones(f"{block}.attn_norm.weight", f"{block}.ffn_norm.weight")
        model.attention(block)
        model.feed_forward(block)
    return model


def qwen3():
    """Queries and keys are normalized."""
    model = grouped("qwen3", 2)
    for block in blocks(2):
        model.ones(f"{block}.attn_norm.weight", f"{block}.ffn_norm.weight")
        model.ones(f"{block}.attn_q_norm.weight", f"{block}.attn_k_norm.weight", count=HEAD_DIM)
        model.attention(block)
        model.feed_forward(block)
    return model


def gemma3():
    """Five layers with a window, which have a cache of their own, and a layer without."""
    model = grouped("gemma3", 6, attention__sliding_window=64)
    for block in blocks(6):
        model.ones(*(f"{block}.{name}.weight" for name in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")))
        model.ones(f"{block}.attn_q_norm.weight", f"{block}.attn_k_norm.weight", count=HEAD_DIM)
        model.attention(block)
        model.feed_forward(block)
    return model


def gpt_oss():
    """Learned sinks, and a window in every second layer."""
    model = grouped("gpt-oss", 2, attention__sliding_window=64, expert_count=EXPERTS, expert_used_count=EXPERTS,
                    expert_feed_forward_length=HIDDEN)
    for block in blocks(2):
        model.ones(f"{block}.attn_norm.weight", f"{block}.post_attention_norm.weight")
        model.values(f"{block}.attn_sinks.weight", HEADS, scale=1.0)
        model.attention(block)
        model.experts(block)
        model.biases(block, attn_q=HEADS * HEAD_DIM, attn_k=KV_HEADS * HEAD_DIM, attn_v=KV_HEADS * HEAD_DIM, attn_output=WIDTH,
                     ffn_gate_inp=EXPERTS, ffn_gate_exps=(EXPERTS, HIDDEN), ffn_up_exps=(EXPERTS, HIDDEN), ffn_down_exps=(EXPERTS, WIDTH))
    return model


def phi3():
    """One product makes queries, keys and values."""
    model = grouped("phi3", 2)
    for block in blocks(2):
        model.ones(f"{block}.attn_norm.weight", f"{block}.ffn_norm.weight")
        model.matrix(f"{block}.attn_qkv.weight", WIDTH + 2 * KV_HEADS * HEAD_DIM, WIDTH, scale=1.5)
        model.matrix(f"{block}.attn_output.weight", WIDTH, WIDTH)
        model.matrix(f"{block}.ffn_up.weight", 2 * HIDDEN, WIDTH)
        model.matrix(f"{block}.ffn_down.weight", WIDTH, HIDDEN)
    return model


def deepseek2():
    """Multi-head latent attention: values are a part of the keys."""
    key = HEAD_DIM + ROTATED
    model = Model("deepseek2", 2, attention__head_count_kv=1, attention__key_length=LATENT + ROTATED, attention__value_length=LATENT,
                  attention__key_length_mla=key, attention__value_length_mla=HEAD_DIM, attention__q_lora_rank=LATENT,
                  attention__kv_lora_rank=LATENT, rope__dimension_count=ROTATED, rope__freq_base=10000.0, leading_dense_block_count=1,
                  expert_count=EXPERTS, expert_used_count=EXPERTS, expert_shared_count=1, expert_feed_forward_length=HIDDEN,
                  expert_weights_scale=1.0, expert_gating_func=1)
    model.ones("output_norm.weight")
    for layer, block in enumerate(blocks(2)):
        model.ones(f"{block}.attn_norm.weight", f"{block}.ffn_norm.weight")
        model.ones(f"{block}.attn_q_a_norm.weight", f"{block}.attn_kv_a_norm.weight", count=LATENT)
        model.matrix(f"{block}.attn_q_a.weight", LATENT, WIDTH)
        model.matrix(f"{block}.attn_q_b.weight", HEADS * key, LATENT, scale=2.0)
        model.matrix(f"{block}.attn_kv_a_mqa.weight", LATENT + ROTATED, WIDTH)
        model.matrix(f"{block}.attn_k_b.weight", HEADS, LATENT, HEAD_DIM)
        model.matrix(f"{block}.attn_v_b.weight", HEADS, HEAD_DIM, LATENT)
        model.matrix(f"{block}.attn_output.weight", WIDTH, HEADS * HEAD_DIM)
        if layer == 0:
            model.feed_forward(block)
            continue
        model.experts(block)
        for name in ("gate", "up"):
            model.matrix(f"{block}.ffn_{name}_shexp.weight", HIDDEN, WIDTH)
        model.matrix(f"{block}.ffn_down_shexp.weight", WIDTH, HIDDEN)
    return model


def falcon_h1():
    """A state-space model beside attention in every layer."""
    inner, state, heads, groups, kernel = 128, 16, 4, 1, 4
    convolved = inner + 2 * groups * state
    model = grouped("falcon-h1", 2, ssm__conv_kernel=kernel, ssm__inner_size=inner, ssm__state_size=state, ssm__time_step_rank=heads,
                    ssm__group_count=groups)
    for block in blocks(2):
        model.ones(f"{block}.attn_norm.weight", f"{block}.ffn_norm")
        model.attention(block)
        model.feed_forward(block)
        model.matrix(f"{block}.ssm_in.weight", inner + convolved + heads, WIDTH)
        model.matrix(f"{block}.ssm_conv1d.weight", convolved, kernel)
        model.values(f"{block}.ssm_conv1d.bias", convolved)
        model.values(f"{block}.ssm_dt.bias", heads)
        model._tensors.append((f"{block}.ssm_a", np.full((heads, 1), -1.0, np.float32), "f32"))
        model.values(f"{block}.ssm_d", heads, 1)
        model._tensors.append((f"{block}.ssm_norm.weight", np.ones((groups, inner // groups), np.float32), "f32"))
        model.matrix(f"{block}.ssm_out.weight", WIDTH, inner)
    return model


def bloom():
    """ALiBi: logits have a bias by the distance."""
    model = Model("bloom", 2, attention__head_count_kv=HEADS, attention__layer_norm_epsilon=1e-5)
    model.ones("token_embd_norm.weight", "output_norm.weight")
    model.values("token_embd_norm.bias", WIDTH)
    model.values("output_norm.bias", WIDTH)
    for block in blocks(2):
        model.ones(f"{block}.attn_norm.weight", f"{block}.ffn_norm.weight")
        model.matrix(f"{block}.attn_qkv.weight", 3 * WIDTH, WIDTH, scale=1.5)
        model.matrix(f"{block}.attn_output.weight", WIDTH, WIDTH)
        model.feed_forward(block, ["ffn_up"])
        model.biases(block, attn_norm=WIDTH, ffn_norm=WIDTH, attn_qkv=3 * WIDTH, attn_output=WIDTH, ffn_up=HIDDEN, ffn_down=WIDTH)
    return model


def t5():
    """An encoder, and a decoder that attends to its output as well."""
    buckets = 32
    model = Model("t5", 2, attention__head_count_kv=HEADS, attention__key_length=HEAD_DIM, attention__value_length=HEAD_DIM,
                  attention__relative_buckets_count=buckets, decoder_start_token_id=0)
    model.ones("enc.output_norm.weight", "dec.output_norm.weight")
    for layer in range(2):
        for side in ("enc", "dec"):
            block = f"{side}.blk.{layer}"
            model.ones(f"{block}.attn_norm.weight", f"{block}.ffn_norm.weight")
            if layer == 0:
                model.values(f"{block}.attn_rel_b.weight", buckets, HEADS)
            model.attention(block, kv_heads=HEADS, output="attn_o")
            model.feed_forward(block)
        model.ones(f"dec.blk.{layer}.cross_attn_norm.weight")
        model.attention(f"dec.blk.{layer}", kv_heads=HEADS, output="cross_attn_o", infix="cross_attn")
    return model


ARCHITECTURES = {"llama": llama, "qwen3": qwen3, "gemma3": gemma3, "gpt-oss": gpt_oss, "phi3": phi3, "deepseek2": deepseek2,
                 "falcon-h1": falcon_h1, "bloom": bloom, "t5": t5}


def write(folder, name):
    path = pathlib.Path(folder, f"{name}.gguf")
    ARCHITECTURES[name]().write(path)
    return path


if __name__ == "__main__":
    for each in sys.argv[2:] or ARCHITECTURES:
        write(sys.argv[1], each)
