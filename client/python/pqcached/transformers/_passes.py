"""One pass of the model over new tokens: by a step, or exact."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch

from .._errors import Aborted
from .._options import merge_tensors
from .._arrays import Tensor
from .._prepared import PreparedAttention
from .._steps import Step, StepItem
from . import _exact, _hooks

if TYPE_CHECKING:
    from ._cache import PqcCache

STEP_TOKENS = 8  # query tokens of an item of a step, at most
RANGE_TOKENS = 4096  # query tokens of a call of attend_range
_RETRY_SECONDS = 0.001


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


class Input:
    """An input of a step's calls. It refers to the model's own tensor where that has the shape of a packed one, and
    otherwise to a copy.
    """

    def __init__(self, batch: int, tokens: int, tensor: torch.Tensor) -> None:
        _, heads, _, dim = tensor.shape
        self._copy = torch.empty(batch * tokens, heads, dim, dtype=tensor.dtype)
        self._view = self._copy.view(batch, tokens, heads, dim)
        self._row = 2 if batch == 1 else 0  # the dimension of the packed tokens
        self._is_plain = batch == 1 or tokens == 1
        self._strides: Optional[Tuple[int, ...]] = None  # of the tensors that `borrowed` refers to
        self.borrowed = Tensor(self._copy)
        self._held: Optional[torch.Tensor] = None
        self._refers_to_copy = True

    def set(self, tensor: torch.Tensor) -> None:
        """Takes a tensor [batch, heads, tokens, dim], which stays alive until the next one comes."""
        if not self._is_plain or tensor.dtype is not self._copy.dtype or tensor.device.type != "cpu":
            self._view.copy_(tensor.detach().transpose(1, 2))
            if not self._refers_to_copy:
                self._refer(self._copy, self._copy.stride())
            self._held, self._refers_to_copy = None, True
            return
        strides = tensor.stride()
        if strides != self._strides or self._held is None:
            self._strides = strides
            self._refer(tensor, (strides[self._row], strides[1], strides[3]))
        self.borrowed.c.ptr = tensor.data_ptr()
        self._held, self._refers_to_copy = tensor, False

    def release(self) -> None:
        self._held = None

    def _refer(self, tensor: torch.Tensor, strides: Tuple[int, ...]) -> None:
        self.borrowed.c.ptr = tensor.data_ptr()
        self._c_strides = (ctypes.c_int64 * 3)(*strides)
        self.borrowed.c.strides = self._c_strides


class Buffers:
    """Arguments of a step's calls, described once."""

    def __init__(self, batch: int, tokens: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        count, heads, value_dim = batch * tokens, query.shape[1], value.shape[3]
        self.shape, self.dtype = (batch, tokens), query.dtype
        self._inputs = [Input(batch, tokens, each) for each in (query, key, value)]
        self.output = torch.empty(count, heads, value_dim)
        self.lse = torch.empty(count, heads)
        self.shaped = self.output.view(batch, tokens, heads, value_dim)
        borrowed = [each.borrowed for each in self._inputs]
        self.prepared = PreparedAttention(borrowed[0], (self.output, self.lse), keys=borrowed[1], values=borrowed[2], item_count=batch)

    def fill(self, *tensors: torch.Tensor) -> None:
        """Takes query, key and value [batch, heads, tokens, dim]."""
        for each, tensor in zip(self._inputs, tensors):
            each.set(tensor)

    def release(self) -> None:
        """Ends references to the model's tensors."""
        for each in self._inputs:
            each.release()

    def fits(self, batch: int, tokens: int, query: torch.Tensor) -> bool:
        return self.shape == (batch, tokens) and self.dtype == query.dtype


class Pass:
    """A pass over `tokens` tokens, which has reached layer number `done` of the cache's layers."""

    def __init__(self, cache: "PqcCache", tokens: int) -> None:
        self.cache, self.tokens, self.done = cache, tokens, 0

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Takes the rows of a layer."""

    def attend(self, module: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               mask: Optional[torch.Tensor], scaling: float, named: Any) -> torch.Tensor:
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the pass after its last layer."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Ends the pass so that the sequences have no row of it, or can do without it later."""
        raise NotImplementedError


class StepPass(Pass):
    """A pass over 1 to 8 tokens behind stored ones: one step for the batch."""

    def __init__(self, cache: "PqcCache", tokens: int) -> None:
        super().__init__(cache, tokens)
        cache.advance_indexes()
        items = [StepItem(row.sequence, cache.length - row.pad, tokens) for row in cache.rows if row.sequence is not None]
        self._step = self._begin(items)

    def _begin(self, items: List[StepItem]) -> Step:
        cache = self.cache
        end = time.monotonic() + cache.retry_seconds
        while True:
            try:
                return cache.client.begin_step(items, cache.step_selection, exact_until_indexed=True,
                                               select_per_token=self.tokens > 1)
            except Aborted:  # the first moment of a build has the sequence
                if time.monotonic() > end or all(row.build is None for row in cache.rows):
                    raise
                time.sleep(_RETRY_SECONDS)

    def attend(self, module: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               mask: Optional[torch.Tensor], scaling: float, named: Any) -> torch.Tensor:
        buffers = self.cache.buffers
        if buffers is None or not buffers.fits(query.shape[0], self.tokens, query):
            buffers = self.cache.buffers = Buffers(query.shape[0], self.tokens, query, key, value)
        buffers.fill(query, key, value)
        self._step.decode(layer, buffers.prepared)
        sinks = named.get("s_aux")
        output = buffers.shaped if sinks is None else _exact.with_sinks(buffers.output, buffers.lse, sinks).view(buffers.shaped.shape)
        if query.dtype is torch.float32 and query.device.type == "cpu":
            return output.clone()
        return output.to(device=query.device, dtype=query.dtype)

    def finish(self) -> None:
        if self.cache.buffers is not None:
            self.cache.buffers.release()
        self._step.end()
        for row in self.cache.rows:
            row.passed = self.cache.length + self.tokens - row.pad

    def abandon(self) -> None:
        self._step.close()


class ExactPass(Pass):
    """A pass with exact attention: a first one, or one over many tokens behind stored ones."""

    def __init__(self, cache: "PqcCache", tokens: int) -> None:
        super().__init__(cache, tokens)
        self.past = cache.length
        # The place of each row's first new token in the pass, and its position in its sequence.
        self._begins = [min(tokens, max(0, row.pad - self.past)) for row in cache.rows]
        self._firsts = [max(0, self.past - row.pad) for row in cache.rows]
        self._kept: List[Dict[int, Tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in cache.rows]
        for row, begin, first in zip(cache.rows, self._begins, self._firsts):
            if row.sequence is not None:
                row.truncate(first)
            if row.sequence is None and begin < tokens:
                cache.create(row, tokens - begin)
            elif row.sequence is not None:
                row.sequence.flush()

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for i, (row, begin, first) in enumerate(zip(self.cache.rows, self._begins, self._firsts)):
            if begin == self.tokens:
                continue
            assert row.sequence is not None
            rows = tuple(on_host(each[i, :, begin:]).transpose(0, 1) for each in (key, value))
            if row.has_decoded:
                self._kept[i][layer] = rows[0], rows[1]
            else:
                row.sequence.ingest(layer, first, rows[0], rows[1])

    def attend(self, module: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               mask: Optional[torch.Tensor], scaling: float, named: Any) -> torch.Tensor:
        if self.past == 0:
            return _hooks.exact(module, query, key, value, mask, scaling, named)
        batch, heads, tokens, _ = query.shape
        result = query.new_zeros(batch, tokens, heads, value.shape[3])
        for i, begin in enumerate(self._begins):
            if begin < tokens:
                output, lse = _exact.attention(query[i, :, begin:].detach(), key[i, :, begin:].detach(),
                                               value[i, :, begin:].detach(), scaling, softcap=named.get("softcap"))
                output, lse = self._with_stored(i, layer, query[i, :, begin:], output.cpu(), lse.cpu())
                result[i, begin:] = _exact.with_sinks(output, lse, named.get("s_aux")).to(result)
        return result

    def _with_stored(self, i: int, layer: int, query: torch.Tensor, output: torch.Tensor,
                     lse: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Merges the attention to the stored tokens of row i into that to the new ones."""
        sequence, first = self.cache.rows[i].sequence, self._firsts[i]
        assert sequence is not None
        queries = on_host(query).transpose(0, 1)
        for begin in range(0, len(queries) if first else 0, RANGE_TOKENS):
            part = slice(begin, begin + RANGE_TOKENS)
            stored = torch.empty_like(output[part]), torch.empty_like(lse[part])
            sequence.attend_range(layer, first + begin, queries[part], (0, first), out=stored)
            merge_tensors(output[part], lse[part], *stored)
        return output, lse

    def finish(self) -> None:
        for row, begin, first, kept in zip(self.cache.rows, self._begins, self._firsts, self._kept):
            if row.sequence is not None:
                if kept:
                    row.sequence.enqueue_rows(first, kept)
                row.passed = first + self.tokens - begin

    def abandon(self) -> None:
        for row, first in zip(self.cache.rows, self._firsts):
            ids, row.passed = row.ids, row.passed + 1  # some layers may have rows behind it
            row.truncate(first)
            row.ids = ids
