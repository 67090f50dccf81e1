"""The model as a cache of the sidecar describes it, from vLLM's configuration. Raises Refused for models that
cannot be served."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, NamedTuple

from pqcached import DType, LayerGroup

from .settings import Refused, Settings

_DTYPES = {"torch.float32": DType.F32, "torch.float16": DType.F16, "torch.bfloat16": DType.BF16}
# Keys of config.json that rows do not depend on.
_FILE_KEYS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


class Model(NamedTuple):
    """Layers of one shape, and the names of their rows."""

    group: LayerGroup  # layers numbered by their place in `layer_names`
    layer_names: List[str]
    fingerprint: str
    cache: str
    block_tokens: int


def _layer_number(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise Refused(f"layer {name}: has {len(numbers)} numbers, must have one")
    return numbers[0]


def _check(config: Any, kv_cache_config: Any) -> Any:
    """Returns the spec of all layers."""
    parallel = config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ != "FullAttentionSpec":
        raise Refused("the model has layers of several kinds; it must have full attention in all of them")
    if config.device_config.device_type != "cpu":
        raise Refused(f"device {config.device_config.device_type}; must be cpu")
    if config.speculative_config is not None:
        raise Refused("speculative decoding; must be off")
    if parallel.pipeline_parallel_size != 1 or getattr(parallel, "decode_context_parallel_size", 1) != 1:
        raise Refused("pipeline or context parallelism; both must be 1")
    if str(config.cache_config.cache_dtype) not in ("auto", str(config.model_config.dtype).split(".")[-1]):
        raise Refused(f"kv_cache_dtype {config.cache_config.cache_dtype}; must be auto")
    spec = groups[0].kv_cache_spec
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if window is not None:
        raise Refused(f"attention to the last {window} tokens; must be full")
    if spec.block_size % 16 != 0:
        raise Refused(f"block_size {spec.block_size}; must be a multiple of 16")
    return spec


def _fingerprint(config: Any, settings: Settings, dtype: DType) -> str:
    """Names everything that keys and values depend on, under the promise that equal names are equal weights."""
    model = config.model_config
    shape: Dict[str, Any] = {key: value for key, value in model.hf_config.to_dict().items() if key not in _FILE_KEYS}
    text = json.dumps(shape, sort_keys=True, default=str)
    if model.quantization is not None:
        text += f" {model.quantization}"
    if '"longrope"' in text:  # it has other factors for long contexts
        text += f" {model.max_model_len}"
    digest = hashlib.sha256(text.encode())
    name = settings.model or f"{model.model}@{model.revision}"
    digest.update(name.encode())
    return f"vllm {dtype.name} {digest.hexdigest()[:32]} {name[-150:]}"


def describe(config: Any, kv_cache_config: Any, settings: Settings, rank: int) -> Model:
    """rank: of tensor parallelism, each with a cache of its own."""
    spec = _check(config, kv_cache_config)
    names = sorted(kv_cache_config.kv_cache_groups[0].layer_names, key=_layer_number)
    if str(spec.dtype) not in _DTYPES:
        raise Refused(f"rows of {spec.dtype}; must be float32, float16 or bfloat16")
    dtype = _DTYPES[str(spec.dtype)]
    ranks = config.parallel_config.tensor_parallel_size
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    dim = int(spec.head_size)
    if dim % 8 != 0 or not 32 <= dim <= 256 or heads % spec.num_kv_heads != 0:
        raise Refused(f"{heads} query heads and {spec.num_kv_heads} of keys of {dim} dimensions; must be a multiple, and 32..256 in steps of 8")
    if settings.is_selecting and settings.index == "pq" and (dim % settings.subspaces != 0 or settings.subspaces > dim // 2):
        raise Refused(f"kv_connector_extra_config: subspaces: {settings.subspaces}, must divide {dim}, and be at most {dim // 2}")
    group = LayerGroup(list(range(len(names))), spec.num_kv_heads, heads, dim, dim, dtype)
    fingerprint = _fingerprint(config, settings, dtype)
    key = hashlib.sha256(f"{fingerprint} {group}".encode()).hexdigest()[:16]
    name = settings.cache or f"vllm-{key}"
    return Model(group, names, fingerprint, name if ranks == 1 else f"{name}-rank{rank}of{ranks}", spec.block_size)
