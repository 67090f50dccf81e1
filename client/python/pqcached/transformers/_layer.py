"""The layer of a PqcCache: it has a length, and no rows."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Optional, Tuple

import torch
from transformers.cache_utils import CacheLayerMixin

from ._hooks import LengthOf

if TYPE_CHECKING:
    from ._cache import PqcCache


class PqcLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer whose rows are in the sidecar. Made by PqcCache."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "PqcCache", number: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # the cache owns its layers
        self.number = number

    @property
    def cache(self) -> "PqcCache":
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Optional[torch.Tensor] = None,
                            value_states: Optional[torch.Tensor] = None) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Takes the rows of new tokens, [batch, kv_heads, tokens, dim], and returns the same tensors."""
        self.is_initialized = True
        self.cache.update_layer(self, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Tokens of all passes that have ended, padding included."""
        return self.cache.length

    def get_mask_sizes(self, query_length: Any) -> Tuple[int, int]:
        """query_length: a number of tokens, or before Transformers 5.4 their positions."""
        count = query_length if isinstance(query_length, int) else len(query_length)
        self.cache.abandon_pass()
        return LengthOf.make(self.cache.length + count, self.cache), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    # The cache itself does the following for all of its layers at once.
    def crop(self, *_: Any) -> None:
        pass

    def reset(self) -> None:
        pass

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        pass

    def batch_repeat_interleave(self, repeats: int) -> None:
        pass

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        pass

    def offload(self) -> None:
        pass

    def prefetch(self) -> None:
        pass
