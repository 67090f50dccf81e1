"""TinyLM in numpy, fp32: the model of the test engine in C++, whose ../engine.h has the equations.

Computes the sliding layers and the prefill; while decoding, the caller provides the attention of
the full layers.
"""

import json
import pathlib

import numpy as np

CHUNK = 256  # tokens per pass of the prefill


def load_tensors(path):
    """Returns the tensors of a .safetensors file by name, in fp32."""
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    dtypes = {"F16": np.float16, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"]).astype(np.float32)
    return tensors


def attend(queries, keys, values, mask=None):
    """Attends with queries [heads, tokens, dim] (scaled) to keys and values [kv_heads, tokens,
    dim]: returns output [heads, tokens, dim] and log-sum-exp [heads, tokens]. mask [tokens,
    tokens]: True for invisible keys.
    """
    kv_heads, heads, count, dim = len(keys), *queries.shape
    logits = queries.reshape(kv_heads, -1, dim) @ keys.transpose(0, 2, 1)
    if mask is not None:
        logits = np.where(mask, -np.inf, logits.reshape(kv_heads, -1, count, mask.shape[1])).reshape(logits.shape)
    top = logits.max(axis=2, keepdims=True)
    np.exp(logits - top, out=logits)
    total = logits.sum(axis=2, keepdims=True)
    output = (logits @ values) / total
    return output.reshape(heads, count, dim), (top + np.log(total)).reshape(heads, count)


def rms(x, gain, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * gain


class TinyLM:
    def __init__(self, folder):
        config = json.loads(pathlib.Path(folder, "config.json").read_text())
        self.weights = load_tensors(pathlib.Path(folder, "model.safetensors"))
        self.heads, self.kv_heads, self.dim = (config["num_attention_heads"], config["num_key_value_heads"],
                                               config["head_dim"])
        self.window, self.epsilon = config["sliding_window"], config["rms_norm_eps"]
        self.temperature_base = config["attn_temp_base"]
        self.is_full = [kind == "full" for kind in config["layer_types"]]
        self.full_layers = [layer for layer, full in enumerate(self.is_full) if full]
        self.frequency = (config["rope_theta"] ** (-2 * np.arange(self.dim // 2) / self.dim)).astype(np.float32)
        self.position = self.prefill_end = 0
        self.rows = {}

    def prefill(self, tokens, ingest):
        """Starts a sequence with exact attention. Passes the rows of the full layers, [tokens,
        kv_heads, dim], to ingest(layer, first_position, keys, values).
        """
        empty = np.empty((self.kv_heads, 0, self.dim), np.float32)
        self.position, self.rows = 0, {layer: (empty, empty) for layer in range(len(self.is_full))}

        def attend_full(layer, queries, keys, values):
            ingest(layer, self.position, keys.transpose(1, 0, 2), values.transpose(1, 0, 2))
            return self._attend_rows(layer, queries, keys, values, None)

        for begin in range(0, len(tokens), CHUNK):
            self._forward(np.asarray(tokens[begin:begin + CHUNK]), attend_full)
        for layer in self.full_layers:
            self.rows[layer] = (empty, empty)  # an engine drops them here
        self.prefill_end = self.position

    def decode(self, token, attend_full):
        """Returns the logits after one more token. attend_full(layer, position, queries [heads,
        dim], keys [kv_heads, dim], values) returns the output [heads, dim].
        """
        def attend_one(layer, queries, keys, values):
            return attend_full(layer, self.position, queries[:, 0], keys[:, 0], values[:, 0])[:, None]

        return self._forward(np.asarray([token]), attend_one)

    def rewind(self):
        """Returns to the end of the prefill."""
        gone = self.position - self.prefill_end
        if gone:
            self.rows = {layer: (k if self.is_full[layer] else k[:, :-gone], v if self.is_full[layer] else v[:, :-gone])
                         for layer, (k, v) in self.rows.items()}
        self.position = self.prefill_end

    def _forward(self, tokens, attend_full):
        weights = self.weights
        x = weights["model.embed_tokens.weight"][tokens]
        for layer, full in enumerate(self.is_full):
            def w(name, prefix=f"model.layers.{layer}."):
                return weights[f"{prefix}{name}.weight"]

            queries, keys, values = self._project(layer, x, w)
            output = (attend_full(layer, queries, keys, values) if full else
                      self._attend_rows(layer, queries, keys, values, self.window))
            x = x + output.transpose(1, 0, 2).reshape(len(tokens), -1) @ w("self_attn.o_proj").T
            b = rms(x, w("post_attention_layernorm"), self.epsilon)
            gate = b @ w("mlp.gate_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * (b @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        self.position += len(tokens)
        return weights["model.embed_tokens.weight"] @ rms(x[-1], weights["model.norm.weight"], self.epsilon)

    def _project(self, layer, x, w):
        """Returns queries [heads, tokens, dim], scaled; keys and values [kv_heads, tokens, dim]."""
        a = rms(x, w("input_layernorm"), self.epsilon)
        queries, keys, values = ((a @ w(f"self_attn.{part}_proj").T).reshape(len(x), -1, self.dim).transpose(1, 0, 2)
                                 for part in "qkv")
        queries = rms(queries, w("self_attn.q_norm"), self.epsilon) / np.float32(np.sqrt(self.dim))
        keys = rms(keys, w("self_attn.k_norm"), self.epsilon)
        positions = np.arange(self.position, self.position + len(x), dtype=np.float32)
        if not self.is_full[layer]:
            return self._rope(queries, positions), self._rope(keys, positions), values
        log_length = np.log(np.maximum((positions + 1) / np.float32(self.temperature_base), 1))
        temperature = self.weights[f"model.layers.{layer}.self_attn.attn_temp"]
        return queries * (1 + temperature[:, None] * log_length)[..., None], keys, values

    def _rope(self, x, positions):
        angles = positions[:, None] * self.frequency
        cos, sin = np.cos(angles), np.sin(angles)
        low, high = np.split(x, 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    def _attend_rows(self, layer, queries, keys, values, window):
        """Appends keys and values to the layer's rows, and computes causal attention over these."""
        old_keys, old_values = self.rows[layer]
        keys, values = np.concatenate([old_keys, keys], axis=1), np.concatenate([old_values, values], axis=1)
        self.rows[layer] = (keys, values)
        count, total = queries.shape[1], keys.shape[1]
        if window and total > count + window:  # no query sees older rows, but a rewind needs them
            keys, values = keys[:, -(count + window):], values[:, -(count + window):]
        own = np.arange(keys.shape[1] - count, keys.shape[1])[:, None]
        others = np.arange(keys.shape[1])
        mask = others > own
        if window:
            mask |= others <= own - window
        return attend(queries, keys, values, mask)[0]
