"""Sequence, with the calls on it."""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence as SequenceOf, Tuple

import numpy as np

from . import _abi as abi
from ._arguments import member, token_count, uint32, uint64
from ._arrays import (ArrayLike, Tensor, new_array, numpy_dtype, positions_to_read, rows_to_write, set_attention,
                      tensor)
from ._enums import LogBase, RowPart
from ._errors import Aborted, InvalidArgument
from ._handle import Handle
from ._library import check, clear_error_text, error_of
from ._load import Load, layer_targets, token_range
from ._names import TokenNames, pointer_to, row_options
from ._operations import AsyncCalls, build_options
from ._options import (Attention, BuildProgress, Index, LayerGroup, Progress, Scores, Selected, Selection,
                       SequenceInfo, from_c)
from ._steps import Decoder, LayerArrays, layer_rows, query_samples

if TYPE_CHECKING:
    from ._client import Cache


class Sequence(AsyncCalls):
    """The tokens of one request. Made by Cache.create_sequence; closing it drops it in the sidecar. One
    that Cache.attach has made is not dropped when it is closed.

    All calls raise InvalidArgument for a wrong argument, TypeError for one of a wrong type or
    dtype, FailedPrecondition for a closed handle, Unavailable for a lost session, and
    DeadlineExceeded. Calls that change one sequence exclude each other: the second one raises
    Aborted. A failed call changes nothing.
    """

    def __init__(self, cache: Cache, handle: int, shared_tokens: int, attached: bool = False) -> None:
        self._cache = cache  # keeps the session alive
        self.shared_tokens = shared_tokens  # tokens at its creation: the next position to ingest
        self._library = cache._library
        self._operations = cache._client._operations
        self._group_of = cache._group_of
        close = self._library.pqc_sequence_detach if attached else self._library.pqc_sequence_drop
        self._own(Handle("sequence", handle, close, cache._handle), at_exit=False)

    @property
    def id(self) -> int:
        with self._handle as sequence:
            return int(self._library.pqc_sequence_id(sequence))

    def drop(self) -> None:
        """Drops the sequence in the sidecar and closes the handle. Raises an error when the sidecar could
        not be notified.
        """
        clear_error_text()
        status = self._handle.close(self._library.pqc_sequence_drop)
        if status is not None:
            check(status)

    def detach(self) -> None:
        """Waits until the rows of finished steps are stored, and closes the handle without dropping the
        sequence, which belongs to the session that created it. Raises what flush() raises; the handle
        is closed in any case.
        """
        clear_error_text()
        status = self._handle.close(self._library.pqc_sequence_detach)
        if status is not None:
            check(status)

    def fork(self, token_count: int = 0) -> "Sequence":
        """Creates a sequence that shares the first `token_count` tokens (0 = all) and their
        indexes, copy-on-write.
        """
        count, handle = uint64("token_count", token_count), ctypes.c_void_p()
        with self._handle as sequence:
            check(self._library.pqc_sequence_fork(sequence, count, byref(handle)))
        assert handle.value
        child = Sequence(self._cache, handle.value, count)
        if count == 0:
            child.shared_tokens = child.describe().token_count
        return child

    @staticmethod
    def reorder(sequences: SequenceOf["Sequence"], parents: SequenceOf[int]) -> List["Sequence"]:
        """Returns sequences of which number i continues sequences[parents[i]] with all of its tokens:
        that sequence itself at its first mention in parents, a fork of it at further ones. Sequences
        that parents does not mention are dropped and closed. One call for the beams of a beam search.

        All are of one cache. After an error nothing has changed. Raises Aborted when another thread
        uses a sequence that would be dropped.
        """
        if not sequences or not parents:
            raise InvalidArgument("sequences and parents: must not be empty")
        handles = [sequence._handle for sequence in sequences]
        dropped = [handle for i, handle in enumerate(handles) if i not in set(parents)]
        first = sequences[0]
        numbers = (ctypes.c_uint32 * len(parents))(*[uint32("parents", parent) for parent in parents])
        made = (ctypes.c_void_p * len(parents))()
        with contextlib.ExitStack() as stack:
            pointers = (ctypes.c_void_p * len(handles))(*[stack.enter_context(handle) for handle in handles])
            shut = [handle for handle in dropped if handle.shut()]
            try:
                if len(shut) < len(dropped):
                    raise Aborted("sequences: another thread uses one that would be dropped")
                check(first._library.pqc_sequences_reorder(pointers, len(handles), numbers, len(parents), made))
            except BaseException:
                for handle in shut:
                    handle.reopen()
                raise
            for handle in dropped:
                handle.forget()
        own = {pointer: sequence for pointer, sequence in zip(pointers, sequences)}
        return [own[pointer] if pointer in own else Sequence(first._cache, pointer, sequences[parents[i]].shared_tokens)
                for i, pointer in enumerate(made)]

    def pin(self, ttl_ms: int) -> None:
        """Protects the sequence from eviction for `ttl_ms` from now, at most 30 days (0 = ends the
        protection), and the cached prefix that remains of it when it ends. With a group_key, the
        sequences of all ranks. Works on a suspended sequence too.

        Raises InvalidArgument (ttl_ms), ResourceExhausted (no room to record the pin).
        """
        ttl = uint64("ttl_ms", ttl_ms)
        with self._handle as sequence:
            check(self._library.pqc_sequence_pin(sequence, ttl))

    def suspend(self) -> None:
        """Suspends the sequence (preemption): until resume(), every other call except describe and
        drop raises FailedPrecondition.
        """
        with self._handle as sequence:
            check(self._library.pqc_sequence_suspend(sequence))

    def resume(self) -> int:
        """Ends suspend(); returns the sequence's token count."""
        count = ctypes.c_uint64()
        with self._handle as sequence:
            check(self._library.pqc_sequence_resume(sequence, byref(count)))
        return count.value

    def truncate(self, token_count: int) -> None:
        """Drops the tokens from `token_count` on, and their names."""
        count = uint64("token_count", token_count)
        with self._handle as sequence:
            check(self._library.pqc_sequence_truncate(sequence, count))

    def describe(self) -> SequenceInfo:
        info = abi.SequenceInfo()
        with self._handle as sequence:
            check(self._library.pqc_sequence_describe(sequence, byref(info)))
        made: SequenceInfo = from_c(SequenceInfo, info)
        return made

    def progress(self) -> Progress:
        """Returns what this client knows of the sequence, without waiting and without an RPC."""
        progress = abi.Progress()
        with self._handle as sequence:
            check(self._library.pqc_sequence_progress(sequence, byref(progress)))
        made: Progress = from_c(Progress, progress)
        return made

    # ---- Writing rows

    def ingest(self, layer: int, first_position: int, keys: Optional[ArrayLike], values: ArrayLike, *,
               names: Optional[TokenNames] = None) -> None:
        """Stores consecutive prefill tokens of one layer: all of them or none.

        keys [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim]: any strides, or
        Paged; read in place. A range that is stored already is acknowledged; a gap, NaN and
        infinity raise InvalidArgument. keys is None for a layer of LayerKind.VALUES. names: of any tokens of the sequence; they need to be given
        with one layer only.
        Raises FailedPrecondition after build_index (then use append), ResourceExhausted (the pool
        is full).
        """
        k, v = None if keys is None else tensor("keys", keys), tensor("values", values)
        number, first = uint32("layer", layer), uint64("first_position", first_position)
        options = row_options(names)
        with self._handle as sequence:
            check(self._library.pqc_ingest_with(sequence, number, first, None if k is None else byref(k.c), byref(v.c),
                                                pointer_to(options)))

    def name_tokens(self, names: TokenNames) -> None:
        """Names tokens without storing rows."""
        options = row_options(names)
        with self._handle as sequence:
            check(self._library.pqc_sequence_name_tokens(sequence, pointer_to(options)))

    def append(self, first_position: int, layers: LayerArrays, *,
               names: Optional[TokenNames] = None) -> int:
        """Appends new tokens to all stored layers at once; returns the sequence's token count.

        layers: layer -> (keys, values), shaped as in ingest. A repeat is acknowledged, a gap raises
        InvalidArgument. The codes of the nearest centroids are stored when the call returns. names:
        of any tokens of the sequence.
        """
        rows, _held = layer_rows(layers)
        options = row_options(names)
        first, stored = uint64("first_position", first_position), ctypes.c_uint64()
        with self._handle as sequence:
            check(self._library.pqc_append_with(sequence, first, rows, len(rows), pointer_to(options), byref(stored)))
        return stored.value

    def enqueue_rows(self, first_position: int, layers: LayerArrays, *,
                     names: Optional[TokenNames] = None) -> None:
        """Passes on the prefill rows of all stored layers, and returns when they are copied.

        layers: layer -> (keys, values), shaped as in ingest. The rows are stored in the background;
        flush() waits for them and raises their error. names: of any tokens of the sequence.
        """
        rows, _held = layer_rows(layers)
        options = row_options(names)
        first = uint64("first_position", first_position)
        with self._handle as sequence:
            check(self._library.pqc_enqueue_rows(sequence, first, rows, len(rows), pointer_to(options)))

    def add_query_samples(self, layer: int, positions: SequenceOf[int], queries: ArrayLike) -> None:
        """Adds queries [positions, query_heads, key_dim] of stored tokens, for indexes of SubspaceLayout.WEIGHTED.

        positions ascend; useful are the last 64 of a prompt and every n-th before them, 512 in total. See pqc_add_query_samples.
        """
        samples, _held = query_samples(layer, positions, queries)
        with self._handle as sequence:
            check(self._library.pqc_add_query_samples(sequence, byref(samples), 1))

    def flush(self) -> None:
        """Waits until all rows of ended steps are stored; raises the sequence's pending error, if
        any.
        """
        with self._handle as sequence:
            check(self._library.pqc_sequence_flush(sequence))

    def decoder(self, selection: Selection) -> Decoder:
        """Opens the convenience session, which also keeps the sink and the window. It uses the
        sequence until it is closed.

        Raises InvalidArgument for a selection without a window: a token attends to itself.
        """
        return Decoder(self, selection)

    # ---- Index

    def build_index(self, index: Index = Index(), *, iterations: int = 0, seed: int = 0, train_tokens: int = 0,
                    sink_tokens: int = 0, timeout_ms: int = 0, rebuild: bool = False, rebuild_drift: float = 0.0, rebuild_tokens: int = 0,
                    progress: Optional[Callable[[BuildProgress], Optional[bool]]] = None) -> None:
        """Ends the prefill and builds the index of all layers.

        iterations: of k-means; 0 = as many as fit into the engine's prefill (open_cache), at most 10,
        and 10 when its time is not known. seed: same rows, iterations (not 0) and seed give the same
        index.
        train_tokens: sample per codebook generation; 0 = all. sink_tokens: first tokens that are
        not used for training. timeout_ms: 0 = the sidecar's limit.
        rebuild: replaces an index that exists when the new one is done; steps use the earlier one until
        then. rebuild_drift, rebuild_tokens: conditions of rebuild, of which one that is met suffices;
        0 = none: the keys of a segment are farther from their centroids than this times the trained
        ones (mean squared distances); so many tokens are new since the last build.
        progress: called on this thread; returning False ends the build (raises Cancelled), and so
        does an exception, which is raised again. A build that is ended leaves no trace (a
        rebuild: the earlier index), unless it had finished already; describe() shows that.

        Raises AlreadyExists (built twice; no condition of rebuild is met), Cancelled, Aborted.
        """
        options, raised = build_options(index, iterations, seed, train_tokens, sink_tokens, timeout_ms, rebuild, rebuild_drift, rebuild_tokens, progress)
        with self._handle as sequence:
            status = self._library.pqc_build_index(sequence, byref(options))
            if not raised:
                check(status)
        if raised:
            raise raised[0]

    # ---- Select, fetch, attend

    def _group(self, layer: int) -> LayerGroup:
        group = self._group_of.get(layer)
        if group is None:
            raise InvalidArgument.about("layer", f"the cache stores no layer {layer}")
        return group

    @staticmethod
    def _query(layer: int, query_position: int, queries: ArrayLike) -> abi.Query:
        borrowed = tensor("queries", queries)
        query = abi.Query()
        query.layer, query.query_position = uint32("layer", layer), uint64("query_position", query_position)
        query.queries, query.owner = borrowed.c, borrowed
        return query

    def topk(self, layer: int, query_position: int, queries: ArrayLike, selection: Selection) -> Selected:
        """Returns the positions of the best tokens: uint32 [kv_heads, count], ascending per kv
        head; with GroupRule.PER_QUERY_HEAD [query_heads, count].

        queries: [query_heads, key_dim], or [1, query_heads, key_dim]. query_position: absolute
        position of the query's token.

        Raises FailedPrecondition (the index is not built), OutOfRange (a position that is not
        stored).
        """
        query = self._query(layer, query_position, queries)
        terms, sets = selection.c(), selection.set_count(self._group(layer))
        out = abi.Positions()
        capacity = sets * selection.max_tokens(int(query.query_position) + 1)
        while True:
            positions = new_array((capacity,), np.uint32)
            out.positions, out.capacity = positions.ctypes.data, capacity
            with self._handle as sequence:
                status = self._library.pqc_topk(sequence, byref(query), byref(terms), byref(out))
                needed = out.kv_heads * out.count
                if status != 0 and needed <= capacity:
                    raise error_of(status)
            if status == 0:
                break
            capacity = needed
        chosen = positions[:needed].reshape(out.kv_heads, out.count)
        return Selected(out.count, out.kv_heads, out.sink_tokens, out.window_tokens, chosen)

    def attend(self, layer: int, query_position: int, queries: ArrayLike, selection: Selection, *,
               out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> Attention:
        """Returns the partial attention over the selected tokens, to be merged with the attention
        over sink and window.

        queries, query_position: as in topk. out: (output, lse) to write to, [query_heads, value_dim]
        and [query_heads], writable numpy arrays or torch tensors on the CPU of any strides, of
        float32, float16 or bfloat16; new numpy arrays of float32 when not given. log_base: of lse.
        Raises the errors of topk.
        """
        query = self._query(layer, query_position, queries)
        terms = selection.c()
        attention, output, lse = self._attention(layer, out, log_base)
        with self._handle as sequence:
            check(self._library.pqc_attend(sequence, byref(query), byref(terms), byref(attention)))
        return self._attended(attention, output, lse)

    def attend_range(self, layer: int, query_position: int, queries: ArrayLike, tokens: Tuple[int, int], *,
                     out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> Attention:
        """Returns the exact attention over all stored rows of the tokens [begin, end), which may be
        empty, causally: query token i, at query_position + i, attends to the positions up to its
        own. Needs no index.

        queries: [tokens, query_heads, key_dim], of 1 to 8192 tokens. out, log_base: as in attend,
        with shapes [tokens, query_heads, value_dim] and [tokens, query_heads].

        Raises OutOfRange for tokens that are not stored.
        """
        query = self._query(layer, query_position, queries)
        begin, end = uint64("tokens.begin", tokens[0]), uint64("tokens.end", tokens[1])
        borrowed: Tensor = query.owner
        if len(borrowed.shape) != 3:
            raise InvalidArgument.about("queries.shape", f"{borrowed.shape}, must be [tokens, query_heads, key_dim]")
        attention, output, lse = self._attention(layer, out, log_base, borrowed.shape[0])
        with self._handle as sequence:
            check(self._library.pqc_attend_range(sequence, byref(query), abi.TokenRange(begin, end), byref(attention)))
        return self._attended(attention, output, lse)

    def attend_positions(self, layer: int, query_position: int, queries: ArrayLike, positions: Any, *,
                         out: Optional[Tuple[Any, Any]] = None, log_base: LogBase = LogBase.NATURAL) -> Attention:
        """Like attend, over given positions: integers [kv_heads, count], ascending per kv head.

        Raises OutOfRange for a position that is not stored.
        """
        query = self._query(layer, query_position, queries)
        chosen = positions_to_read("positions", positions, self._group(layer).kv_heads)
        attention, output, lse = self._attention(layer, out, log_base)
        with self._handle as sequence:
            check(self._library.pqc_attend_positions(sequence, byref(query), chosen.ctypes.data, chosen.shape[1],
                                                     byref(attention)))
        return self._attended(attention, output, lse)

    def _attention(self, layer: int, out: Optional[Tuple[Any, Any]], log_base: LogBase,
                   tokens: Optional[int] = None) -> Tuple[abi.Attention, Any, Any]:
        group = self._group(layer)
        shape = (1 if tokens is None else tokens, group.query_heads, group.value_dim)
        if out is None:
            visible = shape[1:] if tokens is None else shape
            out = new_array(visible, np.float32), np.empty(visible[:-1], np.float32)
        attention = abi.Attention()
        set_attention(attention, out[0], out[1], shape, tokens is None, log_base)
        return attention, out[0], out[1]

    @staticmethod
    def _attended(attention: abi.Attention, output: Any, lse: Any) -> Attention:
        chosen = attention.selected
        return Attention(output, lse, Selected(chosen.count, chosen.kv_heads, chosen.sink_tokens, chosen.window_tokens))

    def score(self, layer: int, query_position: int, queries: ArrayLike, tokens: Tuple[int, int],
              index: Index = Index()) -> Scores:
        """Returns the logits of the tokens [begin, end) under an index, and per query head their
        maximum and the sum of exp(logit - maximum).
        """
        query = self._query(layer, query_position, queries)
        begin, end = uint64("tokens.begin", tokens[0]), uint64("tokens.end", tokens[1])
        heads = self._group(layer).query_heads
        scores = Scores(new_array((heads, token_count(begin, end)), np.float32), np.empty(heads, np.float32),
                        np.empty(heads, np.float32))
        c = index.c()
        with self._handle as sequence:
            check(self._library.pqc_score(
                sequence, byref(query), byref(c), abi.TokenRange(begin, end), scores.logits.ctypes.data,
                scores.logits.size, scores.max.ctypes.data, scores.sum_exp.ctypes.data))
        return scores

    def fetch_blocks(self, layer: int, tokens: Tuple[int, int], part: RowPart = RowPart.ROW, *,
                    out: Optional[Any] = None) -> Any:
        """Returns rows of the tokens [begin, end): [kv_heads, tokens, dim] of the cache's dtype.

        dim is key_dim + value_dim, or that of the part. bfloat16 is returned as numpy uint16; out,
        a contiguous writable array of the cache's dtype, may be a torch tensor. Returns `out`, or a
        new numpy array.

        Raises OutOfRange for tokens that are not stored.
        """
        layer = uint32("layer", layer)
        begin, end = uint64("tokens.begin", tokens[0]), uint64("tokens.end", tokens[1])
        rows, address, size = self._rows(layer, token_count(begin, end), part, out)
        with self._handle as sequence:
            check(self._library.pqc_fetch_blocks(sequence, layer, abi.TokenRange(begin, end),
                                                member(RowPart, "part", part), address, size))
        return rows

    def load(self, tokens: Tuple[int, int], layers: LayerArrays, *,
             stream: int = 0) -> None:
        """Copies the rows of the tokens [begin, end) to arrays of the engine.

        layers: stored layer -> (keys [tokens, kv_heads, key_dim], values [tokens, kv_heads,
        value_dim]), which are written: numpy arrays or torch tensors of any strides and dtype, or
        Paged and PagedSlots. All are on the CPU, or all on one GPU: torch tensors, or arrays with
        __dlpack__. stream: a cudaStream_t, after whose work a GPU's arrays are written; 0 = torch's
        current stream, for others the default stream. The rows are there when the call returns.
        Raises OutOfRange, before anything is written, for tokens that are not stored in a layer.
        """
        rows, _held = layer_targets(layers, stream)
        chosen = token_range(tokens)
        with self._handle as sequence:
            check(self._library.pqc_load(sequence, chosen, rows, len(rows)))

    def begin_load(self, tokens: Tuple[int, int], layers: LayerArrays, *,
                   stream: int = 0) -> Load:
        """Begins load() in a thread of the library, layer by layer in the order of `layers`."""
        rows, held = layer_targets(layers, stream)
        chosen, operation = token_range(tokens), ctypes.c_void_p()
        with self._handle as sequence:
            check(self._library.pqc_load_begin(sequence, chosen, rows, len(rows), None, byref(operation)))
        assert operation.value
        return Load(self._library, self._cache._handle, operation.value, len(rows), held)

    def prefetch(self, tokens: Tuple[int, int]) -> None:
        """Hints that the rows of the tokens [begin, end) will be read soon; never waits."""
        chosen = token_range(tokens)
        with self._handle as sequence:
            check(self._library.pqc_prefetch(sequence, chosen))

    def fetch_tokens(self, layer: int, positions: Any, part: RowPart = RowPart.ROW, *,
                     out: Optional[Any] = None) -> Any:
        """Returns rows at positions [kv_heads, count]: [kv_heads, count, dim], in the form of
        fetch_blocks. Positions [query_heads, k] of sets per query head are taken as
        [kv_heads, group size * k].
        """
        layer = uint32("layer", layer)
        group = self._group(layer)
        given = np.asarray(positions)
        if given.ndim == 2 and given.shape[0] == group.query_heads:
            positions = given.reshape(group.kv_heads, -1)
        chosen = positions_to_read("positions", positions, group.kv_heads)
        count = chosen.shape[1]
        rows, address, size = self._rows(layer, count, part, out)
        with self._handle as sequence:
            check(self._library.pqc_fetch_tokens(sequence, layer, chosen.ctypes.data, count,
                                                 member(RowPart, "part", part), address, size))
        return rows

    def _rows(self, layer: int, count: int, part: RowPart, out: Optional[Any]) -> Tuple[Any, int, int]:
        group = self._group(layer)
        part = member(RowPart, "part", part)
        dim = (group.key_dim if part != RowPart.VALUE else 0) + (group.value_dim if part != RowPart.KEY else 0)
        shape = (group.kv_heads, count, dim)
        dtype = numpy_dtype(group.dtype)
        rows = new_array(shape, dtype) if out is None else out
        address = rows_to_write("out", rows, group.dtype, shape)
        return rows, address, group.kv_heads * count * dim * dtype.itemsize
