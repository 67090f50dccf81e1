"""Arguments of a step's calls that are described once."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple

import numpy as np

from . import _abi as abi
from ._arguments import uint32
from ._arrays import ArrayLike, Tensor, set_attention, tensor
from ._enums import LogBase
from ._errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class StepAttention:
    """Attention of all items, packed: the query tokens of all items, in order. Partial, over the selected tokens, unless
    Step.decode returns it."""

    output: Any  # [query_tokens, query_heads, value_dim]; zeros where nothing was selected
    lse: Any  # [query_tokens, query_heads]; -inf where nothing was selected
    counts: np.ndarray[Any, Any]  # uint32 [items]: selected tokens of each, per kv head


class PreparedAttention:
    """Arguments of Step.attend, attend_begin, attend_range, attend_positions and decode, described
    once for any number of calls, layers of one shape, and steps: without it, a call spends some 15 to
    30 microseconds on their description.

    Is passed in place of the queries, without `out`, `log_base`, keys and values:

        prepared = pqcached.PreparedAttention(queries, (output, lse), keys=keys, values=values)
        for layer in layers:
            ...  # write the layer's numbers to queries, keys and values
            step.decode(layer, prepared)
            ...  # read output

    queries, out, log_base: as in Step.attend. keys, values: as in Step.decode, and only for it.
    item_count: items of the steps. The arrays must keep their addresses and shapes as long as this
    object is used. Calls read them anew, overwrite `out`, and return `attention`, whose counts are
    those of the last call. One call at a time, and not in a step on a GPU.

    Raises what Step.attend raises for such arrays.
    """

    __slots__ = ("attention", "shape", "queries", "keys", "values", "c")

    attention: StepAttention  # refers to `out`
    shape: Tuple[int, int, int]  # query tokens, query_heads, value_dim
    queries: Tensor
    keys: Optional[Tensor]
    values: Optional[Tensor]

    def __init__(self, queries: ArrayLike, out: Tuple[Any, Any], *, keys: Optional[ArrayLike] = None,
                 values: Optional[ArrayLike] = None, item_count: int = 1, log_base: LogBase = LogBase.NATURAL) -> None:
        output, lse = out
        shape = tensor("output", output).shape
        if len(shape) != 3:
            raise InvalidArgument.about("output.shape", f"{shape}, must be [query_tokens, query_heads, value_dim]")
        self.shape = shape[0], shape[1], shape[2]
        self.queries = tensor("queries", queries)
        self.keys = None if keys is None else tensor("keys", keys)
        self.values = None if values is None else tensor("values", values)
        self.attention = StepAttention(output, lse, np.empty(uint32("item_count", item_count), np.uint32))
        self.c = abi.StepAttention(counts=self.attention.counts.ctypes.data)
        set_attention(self.c, output, lse, self.shape, False, log_base)

    def check(self, shape: Tuple[int, int, int], item_count: int) -> None:
        """Raises InvalidArgument for a call that writes an attention of another shape."""
        if self.shape != shape:
            raise InvalidArgument.about("output.shape", f"{self.shape}, must be {shape}")
        if self.attention.counts.size != item_count:
            raise InvalidArgument.about("item_count", f"{self.attention.counts.size}, but the step has {item_count} items")
