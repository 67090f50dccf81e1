"""Differences between the versions of Transformers, and checks of the signatures that this package
relies on.

A version that has changed a hook is refused by the hook's name when the package registers itself,
before it can compute anything wrong.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, FrozenSet, NamedTuple, Optional, Tuple

from .._errors import Unimplemented


class Version(NamedTuple):
    """Properties of the versions from `first` on, up to the next entry of the table."""

    first: Tuple[int, int]
    mask_argument: str  # of get_mask_sizes: the new tokens' positions, or their number
    zero_crop_empties: bool  # crop(0) removes all tokens; otherwise none
    positive_crop: bool  # crop(n) keeps the first n tokens; otherwise it is refused


TABLE = (
    Version((4, 57), "cache_position", zero_crop_empties=True, positive_crop=True),
    Version((5, 4), "query_length", zero_crop_empties=True, positive_crop=True),
    Version((5, 14), "query_length", zero_crop_empties=False, positive_crop=True),
    Version((5, 19), "query_length", zero_crop_empties=False, positive_crop=False),
)


def version_of(text: str) -> Version:
    """Returns the entry for a version's text. Raises Unimplemented for one before the first entry."""
    numbers = (*(int(part) for part in text.split(".")[:2] if part.isdigit()), 0, 0)[:2]
    found = [entry for entry in TABLE if entry.first <= numbers]
    if not found or (5, 0) <= numbers < (5, 4):
        raise Unimplemented(f"transformers: version {text}; must be 4.57, or 5.4 or later")
    return found[-1]


def installed() -> Version:
    """Returns the entry for the installed version."""
    import transformers

    return version_of(transformers.__version__)


def _parameters(hook: Callable[..., Any]) -> FrozenSet[str]:
    return frozenset(inspect.signature(hook).parameters)


def _hooks() -> Dict[str, Tuple[Callable[..., Any], FrozenSet[str]]]:
    """The hooks, by name, each with the parameters that it must have in all versions."""
    from transformers import AttentionInterface, AttentionMaskInterface, cache_utils, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def names(text: str) -> FrozenSet[str]:
        return frozenset(text.split())

    cache, layer = cache_utils.Cache, cache_utils.CacheLayerMixin
    return {
        "AttentionInterface.register": (AttentionInterface.register, names("key value")),
        "AttentionMaskInterface.register": (AttentionMaskInterface.register, names("key value")),
        "sdpa_attention_forward": (sdpa_attention_forward, names(
            "module query key value attention_mask dropout scaling is_causal")),
        "sdpa_mask": (masking_utils.sdpa_mask, names(
            "batch_size kv_length kv_offset mask_function attention_mask local_size")),
        "causal_mask_function": (masking_utils.causal_mask_function, names("batch_idx head_idx q_idx kv_idx")),
        "Cache.update": (cache.update, names("key_states value_states layer_idx")),
        "Cache.get_seq_length": (cache.get_seq_length, names("layer_idx")),
        "Cache.reorder_cache": (cache.reorder_cache, names("beam_idx")),
        "Cache.batch_repeat_interleave": (cache.batch_repeat_interleave, names("repeats")),
        "Cache.batch_select_indices": (cache.batch_select_indices, names("indices")),
        "Cache.reset": (cache.reset, names("self")),
        "Cache.crop": (cache.crop, names("self")),
        "DynamicCache": (cache_utils.DynamicCache, names("config")),
        "CacheLayerMixin.update": (layer.update, names("key_states value_states")),
        "CacheLayerMixin.lazy_initialization": (layer.lazy_initialization, names("key_states")),
        "CacheLayerMixin.get_seq_length": (layer.get_seq_length, names("self")),
        "CacheLayerMixin.get_mask_sizes": (layer.get_mask_sizes, names("self")),
    }


def check(implemented: Any, version: Optional[Version] = None) -> None:
    """Checks the installed package against the table. implemented: the subclass of CacheLayerMixin.

    Raises Unimplemented, which names the hook that differs.
    """
    from transformers import cache_utils, masking_utils

    version = version or installed()
    hooks = _hooks()
    for name, (hook, required) in hooks.items():
        missing = required - _parameters(hook)
        if missing:
            raise Unimplemented(f"transformers: {name} has no parameter {', '.join(sorted(missing))} any more")
    for owner in ("Cache", "CacheLayerMixin"):
        if version.mask_argument not in _parameters(getattr(cache_utils, owner).get_mask_sizes):
            raise Unimplemented(f"transformers: {owner}.get_mask_sizes has no parameter {version.mask_argument}")
    queries = frozenset(["cache_position"] if version.mask_argument == "cache_position" else ["q_length", "q_offset"])
    missing = queries - _parameters(masking_utils.sdpa_mask)
    if missing:
        raise Unimplemented(f"transformers: sdpa_mask has no parameter {', '.join(sorted(missing))}")
    abstract: FrozenSet[str] = getattr(implemented, "__abstractmethods__", frozenset())
    if abstract:
        raise Unimplemented(f"transformers: CacheLayerMixin has new abstract methods: {', '.join(sorted(abstract))}")
