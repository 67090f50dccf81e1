"""The attention function and the mask function that Transformers calls.

A mask function is not given the cache, and neither is an attention function. The layer's
get_mask_sizes therefore returns a length that refers to its cache, which arrives in the mask
function unchanged; and the attention function must receive the very tensors that the last update()
of this thread has returned.
"""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Tuple

import torch

from .._errors import FailedPrecondition, Unimplemented
from . import _versions
from ._exact import batch_attention, sdpa

if TYPE_CHECKING:
    from ._cache import PqcCache

NAME = "pqcached"


class LengthOf(int):
    """A number of keys that refers to the cache that has them."""

    cache: "PqcCache"

    @staticmethod
    def make(length: int, cache: "PqcCache") -> "LengthOf":
        made = LengthOf(length)
        made.cache = cache
        return made


class Updated(NamedTuple):
    """The layer whose update() has returned, and whose attention is next."""

    cache: "PqcCache"
    layer: int
    key: torch.Tensor
    value: torch.Tensor


class _Thread(threading.local):
    updated: Optional[Updated] = None


_thread = _Thread()


def expect_attention(updated: Optional[Updated]) -> None:
    """Sets what the next call of the attention function in this thread is to receive."""
    _thread.updated = updated


def waits_for_attention(cache: "PqcCache") -> bool:
    """Returns whether the attention of the cache's last updated layer was not computed here."""
    return _thread.updated is not None and _thread.updated.cache is cache


def register(name: str = NAME) -> None:
    """Registers `name` as an attention implementation of Transformers, with its mask function.

    Raises Unimplemented for a version whose hooks differ from what this package relies on.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from ._layer import PqcLayer

    _versions.check(PqcLayer)
    AttentionInterface.register(name, attention_forward)
    AttentionInterface.register(f"paged|{name}", _refuse_continuous_batching)
    AttentionMaskInterface.register(name, causal_mask)
    NAMES.add(name)


NAMES = {NAME}


def _refuse_continuous_batching(*_: Any, **__: Any) -> Tuple[torch.Tensor, None]:
    raise Unimplemented(f"continuous batching: its paged cache cannot be served by {NAME!r}; use generate()")


def causal_mask(*arguments: Any, **named: Any) -> Optional[torch.Tensor]:
    """Mask function of the implementation: that of "sdpa", but for passes whose attention to stored
    tokens needs no mask.

    Raises Unimplemented for a static cache, and with a PqcCache for masks that are not causal and for
    padding that is not on the left.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if arguments:
        named = inspect.signature(sdpa_mask).bind(*arguments, **named).arguments
        named.update(named.pop("kwargs", {}))
    length = named["kv_length"]
    queries = int(named["q_length"]) if "q_length" in named else len(named["cache_position"])
    if not isinstance(length, LengthOf):
        offset = named.get("q_offset", 0) if "q_length" in named else int(named["cache_position"][0])
        if named.get("local_size") is None and int(length) > int(offset) + queries and named.get("mask_function", causal_mask_function) is causal_mask_function:
            raise Unimplemented("past_key_values: a static cache; this attention needs a PqcCache, or a DynamicCache")
        return sdpa_mask(**named)
    if named.get("mask_function", causal_mask_function) is not causal_mask_function:
        raise Unimplemented("mask_function: a PqcCache serves causal attention only")
    cache, named["kv_length"] = length.cache, int(length)
    past = cache.expect_pass(named["batch_size"], queries, named.get("attention_mask"))
    return sdpa_mask(**named) if past == 0 and queries > 1 else None


def attention_forward(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: Optional[torch.Tensor], *, scaling: Optional[float] = None,
                      **named: Any) -> Tuple[torch.Tensor, None]:
    """Attention function that Transformers calls per layer. query [batch, query_heads, tokens, dim];
    key and value as the layer's update() has returned them; returns [batch, tokens, query_heads,
    value_dim].
    """
    updated, _thread.updated = _thread.updated, None
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if updated is None:
        return exact(module, query, key, value, attention_mask, scaling, named), None
    if key is not updated.key or value is not updated.value:
        raise FailedPrecondition(
            f"{'key' if key is not updated.key else 'value'}: not the tensor that update() of layer {updated.layer} has "
            "returned; the model changes it in between, which a PqcCache cannot serve")
    if named.get("dropout"):
        raise Unimplemented("dropout: a PqcCache serves inference only")
    if named.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise Unimplemented("is_causal: a PqcCache serves causal attention only")
    if named.get("position_bias") is not None:
        raise Unimplemented("position_bias: a PqcCache serves attention without biases only")
    return updated.cache.attend(module, updated.layer, query, key, value, attention_mask, scaling, named), None


def exact(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor],
          scaling: float, named: Any) -> torch.Tensor:
    """Attention to the given keys alone: of a first pass, and of layers that are not stored."""
    if mask is None and key.shape[2] > query.shape[2] > 1:
        raise Unimplemented(f"attention_mask: None for {query.shape[2]} tokens and {key.shape[2]} keys")
    sinks, softcap = named.get("s_aux"), named.get("softcap")
    if sinks is None and not softcap:
        kept = {name: argument for name, argument in named.items() if name not in ("s_aux", "softcap")}
        return sdpa(module, query, key, value, mask, scaling=scaling, **kept)
    return batch_attention(query, key, value, mask, scaling, softcap, sinks)
