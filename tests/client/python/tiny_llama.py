"""A randomly initialised Llama in plain torch that calls its attention as models of Hugging Face Transformers do, and
the few names of transformers that pqcached.transformers uses.

Written after transformers' documentation of AttentionInterface. It stands in for transformers where that is not
installed: it tests the arithmetic and the life of sequences, and cannot tell when transformers changes.
"""

import sys
import types

import torch
from torch import nn


class Config:
    """Names as in LlamaConfig."""

    num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim = 3, 4, 2, 32
    hidden_size, intermediate_size, vocab_size, rope_theta = 64, 96, 97, 10000.0
    _attn_implementation = "eager"


ATTENTION = {}


def causal_mask(query, key):
    """True where a query may attend, [queries, keys]: the queries are the last tokens."""
    new, total = query.shape[2], key.shape[2]
    return torch.ones(new, total, dtype=torch.bool).tril(total - new)


def eager(module, query, key, value, attention_mask, scaling=None, **_):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * scaling
    mask = causal_mask(query, key) if attention_mask is None else attention_mask
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


ATTENTION["eager"] = eager


class Cache:
    """Grows as DynamicCache does."""

    def __init__(self):
        self.layers = {}

    def update(self, key, value, layer):
        if layer in self.layers:
            key = torch.cat([self.layers[layer][0], key], 2)
            value = torch.cat([self.layers[layer][1], value], 2)
        self.layers[layer] = key, value
        return key, value

    def crop(self, tokens):
        self.layers = {layer: (k[:, :, :tokens], v[:, :, :tokens]) for layer, (k, v) in self.layers.items()}

    def reorder(self, rows):
        self.layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self.layers.items()}


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.scaling = config.head_dim ** -0.5
        size, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, size, bias=False)

    def rotate(self, states, first):
        dim = states.shape[-1]
        angles = torch.outer(torch.arange(first, first + states.shape[2], dtype=torch.float32),
                             self.config.rope_theta ** (-torch.arange(0, dim, 2) / dim))
        angles = torch.cat([angles, angles], -1)
        half = torch.cat([-states[..., dim // 2:], states[..., :dim // 2]], -1)
        return (states * angles.cos() + half * angles.sin()).to(states.dtype)

    def forward(self, hidden, attention_mask, cache, first):
        shape = (*hidden.shape[:-1], -1, self.config.head_dim)
        query = self.rotate(self.q_proj(hidden).view(shape).transpose(1, 2), first)
        key = self.rotate(self.k_proj(hidden).view(shape).transpose(1, 2), first)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        key, value = cache.update(key, value, self.layer_idx)
        output, _ = ATTENTION[self.config._attn_implementation](
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, position_ids=None)
        return self.o_proj(output.reshape(*hidden.shape[:-1], -1).contiguous())


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.up, self.down = (nn.Linear(config.hidden_size, config.intermediate_size),
                              nn.Linear(config.intermediate_size, config.hidden_size))
        self.norms = nn.ModuleList([nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)])

    def forward(self, hidden, *arguments):
        hidden = hidden + self.self_attn(self.norms[0](hidden), *arguments)
        return hidden + self.down(nn.functional.silu(self.up(self.norms[1](hidden))))


class Llama(nn.Module):
    def __init__(self, config, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, layer) for layer in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        with torch.no_grad():
            for layer in self.layers:  # else attention is flat, and whatever is attended gives about the same
                layer.self_attn.q_proj.weight.mul_(3)
                layer.self_attn.k_proj.weight.mul_(3)
        self.eval()

    @torch.no_grad()
    def forward(self, tokens, cache, attention_mask=None):
        """Logits of the last token, [batch, vocab_size]."""
        first = cache.layers[0][0].shape[2] if cache.layers else 0
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask, cache, first)
        return self.head(hidden[:, -1]).float()


def install_fake_transformers():
    """Modules of transformers with the names that pqcached.transformers imports; returns what was registered."""
    registered = {"attention": ATTENTION, "mask": {}}
    package, integrations = types.ModuleType("transformers"), types.ModuleType("transformers.integrations")
    masking = types.ModuleType("transformers.masking_utils")
    sdpa = types.ModuleType("transformers.integrations.sdpa_attention")
    package.AttentionInterface = type("AttentionInterface", (), {"register": registered["attention"].__setitem__})
    package.AttentionMaskInterface = type("AttentionMaskInterface", (), {"register": registered["mask"].__setitem__})
    masking.sdpa_mask = lambda *arguments, **named: None
    sdpa.sdpa_attention_forward = eager
    for name, module in (("transformers", package), ("transformers.integrations", integrations),
                         ("transformers.masking_utils", masking), ("transformers.integrations.sdpa_attention", sdpa)):
        sys.modules[name] = module
    return registered
