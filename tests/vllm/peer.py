#!/usr/bin/env python3
"""Greedy tokens of a model in Hugging Face Transformers with pqcached.transformers, in float32.

peer.py ENDPOINT MODEL SELECTION < PROMPTS    SELECTION: JSON of {ratio, sink_tokens, window_tokens}, with index flat;
                                              PROMPTS: JSON of [{"ids": [...], "tokens": N}]; prints JSON of the tokens
"""

import json
import sys

import torch
import transformers

import pqcached
from pqcached.transformers import PqcCache, register


def main():
    register()
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    model.set_attn_implementation("pqcached")
    selection, found = pqcached.Selection(**json.loads(sys.argv[3])), []
    with pqcached.Client(sys.argv[1], timeout_ms=60000) as client:
        for prompt in json.load(sys.stdin):
            with PqcCache(client, model.config, selection=selection, index=pqcached.Index.flat()) as cache:
                ids, tokens = torch.tensor([prompt["ids"]]), []
                while len(tokens) < prompt["tokens"]:
                    tokens.append(int(model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()))
                    ids = torch.tensor([tokens[-1:]])
            found.append(tokens)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
