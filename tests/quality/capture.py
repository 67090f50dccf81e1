#!/usr/bin/env python3
"""Queries, keys and values of a pretrained model over a text, as numpy files.

capture.py TEXT --out DIR [--tokens N] [--layers 0,15,29] [--queries M]

Runs SmolLM2-135M (pretrained.py fetches it and Transformers) with full attention over the first N tokens of the file TEXT. For each
layer L, DIR gets float32 arrays of what its attention takes, after the rotation:
  layerL_q.npy  [query_heads, M, dim]  of the last M tokens; q . k * scale is the logit
  layerL_k.npy  [kv_heads, N, dim]
  layerL_v.npy  [kv_heads, N, dim]
and DIR gets meta.json: the token ids, scale, and what the keys' rotation is (rope_theta, pairs of dimensions i and i + dim / 2).
"""

import argparse
import json
import os
import pathlib

import pretrained

CONTEXT = 8192  # of the model


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=CONTEXT, help=f"most tokens of the text, at most {CONTEXT}")
    parser.add_argument("--layers", help="numbers of layers; default: all")
    parser.add_argument("--queries", type=int, default=512, help="of the last tokens; default 512")
    parsed = parser.parse_args()
    if not parsed.text.is_file():
        parser.error(f"TEXT: {parsed.text} is not a file")
    if not 1 <= parsed.tokens <= CONTEXT:
        parser.error(f"--tokens: {parsed.tokens}, must lie in [1, {CONTEXT}]")
    if parsed.queries < 1:
        parser.error(f"--queries: {parsed.queries}, must be at least 1")
    return parsed


class Recorder:
    """An attention function of Transformers that writes what it gets, and attends as torch does."""

    def __init__(self, out, layers, queries):
        self.out, self.layers, self.queries, self.scale = out, layers, queries, None

    def __call__(self, module, query, key, value, attention_mask, **options):
        import numpy
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        self.scale = module.scaling
        if module.layer_idx in self.layers:
            for name, rows in (("q", query[0, :, -self.queries:]), ("k", key[0]), ("v", value[0])):
                numpy.save(self.out / f"layer{module.layer_idx}_{name}.npy", rows.float().numpy())
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def load():
    """The model in fp32, and its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    file = pretrained.fetch_model()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model.eval(), tokenizer


def capture(options):
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    model, tokenizer = load()
    ids = tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"][:options.tokens]
    layers = range(model.config.num_hidden_layers)
    if options.layers:
        wanted = [int(each) for each in options.layers.split(",")]
        unknown = [each for each in wanted if each not in layers]
        if unknown:
            raise SystemExit(f"--layers: {unknown[0]}, the model has layers 0 to {len(layers) - 1}")
        layers = wanted
    options.out.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(options.out, set(layers), options.queries)
    AttentionInterface.register("recorded", recorder)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    model.set_attn_implementation("recorded")
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    rope = getattr(model.config, "rope_parameters", None) or {}
    meta = {"model": pretrained.FILE, "text": options.text.name, "tokens": ids, "layers": list(layers), "scale": recorder.scale,
            "rope_theta": rope.get("rope_theta", getattr(model.config, "rope_theta", None)), "rope_pairs": "half"}
    (options.out / "meta.json").write_text(json.dumps(meta) + "\n")
    print(f"{len(ids)} tokens, {len(meta['layers'])} layers in {options.out}")


if __name__ == "__main__":
    parsed = arguments()
    pretrained.run_in_environment()
    capture(parsed)
