"""Steps: one decode position over all layers for a batch of sequences; and the decoder, which wraps
them for one sequence.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
from ctypes import byref
from typing import TYPE_CHECKING, Any, Callable, List, Mapping, NamedTuple, Optional, Sequence as SequenceOf, Tuple

import numpy as np

from . import _abi as abi
from ._arguments import member, uint32, uint64
from ._arrays import ArrayLike, Tensor, floats_to_write, integers, new_array, position_lists_to_read, set_attention, tensor
from ._enums import HeadRule, LogBase
from ._errors import FailedPrecondition, InvalidArgument
from ._handle import Closable, Handle
from ._library import check, clear_error_text, error_of
from ._names import TokenNames, pointer_to, row_options, step_options
from ._options import Selection
from ._prepared import PreparedAttention, StepAttention

if TYPE_CHECKING:
    from ._sequence import Sequence


# Layer -> (keys, values); keys is None for a layer of LayerKind.VALUES.
LayerArrays = Mapping[int, Tuple[Optional[ArrayLike], ArrayLike]]


class StepItem(NamedTuple):
    """A sequence's part in a step."""

    sequence: "Sequence"
    query_position: int  # of its first query token, whose row Step.end appends
    query_length: int = 1  # 1..8: more than one is a speculation


@dataclasses.dataclass(frozen=True)
class StepPages:
    """Selected pages of all items, as entries of their block tables."""

    pages: np.ndarray[Any, Any]  # int32 [items, kv_heads or 1, capacity], each ascending, then -1
    lengths: np.ndarray[Any, Any]  # uint32 [items]: pages in each list of an item


def layer_rows(layers: LayerArrays,
               describe: Callable[[str, ArrayLike], Tensor] = tensor) -> Tuple[Any, List[Any]]:
    """Returns the rows by layer as the library expects them, and the objects that keep their memory
    alive. describe: tensor, or tensor_to_fill for rows that a call writes.
    """
    rows, held = (abi.LayerRows * len(layers))(), []
    for row, (layer, (keys, values)) in zip(rows, layers.items()):
        row.struct_size, row.layer = ctypes.sizeof(abi.LayerRows), uint32("layer", layer)
        if keys is not None:
            held.append(describe(f"layers[{layer}].keys", keys))
            row.keys = held[-1].c
        held.append(describe(f"layers[{layer}].values", values))
        row.values = held[-1].c
    return rows, held


def query_samples(layer: int, positions: SequenceOf[int], queries: ArrayLike) -> Tuple[Any, List[Any]]:
    """Returns the samples as the library expects them, and the objects that keep their memory alive."""
    numbers = (ctypes.c_uint64 * len(positions))(*[uint64("positions", position) for position in positions])
    rows = tensor("queries", queries)
    samples = abi.QuerySamples()
    samples.layer, samples.positions, samples.position_count, samples.queries = uint32("layer", layer), numbers, len(numbers), rows.c
    return samples, [numbers, rows]


class Step(Closable):
    """One decode step. Made by Client.begin_step; ended by end(), abandoned by close() or the end
    of `with`.

    On the local path no call of a step waits for an RPC. The step's results are valid only when
    end() raises nothing. One thread per step; several steps of different sequences may run at once.
    """

    def __init__(self, library: Any, client: Handle, items: SequenceOf[StepItem], selection: Optional[Selection],
                 timeout_ms: int, flags: int = 0, begin: Optional[Callable[..., int]] = None) -> None:
        self._library = library
        self._items = [StepItem(*item) for item in items]  # keeps the sequences alive
        self._selection = selection
        self._selects_per_token = bool(flags & abi.PQC_STEP_SELECT_PER_TOKEN)
        if not self._items:
            raise InvalidArgument("items: must not be empty")
        c_items = (abi.StepItem * len(self._items))()
        options = abi.StepOptions(timeout_ms=timeout_ms, flags=flags)
        if selection is not None:
            options.selection = ctypes.pointer(selection.c())
        handle = ctypes.c_void_p()
        with contextlib.ExitStack() as calls:
            for i, (c_item, item) in enumerate(zip(c_items, self._items)):
                c_item.struct_size = ctypes.sizeof(abi.StepItem)
                c_item.sequence = calls.enter_context(item.sequence._handle)
                c_item.query_position = uint64(f"items[{i}].query_position", item.query_position)
                c_item.query_length = uint32(f"items[{i}].query_length", item.query_length)
            pointer = calls.enter_context(client)
            check((begin or library.pqc_step_begin)(pointer, c_items, len(c_items), byref(options), byref(handle)))
        assert handle.value
        self.query_tokens = sum(max(1, item.query_length) for item in self._items)
        # buffers of an asynchronous attention; the last close waits for it
        self._async_buffers: List[Any] = []
        beside = self._async_buffers

        def abandon(step: int) -> None:
            library.pqc_step_abandon(step)
            beside.clear()

        self._own(Handle("step", handle.value, abandon, client), at_exit=True)

    def _terms(self, selection: Optional[Selection]) -> Any:
        return None if selection is None else byref(selection.c())

    def topk(self, layer: int, queries: ArrayLike, selection: Optional[Selection] = None) -> List[np.ndarray[Any, Any]]:
        """Returns the positions for each item, uint32 [kv_heads, count], ascending; for engines
        with their own paged kernels. With select_per_token: [query tokens of the item, kv_heads,
        count]. With GroupRule.PER_QUERY_HEAD, query_heads takes the place of kv_heads.

        queries: [query_tokens of all items, query_heads, key_dim].
        """
        group = self._items[0].sequence._group(layer)
        borrowed, terms = tensor("queries", queries), self._terms(selection)
        bound = selection or self._selection
        sets = group.kv_heads if bound is None else bound.set_count(group)
        shapes = [(max(1, item.query_length), sets) if self._selects_per_token else (sets,)
                  for item in self._items]
        capacity = 0 if bound is None else sum(
            math.prod(shape) * bound.max_tokens(item.query_position + 1) for shape, item in zip(shapes, self._items))
        offsets, counts = np.empty(len(self._items), np.uint64), np.empty(len(self._items), np.uint32)
        out = abi.StepPositions(offsets=offsets.ctypes.data, counts=counts.ctypes.data)
        while True:
            positions = new_array((capacity,), np.uint32)
            out.positions, out.capacity = positions.ctypes.data, capacity
            with self._handle as step:
                status = self._library.pqc_step_topk(step, uint32("layer", layer), byref(borrowed.c), terms, byref(out))
                if status != 0 and out.count <= capacity:
                    raise error_of(status)
            if status == 0:
                break
            capacity = out.count
        return [positions[int(begin):int(begin) + math.prod(shape) * int(count)].reshape(*shape, int(count))
                for begin, count, shape in zip(offsets, counts, shapes)]

    def topk_pages(self, layer: int, queries: ArrayLike, page_tokens: int, selection: Optional[Selection] = None, *,
                   heads: HeadRule = HeadRule.EACH, with_sink: bool = False, with_window: bool = False) -> StepPages:
        """Returns the pages of page_tokens (16, 32, 64) tokens with the best candidates of each item,
        for engines with a page table: page n holds the tokens [n page_tokens, (n + 1) page_tokens).

        heads: whether each kv head has a list, or one list is selected by scores joined over them.
        with_sink, with_window: the pages of sink and window are in every list too. On a GPU:
        GpuStep.topk_pages_on_gpu.
        """
        borrowed, terms = tensor("queries", queries), self._terms(selection)
        flags = (abi.PQC_PAGES_WITH_SINK if with_sink else 0) | (abi.PQC_PAGES_WITH_WINDOW if with_window else 0)
        options = abi.PageOptions(page_tokens=uint32("page_tokens", page_tokens), heads=member(HeadRule, "heads", heads),
                                  flags=flags)
        lengths = np.zeros(len(self._items), np.uint32)  # of empty lists: one call suffices
        out = abi.StepPages(lengths=lengths.ctypes.data)

        def call() -> None:
            with self._handle as step:
                check(self._library.pqc_step_topk_pages(step, uint32("layer", layer), byref(borrowed.c), terms,
                                                        byref(options), byref(out)))

        call()
        pages = new_array((len(self._items), out.list_count, out.needed), np.int32)
        if pages.size:
            out.pages, out.capacity = pages.ctypes.data, out.needed
            call()
        return StepPages(pages, lengths)

    def attend(self, layer: int, queries: ArrayLike, selection: Optional[Selection] = None, *,
               out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Returns the attention over the selected tokens of all items, to be merged with that over
        their sinks and windows.

        queries: as in topk. out: (output, lse) to write to, of StepAttention's shapes: writable
        numpy arrays or torch tensors on the CPU of any strides, of float32, float16 or bfloat16.
        log_base: of lse. A PreparedAttention may replace queries, out and log_base.
        """
        borrowed, attention, found = self._attention(layer, queries, out, log_base)
        with self._handle as step:
            check(self._library.pqc_step_attend(step, uint32("layer", layer), byref(borrowed.c),
                                                self._terms(selection), byref(attention)))
        return found

    def attend_range(self, layer: int, queries: ArrayLike, ranges: SequenceOf[Tuple[int, int]], *,
                     out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Returns the exact attention over the tokens ranges[i] = (begin, end) of each item, causally
        and without an index or selection; waits until they are stored.

        A range may be empty, and must not go beyond the item's query_position. queries, out,
        log_base: as in attend. counts: the length of each range.
        """
        if len(ranges) != len(self._items):
            raise InvalidArgument(f"ranges: {len(ranges)} of them, but the step has {len(self._items)} items")
        c_ranges = (abi.TokenRange * len(ranges))(
            *[abi.TokenRange(uint64("ranges.begin", begin), uint64("ranges.end", end)) for begin, end in ranges])
        borrowed, attention, found = self._attention(layer, queries, out, log_base)
        with self._handle as step:
            check(self._library.pqc_step_attend_range(step, uint32("layer", layer), byref(borrowed.c), c_ranges,
                                                      byref(attention)))
        return found

    def decode(self, layer: int, queries: ArrayLike, keys: Optional[ArrayLike] = None,
               values: Optional[ArrayLike] = None, selection: Optional[Selection] = None, *,
               out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Returns the complete attention of one layer over sinks, selected tokens and windows of all
        items, the step's tokens included.

        keys, values: rows of the step's tokens, [query_tokens of all items, kv_heads, dim]; they are
        kept for end(), which takes no rows of this layer. A layer is decoded once in a step. Each
        query token attends to the window before the item's first token, and to the item's tokens up
        to itself; the tokens of a speculation share a selection, unless the step has
        select_per_token.
        queries, out, log_base: as in attend; the lse of `out` may be None. A PreparedAttention of
        queries, keys and values replaces all of these.
        """
        borrowed, attention, found = self._attention(layer, queries, out, log_base)
        if isinstance(queries, PreparedAttention):
            if keys is not None or values is not None:
                raise InvalidArgument.about("keys" if keys is not None else "values",
                                            "must not be given with a PreparedAttention, which has them")
            keys, values = queries.keys, queries.values
        if keys is None or values is None:
            raise InvalidArgument.about("keys" if keys is None else "values", "must not be None")
        k, v = tensor("keys", keys), tensor("values", values)
        with self._handle as step:
            check(self._library.pqc_step_decode(step, uint32("layer", layer), byref(borrowed.c), byref(k.c),
                                                byref(v.c), self._terms(selection), byref(attention)))
        return found

    def attend_positions(self, layer: int, queries: Optional[ArrayLike], positions: Any,
                         lengths: Optional[Any] = None, *, logits: Optional[ArrayLike] = None,
                         out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Returns the attention over positions that the engine gives, without an index or selection;
        waits until they are stored.

        positions: integers [items, kv_heads, capacity], or [items, query_heads, capacity], or
        [items, capacity] of one list for all heads, in any order, padded with -1, each below its item's query_position. A repeated
        position counts once. lengths: of the lists, [items, lists]; None = up to the first -1.
        queries, out, log_base: as in attend. counts: different positions in each item's longest list.

        logits: [query_tokens, query_heads, capacity], in place of the queries, which may be None:
        scaled and softcapped logits of the positions, for an engine that keeps the keys itself
        (KCache, arXiv 2404.18057). Only values are read. Lists must ascend; -inf leaves a position
        out for one query head. The weights are normalised over the list: without renormalisation,
        multiply the output by exp(lse - lse_all), with the log-sum-exp of the logits of all keys.
        """
        chosen = position_lists_to_read("lists.positions", positions, len(self._items))
        lists = abi.PositionLists(positions=np.ctypeslib.as_ctypes(chosen.reshape(-1)) if chosen.size else None,
                                  list_count=chosen.shape[1], capacity=chosen.shape[2])
        if lengths is not None:
            counts = np.ascontiguousarray(integers("lists.lengths", lengths).reshape(-1), dtype=np.uint32)
            if counts.size != len(self._items) * chosen.shape[1]:
                raise InvalidArgument.about("lists.lengths", f"{counts.size} of them, must be [items, lists]")
            lists.lengths = np.ctypeslib.as_ctypes(counts)
        scores = None if logits is None else tensor("lists.logits", logits)
        if scores is not None:
            lists.logits = ctypes.pointer(scores.c)
            if not isinstance(queries, PreparedAttention):  # which also has the place of the output
                queries = scores
        elif queries is None:
            raise InvalidArgument.about("queries", "must not be None without logits")
        borrowed, attention, found = self._attention(layer, queries, out, log_base)
        with self._handle as step:
            check(self._library.pqc_step_attend_positions(step, uint32("layer", layer), byref(borrowed.c), byref(lists),
                                                          byref(attention)))
        return found

    def attend_begin(self, layer: int, queries: ArrayLike, selection: Optional[Selection] = None, *,
                     out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> None:
        """Like attend, but on other threads, concurrently with the engine's own work; attend_wait
        returns the result. One at a time.

        `queries` and `out` must stay unchanged until then.
        """
        borrowed, attention, found = self._attention(layer, queries, out, log_base)
        with self._handle as step:
            check(self._library.pqc_step_attend_begin(step, uint32("layer", layer), byref(borrowed.c),
                                                      self._terms(selection), byref(attention)))
            self._async_buffers[:] = [found, borrowed, attention, selection]

    def attend_wait(self) -> StepAttention:
        """Raises FailedPrecondition if attend_begin was not called, and what the attention raised.
        """
        with self._handle as step:
            status = self._library.pqc_step_attend_wait(step)
            found = self._async_buffers[0] if self._async_buffers else None
            self._async_buffers.clear()
            check(status)
        assert isinstance(found, StepAttention)
        return found

    def check(self) -> None:
        """Raises when something that the step has read so far was not valid: without an error, its
        results may be used before end().
        """
        with self._handle as step:
            check(self._library.pqc_step_check(step))

    def _attention(self, layer: int, queries: ArrayLike, out: Optional[Tuple[Any, Any]],
                   log_base: LogBase) -> Tuple[Any, abi.StepAttention, StepAttention]:
        group = self._items[0].sequence._group(layer)
        shape = (self.query_tokens, group.query_heads, group.value_dim)
        if isinstance(queries, PreparedAttention):
            if out is not None or log_base != LogBase.NATURAL:
                raise InvalidArgument.about("out" if out is not None else "log_base",
                                            "must not be given with a PreparedAttention, which has one")
            queries.check(shape, len(self._items))
            return queries.queries, queries.c, queries.attention
        output, lse = (new_array(shape, np.float32), np.empty(shape[:2], np.float32)) if out is None else out
        found = StepAttention(output, lse, np.empty(len(self._items), np.uint32))
        attention = abi.StepAttention(counts=found.counts.ctypes.data)
        set_attention(attention, output, lse, shape, False, log_base)
        return tensor("queries", queries), attention, found

    def end(self, layers: Optional[LayerArrays] = None,
            accepted: Optional[SequenceOf[int]] = None,
            names: Optional[SequenceOf[Optional[TokenNames]]] = None) -> None:
        """Appends the rows of the new tokens and closes the step, even if it raises.

        layers: every stored layer that was not decoded -> (keys, values), [query_tokens of all
        items, kv_heads, dim]; they are copied. accepted: number of each item's query tokens to keep; None = all. The
        others are rolled back. names: names of tokens of each item's sequence, or None; names of
        query tokens that are not kept have no effect.

        Raises Unavailable or Aborted when the step's results must not be used.
        """
        try:
            rows, held = layer_rows(layers or {})
            kept = None
            if accepted is not None:
                if len(accepted) != len(self._items):
                    raise InvalidArgument(f"accepted: {len(accepted)} numbers, but the step has {len(self._items)} items")
                kept = (ctypes.c_uint32 * len(accepted))(*[uint32("accepted", count) for count in accepted])
            options = step_options(names, len(self._items))
        except BaseException:
            self.close()
            raise

        def end(step: int) -> int:
            status: int = self._library.pqc_step_end_with(step, rows, len(rows), kept, options)
            held.clear()
            self._async_buffers.clear()
            return status

        clear_error_text()
        if self._handle.closed:
            raise FailedPrecondition("step: it is closed")
        status = self._handle.close(end)
        if status is None:
            raise FailedPrecondition("step: another thread is using it")
        check(status)


class Decoder(Closable):
    """Prefills each layer, then decodes token by token, layer by layer in ascending order. Made by
    Sequence.decoder.

    Its attention is complete: over sink, selected tokens and window.
    The first decode builds the missing part of the sequence's index.
    """

    def __init__(self, sequence: "Sequence", selection: Selection) -> None:
        self._sequence = sequence
        self._library = sequence._library
        handle = ctypes.c_void_p()
        with sequence._handle as pointer:
            check(self._library.pqc_decoder_open(pointer, byref(selection.c()), byref(handle)))
        assert handle.value
        self._own(Handle("decoder", handle.value, self._library.pqc_decoder_close, sequence._handle), at_exit=True)

    def prefill(self, layer: int, keys: ArrayLike, values: ArrayLike, *, names: Optional[TokenNames] = None) -> None:
        """Stores K and V [tokens, kv_heads, dim] of the next tokens of a layer. names: of any tokens
        of the sequence; they need to be given with one layer only.

        Raises FailedPrecondition after decoding has begun.
        """
        k, v = tensor("keys", keys), tensor("values", values)
        options = row_options(names)
        with self._sequence._handle, self._handle as decoder:
            check(self._library.pqc_decoder_prefill_with(decoder, uint32("layer", layer), byref(k.c), byref(v.c),
                                                         pointer_to(options)))

    def decode(self, layer: int, query: ArrayLike, key: ArrayLike, value: ArrayLike, *, out: Optional[Any] = None,
               names: Optional[TokenNames] = None) -> Any:
        """Returns the attention of the next token over sink, window and selected tokens, itself
        included: float32 [query_heads, value_dim].

        query [query_heads, key_dim], key [kv_heads, key_dim], value [kv_heads, value_dim]. out: a
        contiguous writable float32 array to write to. A token that failed may be decoded again,
        from its first layer on. names: of any tokens of the sequence, recorded with the token.

        Raises InvalidArgument for a layer that is not the next one.
        """
        group = self._sequence._group(layer)
        shape = (group.query_heads, group.value_dim)
        output = new_array(shape, np.float32) if out is None else out
        address = floats_to_write("out", output, shape)
        q, k, v = tensor("query", query), tensor("key", key), tensor("value", value)
        options = row_options(names)
        with self._sequence._handle, self._handle as decoder:
            check(self._library.pqc_decoder_decode_with(decoder, uint32("layer", layer), byref(q.c), byref(k.c),
                                                        byref(v.c), pointer_to(options), address, shape[0] * shape[1]))
        return output
