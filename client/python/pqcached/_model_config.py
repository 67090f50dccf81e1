"""Layer groups of a model from its config.json."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
from typing import Any, List, Mapping, Optional, Union

from ._enums import DType, LayerKind, RopeLayout
from ._library import check, clear_error_text, library
from ._options import LayerGroup


def groups_of(config: Union[str, "os.PathLike[str]", Mapping[str, Any], Any], *,
              dtype: Optional[DType] = None) -> List[LayerGroup]:
    """Returns the layer groups of a model, for Client.open_cache: first the layers with full
    attention, which are selected, then those with a sliding window. Layers without attention (linear
    attention, convolutions) are in no group.

    config: the path of the model's config.json, its parsed content, or a configuration object of
    Transformers. dtype: of the stored rows; by default the model's (float32 is stored as float16).

    Raises InvalidArgument for a field that is missing, or that pqcached cannot serve (latent
    attention, unknown kinds of layers), and names it (pqc_model_read).
    """
    loaded = library()
    model = ctypes.c_void_p()
    clear_error_text()
    check(loaded.pqc_model_read(_content_of(config).encode(), None, ctypes.byref(model)))
    try:
        count = ctypes.c_uint32()
        groups = loaded.pqc_model_groups(model, ctypes.byref(count))
        read = [_group_of(groups[i]) for i in range(count.value)]
    finally:
        loaded.pqc_model_close(model)
    return read if dtype is None else [dataclasses.replace(group, dtype=dtype) for group in read]


def _content_of(config: Any) -> str:
    if isinstance(config, (str, os.PathLike)):
        return pathlib.Path(config).read_text(encoding="utf-8")
    fields = config if isinstance(config, Mapping) else config.to_dict()
    return json.dumps(dict(fields), default=str)  # the text of a torch.dtype


def _group_of(group: Any) -> LayerGroup:
    return LayerGroup(
        [group.layers[i] for i in range(group.layer_count)], kind=LayerKind(group.kind), kv_heads=group.kv_heads,
        query_heads=group.query_heads, key_dim=group.key_dim, value_dim=group.value_dim, dtype=DType(group.dtype),
        softmax_scale=group.softmax_scale, softcap=group.softcap, rope_layout=RopeLayout(group.rope_layout),
        rope_theta=group.rope_theta, rotary_dim=group.rotary_dim, window_tokens=group.window_tokens)
