"""Layer groups of a model from its config.json."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
from typing import Any, List, Mapping, Optional, Union

from ._arguments import text
from ._enums import DType, LayerKind, RopeLayout
from ._errors import InvalidArgument
from ._library import check, clear_error_text, library
from ._options import LayerGroup


def groups_of(config: Union[str, "os.PathLike[str]", Mapping[str, Any], Any], *,
              dtype: Optional[DType] = None, rpc_library_path: str = "") -> List[LayerGroup]:
    """Returns the layer groups of a model, for Client.open_cache: first the layers with full
    attention, which are selected, then those with a sliding window. Layers without attention (linear
    attention, convolutions) are in no group.

    config: the path of the model's config.json, its parsed content, or a configuration object of
    Transformers. dtype: of the stored rows; by default the model's (float32 is stored as float16).
    rpc_library_path: as that of Client.

    Raises InvalidArgument for a field that is missing, or that pqcached cannot serve (latent
    attention, unknown kinds of layers), and names it (pqc_model_read).
    """
    loaded = library()
    model = ctypes.c_void_p()
    clear_error_text()
    content = _content_of(config, replaces_dtype=dtype is not None)
    path = text("rpc_library_path", rpc_library_path) or None
    check(loaded.pqc_model_read(content.encode(), path, ctypes.byref(model)))
    try:
        count = ctypes.c_uint32()
        groups = loaded.pqc_model_groups(model, ctypes.byref(count))
        read = [_group_of(groups[i]) for i in range(count.value)]
    finally:
        loaded.pqc_model_close(model)
    return read if dtype is None else [dataclasses.replace(group, dtype=dtype) for group in read]


def _content_of(config: Any, *, replaces_dtype: bool) -> str:
    """The JSON of the configuration, with a dtype that can be read where another one will replace it."""
    if isinstance(config, (str, os.PathLike)):
        content = pathlib.Path(config).read_text(encoding="utf-8")
        if "\0" in content:
            raise InvalidArgument.about("config", "has a zero byte")
        if not replaces_dtype:
            return content
        config = json.loads(content)
    fields = dict(config if isinstance(config, Mapping) else config.to_dict())
    if replaces_dtype:
        for part in (fields, fields.get("text_config")):
            if isinstance(part, dict):
                part.pop("torch_dtype", None)
                part["dtype"] = "float16"
    return json.dumps(fields, default=str)  # the text of a torch.dtype


def _group_of(group: Any) -> LayerGroup:
    return LayerGroup(
        [group.layers[i] for i in range(group.layer_count)], kind=LayerKind(group.kind), kv_heads=group.kv_heads,
        query_heads=group.query_heads, key_dim=group.key_dim, value_dim=group.value_dim, dtype=DType(group.dtype),
        softmax_scale=group.softmax_scale, softcap=group.softcap, rope_layout=RopeLayout(group.rope_layout),
        rope_theta=group.rope_theta, rotary_dim=group.rotary_dim, window_tokens=group.window_tokens)
