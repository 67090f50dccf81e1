"""Client, Cache and Sequence, with the calls on them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import operator
from ctypes import byref
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence as SequenceOf, Tuple

import numpy as np

from . import _abi as abi
from ._arguments import key_bytes, member, text, token_count, uint32, uint64
from ._arrays import (ArrayLike, Tensor, new_array, numpy_dtype, positions_to_read, rows_to_write, set_attention,
                      tensor)
from ._enums import GpuPolicy, LayerKind, LogBase, Path, PathChoice, RowPart
from ._errors import Aborted, InvalidArgument
from ._gpu import Gpu
from ._handle import Closable, Handle
from ._library import check, clear_error_text, error_of, library
from ._names import TokenNames, pointer_to, row_options, set_names
from ._options import (Admission, Attention, BuildProgress, ClientCounts, Index, LayerGroup, Progress, Rank, Scores, Selected,
                       Selection, SequenceInfo, from_c)
from ._steps import Decoder, Step, StepItem, layer_rows


class Client(Closable):
    """A connection and its session. When the client is closed, the session ends and its sequences
    are dropped.

    endpoint: "unix:///run/pqcached/pqcached.sock", or "host:port" on the loopback.
    tenant: owner of the caches.
    client_name: human-readable name; the program's name when empty.
    timeout_ms: of each call except build_index; 0 = 10000.
    thread_count: threads for the kernels that run in this process; 0 = all cores.
    path: access to the rows; ONLY_LOCAL raises Unavailable, with the reason, if it is not possible.
    rpc_library_path: libpqcached_rpc.so; empty = in the folder of libpqcached_client.so, then where
    the loader searches.
    staging_slot_bytes, staging_slot_count: shared memory through which rows reach the sidecar on the
    local path, in slots of a multiple of 1 MiB; both 0 = the library's default.

    Client, Cache and Sequence may be used from several threads at once; calls release the GIL. A
    forked child needs its own client.

    Raises InvalidArgument (endpoint, tenant), Unavailable (no server listens), DeadlineExceeded (a
    server listens and does not answer), FailedPrecondition (a library is not found, or its version
    differs), Unimplemented (an endpoint beyond this host).
    """

    def __init__(self, endpoint: str, *, tenant: str = "default", client_name: str = "", timeout_ms: int = 0,
                 thread_count: int = 0, path: PathChoice = PathChoice.ANY, rpc_library_path: str = "",
                 staging_slot_bytes: int = 0, staging_slot_count: int = 0) -> None:
        options = abi.ClientOptions(
            endpoint=text("endpoint", endpoint), tenant=text("tenant", tenant),
            client_name=text("client_name", client_name) or None, timeout_ms=uint32("timeout_ms", timeout_ms),
            thread_count=uint32("thread_count", thread_count), path=member(PathChoice, "path", path),
            rpc_library_path=text("rpc_library_path", rpc_library_path) or None,
            staging_slot_bytes=uint64("staging_slot_bytes", staging_slot_bytes),
            staging_slot_count=uint32("staging_slot_count", staging_slot_count))
        self._library = library()
        clear_error_text()
        handle = ctypes.c_void_p()
        check(self._library.pqc_client_open(byref(options), byref(handle)))
        assert handle.value
        self._own(Handle("client", handle.value, self._library.pqc_client_close), at_exit=True)

    @property
    def path(self) -> Path:
        """The path by which this client reads the rows."""
        with self._handle as client:
            return Path(self._library.pqc_client_path(client))

    def counts(self) -> ClientCounts:
        counts = abi.ClientCounts()
        with self._handle as client:
            check(self._library.pqc_client_count(client, byref(counts)))
        made: ClientCounts = from_c(ClientCounts, counts)
        return made

    def open_cache(self, name: str, *, model_fingerprint: str, groups: SequenceOf[LayerGroup], capacity_bytes: int,
                   default_index: Index = Index(), rank: Optional[Rank] = None, numa_node: int = 0) -> "Cache":
        """Opens the tenant's cache of this name; creates it if it does not exist.

        name: 1..128 bytes. model_fingerprint: 1..256 bytes, must include everything that affects K
        and V. capacity_bytes: size of the cache's pool. default_index: pq(2, 6) when not given.
        rank: for a model that spans several processes. numa_node: -1 or 0.

        Raises FailedPrecondition (the cache exists with another fingerprint or shape),
        InvalidArgument (a limit), ResourceExhausted (no room for such a pool), Unimplemented (a
        kind of layer of later versions).
        """
        parts = [group.c() for group in groups]
        spec = abi.CacheSpec(name=text("name", name), model_fingerprint=text("model_fingerprint", model_fingerprint),
                             groups=(abi.LayerGroup * len(parts))(*parts), group_count=len(parts),
                             capacity_bytes=uint64("capacity_bytes", capacity_bytes), default_index=default_index.c(),
                             numa_node=operator.index(numa_node))
        if rank is not None:
            spec.rank_group, spec.rank = text("rank.group", rank.group), uint32("rank.rank", rank.rank)
            spec.rank_count = uint32("rank.rank_count", rank.rank_count)
            spec.kv_head_begin = uint32("rank.kv_head_begin", rank.kv_head_begin)
            spec.layer_begin = uint32("rank.layer_begin", rank.layer_begin)
        handle = ctypes.c_void_p()
        with self._handle as client:
            check(self._library.pqc_cache_open(client, byref(spec), byref(handle)))
        assert handle.value
        return Cache(self, handle.value, groups)

    def begin_step(self, items: SequenceOf[StepItem], selection: Optional[Selection] = None, *,
                   timeout_ms: int = 0, no_wait: bool = False,
                   exact_until_indexed: bool = False) -> Step:
        """Begins one decode position, or several (speculation), over all layers for a batch of
        sequences.

        items: of one cache, each sequence once. selection: for all items and layers, unless a call
        passes another one; if it is given, the step waits here for the rows that it needs.
        timeout_ms: for all waits of the step together; 0 = the client's. no_wait: neither this call
        nor those for layers wait; what is not ready raises an error with a retry time at once. For
        the local path. exact_until_indexed: attend() takes all candidates of a layer whose index is
        missing or still being built, instead of waiting for it.
        Raises InvalidArgument (items[i]: listed twice, of another client, positions beyond the
        sequence's end), FailedPrecondition (suspended; no such index), Aborted (in another step),
        DeadlineExceeded (rows or index not available in time), Unavailable (no worker answers).
        """
        return Step(self._library, self._handle, items, selection, uint32("timeout_ms", timeout_ms),
                    (abi.PQC_STEP_NO_WAIT if no_wait else 0) |
                    (abi.PQC_STEP_EXACT_UNTIL_INDEXED if exact_until_indexed else 0))

    def set_threads(self, thread_count: int) -> None:
        """Changes the number of threads of the kernels: 0 = all cores, 1 = only the calling thread."""
        with self._handle as client:
            check(self._library.pqc_client_set_threads(client, uint32("thread_count", thread_count)))

    def admin(self, method: str, request: Optional[Mapping[str, Any]] = None) -> Dict[str, Any]:
        """Makes any unary Admin RPC by name, for tools: `client.admin("Stats")`. Fields have the
        proto's names. Reaches the data of the client's tenant; a client with PathChoice.ADMIN reaches
        all tenants.

        Raises NotFound or InvalidArgument for a method or field that does not exist, and what the
        method raises.
        """
        answer = ctypes.c_void_p()
        name, body = text("method", method), json.dumps(dict(request or {})).encode()
        with self._handle as client:
            check(self._library.pqc_admin_json(client, name, body, byref(answer)))
        try:
            made: Dict[str, Any] = json.loads(ctypes.string_at(answer.value or 0))
            return made
        finally:
            self._library.pqc_free(answer)


class Cache(Closable):
    """A KV space of one model. Made by Client.open_cache; closing it closes only the handle, the
    cache continues to exist.
    """

    def __init__(self, client: Client, handle: int, groups: SequenceOf[LayerGroup]) -> None:
        self._client = client  # keeps the session alive
        self._library = client._library
        self._own(Handle("cache", handle, self._library.pqc_cache_close, client._handle), at_exit=False)
        self.groups: Tuple[LayerGroup, ...] = tuple(groups)
        self._group_of: Dict[int, LayerGroup] = {
            int(layer): group for group in groups if group.kind == LayerKind.SELECTED for layer in group.layers}

    def create_sequence(self, token_ids: Optional[Any] = None, *, extra_key: bytes = b"", live_index: bool = False,
                        index: Index = Index(), iterations: int = 0, seed: int = 0, train_tokens: int = 0,
                        sink_tokens: int = 0, group_key: bytes = b"", content_keys: bytes = b"") -> "Sequence":
        """Creates a sequence.

        token_ids: integers [tokens], the known part of the prompt: the sequence begins with their
        longest stored prefix (see Sequence.shared_tokens), and other sequences may share the rows
        that it stores under them. content_keys: names of the prompt in place of token_ids, 16 bytes
        for each 128 tokens (TokenNames). extra_key: additional key of the prefix (images, ...), at most
        256 bytes.
        live_index: if true, prefill segments are indexed in the background as they fill, the last one
        when the first step begins or the first token is appended; build_index with the same index
        waits for all of it. The other arguments are as in build_index, but 0 iterations and 0
        train_tokens select the sidecar's defaults.
        group_key: for a cache with a rank: common name, on all ranks, of the group's sequence to
        which this one belongs; at most 64 bytes. All ranks share as many tokens as the call of the
        first rank, and their sequences are evicted and pinned together; forks are independent. The
        key may be used again after the sequences of all ranks are closed. Raises AlreadyExists when
        the rank has, or had, a sequence under the key and not all are closed; FailedPrecondition
        when the prompt differs from the first rank's, and when the sidecar has restarted since:
        then close the sequences and use the key again on all ranks.
        """
        key, group = key_bytes("extra_key", extra_key), key_bytes("group_key", group_key)
        options = abi.SequenceOptions(
            extra_key=key or None, extra_key_bytes=len(key),
            has_live_index=1 if live_index else 0, iterations=uint32("iterations", iterations), index=index.c(),
            seed=uint64("seed", seed), train_tokens=uint64("train_tokens", train_tokens),
            sink_tokens=uint64("sink_tokens", sink_tokens), group_key=group or None, group_key_bytes=len(group))
        set_names(options, token_ids, content_keys)
        handle, shared = ctypes.c_void_p(), ctypes.c_uint64()
        with self._handle as cache:
            check(self._library.pqc_sequence_create_with(cache, byref(options), byref(handle), byref(shared)))
        assert handle.value
        return Sequence(self, handle.value, shared.value)

    def open_gpu(self, token_capacity: int, *, device: int = 0, sequence_capacity: int = 0, selected_capacity: int = 0,
                 query_length: int = 0, segment_capacity: int = 0, codebook_capacity: int = 0, block_cache: bool = True,
                 cache_tokens: int = 0, max_block_loads: int = 0, policy: GpuPolicy = GpuPolicy.FREQUENCY,
                 index: Index = Index(), codes_bytes: int = 0, gpu_library_path: str = "") -> Gpu:
        """Reserves memory on a GPU, for prefill and steps with arrays there.

        token_capacity: tokens of the longest sequence. sequence_capacity: sequences of a step.
        selected_capacity: the largest k. query_length: the longest. codes_bytes: device memory for
        codes of the index; 0 = enough for all layers. 0 for a count selects the library's default
        (gpu.h).

        Raises FailedPrecondition (libpqcached_gpu.so cannot be loaded; no device, no driver:
        compute on the CPU), Unimplemented (an older device; the remote path; index flat; softcap),
        InvalidArgument, ResourceExhausted.
        """
        options = abi.GpuOptions(
            device=device, sequence_capacity=uint32("sequence_capacity", sequence_capacity),
            token_capacity=uint64("token_capacity", token_capacity),
            selected_capacity=uint64("selected_capacity", selected_capacity),
            query_length=uint32("query_length", query_length), segment_capacity=uint32("segment_capacity", segment_capacity),
            codebook_capacity=uint32("codebook_capacity", codebook_capacity),
            disable_block_cache=0 if block_cache else 1, cache_tokens=uint32("cache_tokens", cache_tokens),
            max_block_loads=uint32("max_block_loads", max_block_loads),
            policy=member(GpuPolicy, "policy", policy), index=index.c(), codes_bytes=uint64("codes_bytes", codes_bytes),
            gpu_library_path=text("gpu_library_path", gpu_library_path) or None)
        handle = ctypes.c_void_p()
        with self._handle as cache:
            check(self._library.pqc_gpu_open(cache, byref(options), byref(handle)))
        assert handle.value
        return Gpu(self, handle.value)

    def match_prefix(self, token_ids: Optional[Any] = None, *, extra_key: bytes = b"", content_keys: bytes = b"") -> int:
        """Returns the number of a prompt's tokens that are stored under these ids, or content keys:
        a multiple of 128.
        """
        key = key_bytes("extra_key", extra_key)
        prompt = abi.SequenceOptions(extra_key=key or None, extra_key_bytes=len(key))
        set_names(prompt, token_ids, content_keys)
        count = ctypes.c_uint64()
        with self._handle as cache:
            check(self._library.pqc_match_prefix_with(cache, byref(prompt), byref(count)))
        return count.value

    def admit(self, token_count: int, output_token_count: int = 0) -> Admission:
        """Asks whether a request fits: `token_count` prefill tokens that match_prefix has not found,
        and `output_token_count` expected tokens, with the cache's default index. Reserves nothing.

        Raises OutOfRange (more than 2^30 tokens together), Unavailable (also while the sidecar is
        draining).
        """
        admission = abi.Admission()
        tokens, output = uint64("token_count", token_count), uint64("output_token_count", output_token_count)
        with self._handle as cache:
            check(self._library.pqc_admit(cache, tokens, output, byref(admission)))
        made: Admission = from_c(Admission, admission)
        return made


class Sequence(Closable):
    """The tokens of one request. Made by Cache.create_sequence; closing it drops it in the sidecar.

    All calls raise InvalidArgument for a wrong argument, TypeError for one of a wrong type or
    dtype, FailedPrecondition for a closed handle, Unavailable for a lost session, and
    DeadlineExceeded. Calls that change one sequence exclude each other: the second one raises
    Aborted. A failed call changes nothing.
    """

    def __init__(self, cache: Cache, handle: int, shared_tokens: int) -> None:
        self._cache = cache  # keeps the session alive
        self.shared_tokens = shared_tokens  # tokens at its creation: the next position to ingest
        self._library = cache._library
        self._group_of = cache._group_of
        self._own(Handle("sequence", handle, self._library.pqc_sequence_drop, cache._handle), at_exit=False)

    @property
    def id(self) -> int:
        with self._handle as sequence:
            return int(self._library.pqc_sequence_id(sequence))

    def drop(self) -> None:
        """Like close(), but raises an error when the sidecar could not be notified."""
        clear_error_text()
        status = self._handle.close()
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

    def ingest(self, layer: int, first_position: int, keys: ArrayLike, values: ArrayLike, *,
               names: Optional[TokenNames] = None) -> None:
        """Stores consecutive prefill tokens of one layer: all of them or none.

        keys [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim]: any strides, or
        Paged; read in place. A range that is stored already is acknowledged; a gap, NaN and
        infinity raise InvalidArgument. names: of any tokens of the sequence; they need to be given
        with one layer only.
        Raises FailedPrecondition after build_index (then use append), ResourceExhausted (the pool
        is full).
        """
        k, v = tensor("keys", keys), tensor("values", values)
        number, first = uint32("layer", layer), uint64("first_position", first_position)
        options = row_options(names)
        with self._handle as sequence:
            check(self._library.pqc_ingest_with(sequence, number, first, byref(k.c), byref(v.c),
                                                pointer_to(options)))

    def name_tokens(self, names: TokenNames) -> None:
        """Names tokens without storing rows."""
        options = row_options(names)
        with self._handle as sequence:
            check(self._library.pqc_sequence_name_tokens(sequence, pointer_to(options)))

    def append(self, first_position: int, layers: Mapping[int, Tuple[ArrayLike, ArrayLike]], *,
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

    def enqueue_rows(self, first_position: int, layers: Mapping[int, Tuple[ArrayLike, ArrayLike]], *,
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
                    sink_tokens: int = 0, timeout_ms: int = 0,
                    progress: Optional[Callable[[BuildProgress], Optional[bool]]] = None) -> None:
        """Ends the prefill and builds the index of all layers.

        iterations: of k-means; 0 = 10. seed: same rows, iterations and seed give the same index.
        train_tokens: sample per codebook generation; 0 = all. sink_tokens: first tokens that are
        not used for training. timeout_ms: 0 = the sidecar's limit.
        progress: called on this thread; returning False ends the build (raises Cancelled), and so
        does an exception, which is raised again. A build that is ended leaves no trace, unless it
        had finished already; describe() shows that.

        Raises AlreadyExists (built twice), Cancelled, Aborted.
        """
        raised: List[BaseException] = []

        def call(_: Any, pointer: Any) -> int:
            assert progress is not None
            try:
                return 0 if progress(from_c(BuildProgress, pointer.contents)) is False else 1
            except BaseException as error:  # KeyboardInterrupt too: no exception may pass through C
                raised.append(error)
                return 0

        options = abi.BuildOptions(
            index=index.c(), iterations=uint32("iterations", iterations), seed=uint64("seed", seed),
            train_tokens=uint64("train_tokens", train_tokens), sink_tokens=uint64("sink_tokens", sink_tokens),
            timeout_ms=uint32("timeout_ms", timeout_ms))
        if progress is not None:
            options.callback = abi.BuildCallback(call)
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
        head.

        queries: [query_heads, key_dim], or [1, query_heads, key_dim]. query_position: absolute
        position of the query's token.

        Raises FailedPrecondition (the index is not built), OutOfRange (a position that is not
        stored).
        """
        query = self._query(layer, query_position, queries)
        terms, kv_heads = selection.c(), self._group(layer).kv_heads
        out = abi.Positions()
        capacity = kv_heads * selection.max_tokens(int(query.query_position) + 1)
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

    def fetch_tokens(self, layer: int, positions: Any, part: RowPart = RowPart.ROW, *,
                     out: Optional[Any] = None) -> Any:
        """Returns rows at positions [kv_heads, count]: [kv_heads, count, dim], in the form of
        fetch_blocks.
        """
        layer = uint32("layer", layer)
        chosen = positions_to_read("positions", positions, self._group(layer).kv_heads)
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
