"""Layer groups of a model from its config.json."""

from __future__ import annotations

import json
import os
from typing import Any, List, Mapping, Optional, Union

from ._enums import DType, LayerKind
from ._errors import InvalidArgument
from ._options import LayerGroup

_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F16}
_KINDS = {"full_attention": LayerKind.SELECTED, "sliding_attention": LayerKind.WINDOW,
          "linear_attention": LayerKind.NONE, "mamba": LayerKind.NONE, "conv": LayerKind.NONE}


def groups_of(config: Union[str, "os.PathLike[str]", Mapping[str, Any], Any], *,
              dtype: Optional[DType] = None) -> List[LayerGroup]:
    """Returns the layer groups of a model, for Client.open_cache: first the layers with full
    attention, which are selected, then those with a sliding window. Layers without attention (linear
    attention, convolutions) are in no group.

    config: the path of the model's config.json, its parsed content, or a configuration object of
    Transformers. dtype: of the stored rows; by default the model's (float32 is stored as float16).

    Raises InvalidArgument for a field that is missing, or that pqcached cannot serve (latent
    attention, unknown kinds of layers), and names it.
    """
    fields = _fields_of(config)
    if fields.get("kv_lora_rank"):
        raise InvalidArgument.about("config.kv_lora_rank", "models with latent attention cannot be served")
    heads = _count(fields, "num_attention_heads")
    head_dim = fields.get("head_dim") or _count(fields, "hidden_size") // heads
    rope = fields.get("rope_parameters") or fields
    common = {
        "kv_heads": fields.get("num_key_value_heads") or heads, "query_heads": heads, "key_dim": head_dim,
        "value_dim": head_dim, "dtype": _dtype_of(fields) if dtype is None else dtype,
        "softmax_scale": _softmax_scale(fields), "softcap": fields.get("attn_logit_softcapping") or 0.0,
        "rope_theta": rope.get("rope_theta") or 0.0,
        "rotary_dim": int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) if rope.get("rope_theta") else 0,
    }
    kinds = _layer_kinds(fields)
    groups = []
    for kind in (LayerKind.SELECTED, LayerKind.WINDOW):
        layers = [layer for layer, each in enumerate(kinds) if each == kind]
        window = _count(fields, "sliding_window") if layers and kind == LayerKind.WINDOW else 0
        if layers:
            groups.append(LayerGroup(layers, kind=kind, window_tokens=window, **common))
    if not groups:
        raise InvalidArgument.about("config.layer_types", "no layer has attention")
    return groups


def _fields_of(config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    elif not isinstance(config, Mapping):
        config = config.to_dict()
    fields: Mapping[str, Any] = config.get("text_config") or config
    return fields


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 1:
        raise InvalidArgument.about(f"config.{name}", f"{value!r}, must be a positive integer")
    return value


def _dtype_of(fields: Mapping[str, Any]) -> DType:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").replace("torch.", "")
    if name not in _DTYPES:
        raise InvalidArgument.about("config.dtype", f"{name!r}, must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _softmax_scale(fields: Mapping[str, Any]) -> float:
    if fields.get("attention_multiplier"):
        return float(fields["attention_multiplier"])
    scalar = fields.get("query_pre_attn_scalar")
    return 0.0 if not scalar else float(scalar) ** -0.5


def _layer_kinds(fields: Mapping[str, Any]) -> List[LayerKind]:
    layer_count = _count(fields, "num_hidden_layers")
    names = fields.get("layer_types")
    if names is None:
        # Which layers have the window is in the model's code where several kinds alternate.
        if fields.get("sliding_window") and fields.get("use_sliding_window", True):
            raise InvalidArgument.about("config.layer_types", "missing, and sliding_window is set: list a kind for each layer")
        return [LayerKind.SELECTED] * layer_count
    if len(names) != layer_count:
        raise InvalidArgument.about("config.layer_types", f"{len(names)} kinds, and num_hidden_layers is {layer_count}")
    for layer, name in enumerate(names):
        if name not in _KINDS:
            raise InvalidArgument.about(f"config.layer_types[{layer}]", f"{name!r}, must be one of {', '.join(_KINDS)}")
    return [_KINDS[name] for name in names]
