"""Prefill and steps whose arrays are on a GPU: torch's, cupy's or any with DLPack."""

from __future__ import annotations

import ctypes
import dataclasses
from ctypes import byref
from typing import TYPE_CHECKING, Any, Optional, Sequence as SequenceOf, Tuple

import numpy as np

from . import _abi as abi
from ._arguments import member, uint32, uint64
from ._arrays import ArrayLike, device_floats, device_uint32s, device_uint64s, tensor
from ._enums import Device, HeadRule, LogBase
from ._errors import InvalidArgument
from ._handle import Closable, Handle
from ._library import check
from ._names import TokenNames, pointer_to, row_options
from ._options import Partials, Selection, from_c
from ._prepared import StepAttention
from ._steps import Step, StepItem, query_samples

if TYPE_CHECKING:
    from ._client import Cache
    from ._sequence import Sequence


@dataclasses.dataclass(frozen=True)
class GpuCounts:
    hits: int  # rows found in the block cache
    misses: int  # rows read from the sidecar's memory
    loaded: int  # blocks of 128 rows copied into the block cache
    evicted: int
    device_bytes: int  # reserved on the device
    locked_bytes: int  # page-locked part of the sidecar's memory so far
    generation: int  # grows when captured graphs have to be captured again
    has_staged_rows: int  # 1: the host copies some rows in the middle of steps
    resident_layers: int  # layers whose codes stay on the device


class GpuStep(Step):
    """A Step that runs on a CUDA stream. Made by Gpu.begin_step.

    attend, attend_range, attend_positions, decode, topk_on_gpu and topk_pages_on_gpu return when their work is
    launched; end waits for it, and takes rows on the device or on the host. They raise Unimplemented
    for a log_base other than natural.
    """

    def attend(self, layer: int, queries: ArrayLike, selection: Optional[Selection] = None, *,
               out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Like Step.attend, into `out`: (output, lse), contiguous float32 on the device. Uses the
        step's selection.
        """
        if out is None or selection is not None:
            raise InvalidArgument.about("out", "must be arrays on the device, and selection None, in a step on a GPU")
        attention, held = self._device_attention(layer, out, log_base)
        found = StepAttention(out[0], out[1], np.empty(len(self._items), np.uint32))
        attention.counts = found.counts.ctypes.data
        borrowed = tensor("queries", queries)
        with self._handle as step:
            check(self._library.pqc_step_attend(step, uint32("layer", layer), byref(borrowed.c), None,
                                                byref(attention)))
        del held
        return found

    def decode(self, layer: int, queries: ArrayLike, keys: Optional[ArrayLike] = None,
               values: Optional[ArrayLike] = None, selection: Optional[Selection] = None, *,
               out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Like Step.decode, with all arrays on the device, in a step that began with decodes=True.
        keys and values have contiguous dims; `out` is as in attend, and its lse may be None. Uses
        the step's selection.

        end() raises InvalidArgument when keys or values have NaN or infinity.
        """
        if out is None or selection is not None:
            raise InvalidArgument.about("out", "must be arrays on the device, and selection None, in a step on a GPU")
        if keys is None or values is None:
            raise InvalidArgument.about("keys" if keys is None else "values", "must not be None")
        attention, held = self._device_attention(layer, out, log_base)
        found = StepAttention(out[0], out[1], np.empty(len(self._items), np.uint32))
        attention.counts = found.counts.ctypes.data
        borrowed, k, v = tensor("queries", queries), tensor("keys", keys), tensor("values", values)
        with self._handle as step:
            check(self._library.pqc_step_decode(step, uint32("layer", layer), byref(borrowed.c), byref(k.c),
                                                byref(v.c), None, byref(attention)))
        del held
        return found

    def attend_range(self, layer: int, queries: ArrayLike, ranges: Any, *,
                     out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Like Step.attend_range, with all arrays on the device: ranges are 64-bit integers [items, 2],
        begin and end, and `out` is as in attend.

        The returned counts are empty: only the device knows them. end() raises InvalidArgument when
        a range was out of range.
        """
        if out is None:
            raise InvalidArgument.about("out", "must be arrays on the device in a step on a GPU")
        at, held_ranges = device_uint64s("ranges", ranges, (len(self._items), 2))
        attention, held = self._device_attention(layer, out, log_base)
        borrowed = tensor("queries", queries)
        with self._handle as step:
            check(self._library.pqc_step_attend_range(step, uint32("layer", layer), byref(borrowed.c),
                                                      ctypes.cast(at, ctypes.POINTER(abi.TokenRange)),
                                                      byref(attention)))
        del held, held_ranges
        return StepAttention(out[0], out[1], np.empty(0, np.uint32))

    def attend_positions(self, layer: int, queries: Optional[ArrayLike], positions: Any,
                         lengths: Optional[Any] = None, *, logits: Optional[ArrayLike] = None,
                         out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> StepAttention:
        """Like Step.attend_positions, with all arrays on the device: positions and lengths are 32-bit
        integers, contiguous, of at most selected_capacity positions in a list, and `out` is as in
        attend.

        The returned counts are empty: only the device knows them. end() raises InvalidArgument when
        a position or a length was out of range, or a list with logits does not ascend.
        """
        if logits is None and queries is None:
            raise InvalidArgument.about("queries", "must not be None without logits")
        if out is None:
            raise InvalidArgument.about("out", "must be arrays on the device in a step on a GPU")
        shape = tuple(getattr(positions, "shape", ()))
        if len(shape) not in (2, 3) or shape[0] != len(self._items):
            raise InvalidArgument.about("lists.positions.shape",
                                        f"{shape}, must be [items, kv_heads, capacity] or [items, capacity]")
        list_count = shape[1] if len(shape) == 3 else 1
        at, held_positions = device_uint32s("positions", positions, shape)
        lists = abi.PositionLists(positions=ctypes.cast(at, ctypes.POINTER(ctypes.c_int32)),
                                  list_count=uint32("lists.list_count", list_count),
                                  capacity=uint32("lists.capacity", shape[-1]))
        held_lengths = None
        if lengths is not None:
            lengths_shape = shape[:2] if len(shape) == 3 else tuple(getattr(lengths, "shape", ()))
            if len(shape) == 2 and lengths_shape not in ((shape[0],), (shape[0], 1)):
                raise InvalidArgument.about("lists.lengths", f"shape {lengths_shape}, must be [items]")
            lengths_at, held_lengths = device_uint32s("lengths", lengths, lengths_shape)
            lists.lengths = ctypes.cast(lengths_at, ctypes.POINTER(ctypes.c_uint32))
        attention, held = self._device_attention(layer, out, log_base)
        borrowed = tensor("queries", queries) if logits is None else tensor("lists.logits", logits)
        if logits is not None:
            lists.logits = ctypes.pointer(borrowed.c)
        with self._handle as step:
            check(self._library.pqc_step_attend_positions(step, uint32("layer", layer), byref(borrowed.c),
                                                          byref(lists), byref(attention)))
        del held, held_positions, held_lengths
        return StepAttention(out[0], out[1], np.empty(0, np.uint32))

    def _device_attention(self, layer: int, out: Tuple[Any, Any], log_base: LogBase) -> Tuple[Any, Any]:
        """Returns where an attention is written, without counts, and what keeps that memory alive."""
        group = self._items[0].sequence._group(layer)
        shape = (self.query_tokens, group.query_heads, group.value_dim)
        output, held_output = device_floats("output", out[0], shape)
        attention = abi.StepAttention(output=output, output_capacity=shape[0] * shape[1] * shape[2],
                                      lse_base=member(LogBase, "log_base", log_base))
        if out[1] is None:  # the library refuses this where it needs an lse
            return attention, (held_output,)
        attention.lse, held_lse = device_floats("lse", out[1], shape[:2])
        attention.lse_capacity = shape[0] * shape[1]
        return attention, (held_output, held_lse)

    def topk_on_gpu(self, layer: int, queries: ArrayLike, positions: Any, counts: Any) -> None:
        """Writes the positions of the selected tokens, ascending, and their counts, for engines
        with their own kernels.

        positions: 32-bit integers [items, kv_heads, stride] on the device, with a stride of at
        least selected_capacity, written up to the counts. counts: 32-bit integers [items,
        kv_heads]. With select_per_token: [query tokens of all items, kv_heads, stride] and [query
        tokens of all items, kv_heads].
        """
        lists = self.query_tokens if self._selects_per_token else len(self._items)
        heads = (lists, self._items[0].sequence._group(layer).kv_heads)
        stride = tuple(getattr(positions, "shape", ()))[-1:]
        at, held_positions = device_uint32s("positions", positions, heads + stride)
        counts_at, held_counts = device_uint32s("counts", counts, heads)
        out = abi.GpuPositions(positions=at, stride=stride[0], counts=counts_at)
        borrowed = tensor("queries", queries)
        with self._handle as step:
            check(self._library.pqc_gpu_step_topk(step, uint32("layer", layer), byref(borrowed.c), byref(out)))
        del held_positions, held_counts

    def topk_pages_on_gpu(self, layer: int, queries: ArrayLike, page_tokens: int, pages: Any, lengths: Any, *,
                          heads: HeadRule = HeadRule.EACH, with_sink: bool = False, with_window: bool = False) -> int:
        """Like Step.topk_pages with the step's selection, and writes to arrays on the device.

        pages: 32-bit integers [items, kv_heads or 1, capacity], each list ascending, then -1; None
        or a capacity of 0 writes nothing. lengths: 32-bit integers [items]. Returns the capacity that the step needs.
        """
        flags = (abi.PQC_PAGES_WITH_SINK if with_sink else 0) | (abi.PQC_PAGES_WITH_WINDOW if with_window else 0)
        options = abi.PageOptions(page_tokens=uint32("page_tokens", page_tokens),
                                  heads=member(HeadRule, "heads", heads), flags=flags)
        lengths_at, held_lengths = device_uint32s("lengths", lengths, (len(self._items),))
        out, held_pages = abi.StepPages(lengths=lengths_at), None
        if pages is not None:
            lists = self._items[0].sequence._group(layer).kv_heads if heads == HeadRule.EACH else 1
            capacity = tuple(getattr(pages, "shape", ()))[-1:]
            out.pages, held_pages = device_uint32s("pages", pages, (len(self._items), lists) + capacity)
            out.capacity = uint32("pages.shape", capacity[0])
        borrowed = tensor("queries", queries)
        with self._handle as step:
            check(self._library.pqc_step_topk_pages(step, uint32("layer", layer), byref(borrowed.c), None,
                                                    byref(options), byref(out)))
        del held_pages, held_lengths
        return int(out.needed)


class Gpu(Closable):
    """A device for one cache. Made by Cache.open_gpu; close it before the client.

    Argument `stream` of the calls is a cudaStream_t as a number, such as
    torch.cuda.current_stream().cuda_stream. One step at a time; ingest may run concurrently with
    it, and on several threads for several sequences.
    """

    def __init__(self, cache: "Cache", handle: int) -> None:
        self._cache = cache  # keeps the session alive
        self._library = cache._library
        self._own(Handle("gpu", handle, self._library.pqc_gpu_close, cache._handle), at_exit=True)

    def count(self) -> GpuCounts:
        """Returns the counts at the end of the last step, whose work it waits for: for status
        pages. May be called concurrently with steps.
        """
        counts = abi.GpuCounts()
        with self._handle as gpu:
            check(self._library.pqc_gpu_count(gpu, byref(counts)))
        made: GpuCounts = from_c(GpuCounts, counts)
        return made

    def ingest(self, sequence: "Sequence", layer: int, first_position: int, keys: ArrayLike, values: ArrayLike, *,
               stream: int = 0, names: Optional[TokenNames] = None) -> None:
        """Like Sequence.ingest with arrays on the device (or Paged, with the table on the host).
        `stream` packs the rows, and they are stored afterwards. Later work of the stream may
        overwrite the arrays.

        names: of any tokens of the sequence. A later failure is raised by the next call for the sequence, and by sequence.flush(), which
        waits for all rows.
        """
        k, v = tensor("keys", keys), tensor("values", values)
        number, first = uint32("layer", layer), uint64("first_position", first_position)
        options = row_options(names)
        with self._handle as gpu, sequence._handle as pointer:
            check(self._library.pqc_gpu_ingest_with(gpu, pointer, number, first, byref(k.c), byref(v.c),
                                                    pointer_to(options), stream))

    def add_query_samples(self, sequence: "Sequence", layer: int, positions: SequenceOf[int], queries: ArrayLike, *,
                          stream: int = 0) -> None:
        """Like Sequence.add_query_samples with an array on the device. Waits until `stream` has packed it."""
        samples, _held = query_samples(layer, positions, queries)
        with self._handle as gpu, sequence._handle as pointer:
            check(self._library.pqc_gpu_add_query_samples(gpu, pointer, byref(samples), 1, stream))

    def merge_tensors(self, output_a: Any, lse_a: Any, output_b: Any, lse_b: Any, *, stream: int = 0,
                      log_base_a: LogBase = LogBase.NATURAL, log_base_b: LogBase = LogBase.NATURAL,
                      sink_logits: Optional[ArrayLike] = None) -> None:
        """Merges partial attention b into a on the device, like pqcached.merge_tensors. All arrays
        are on the device, of any strides of float32, float16 or bfloat16, and must stay until
        `stream` has reached the work: the call returns when it is launched. May be captured in a
        CUDA graph, and called in a step or outside of steps.

        Raises TypeError (kind of array, dtype, a of the CPU), InvalidArgument (shapes, arrays of
        the CPU or of another device, stream).
        """
        partials = Partials(output_a, lse_a, output_b, lse_b, log_base_a, log_base_b, sink_logits, Device.CUDA)
        with self._handle as gpu:
            check(self._library.pqc_gpu_merge_tensors(gpu, byref(partials.a), byref(partials.b), stream))

    def begin_step(self, items: SequenceOf[StepItem], selection: Optional[Selection] = None, *, stream: int = 0,
                   timeout_ms: int = 0, select_per_token: bool = False, decodes: bool = False) -> GpuStep:
        """Like Client.begin_step; all items have one query length, and the selection holds for the
        whole step. Without a selection the step needs no index, waits for all rows before the
        queries, and takes calls that need none: attend_range and attend_positions. select_per_token:
        as in Client.begin_step. decodes: the step takes calls of decode; its selection has a window.

        Also raises Aborted (another step is in progress), ResourceExhausted (more segments or
        codebooks than there is room for).
        """
        def begin(gpu: int, c_items: Any, count: int, options: Any, step: Any) -> int:
            status: int = self._library.pqc_gpu_step_begin(gpu, c_items, count, options, stream, step)
            return status

        return GpuStep(self._library, self._handle, items, selection, uint32("timeout_ms", timeout_ms),
                       (abi.PQC_STEP_SELECT_PER_TOKEN if select_per_token else 0) |
                       (abi.PQC_STEP_DECODES if decodes else 0), begin=begin)
