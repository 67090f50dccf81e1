"""Client and Cache, with the calls on them."""

from __future__ import annotations

import ctypes
import functools
import json
import operator
from ctypes import byref
from typing import Any, Dict, List, Mapping, Optional, Sequence as SequenceOf, Tuple, Union

from . import _abi as abi
from ._arguments import key_bytes, member, text, token_count, uint32, uint64
from ._cache_events import CacheEvents, PrefixKeys
from ._enums import GpuPolicy, LayerKind, Path, PathChoice
from ._errors import InvalidArgument
from ._gpu import Gpu
from ._handle import Closable, Handle
from ._library import check, clear_error_text, library
from ._names import set_names
from ._operations import EventSource, Operations
from ._options import Admission, ClientCounts, Index, IndexType, LayerGroup, Rank, Selection, from_c
from ._page_cache import PageCache
from ._sequence import Sequence
from ._steps import Step, StepItem


class Client(EventSource):
    """A connection and its session. When the client is closed, the session ends and its sequences
    are dropped.

    endpoint: "unix:///run/pqcached/pqcached.sock", or "host:port", which needs tls_ca beyond the
    loopback.
    tenant: owner of the caches; None = that of this client over TLS, and "default" without TLS.
    client_name: human-readable name; the program's name when empty.
    timeout_ms: of each call except build_index; 0 = 10000.
    thread_count: threads for the kernels that run in this process; 0 = all cores, THREADS_CALLER =
    only the calling thread.
    path: access to the rows; ONLY_LOCAL raises Unavailable, with the reason, if it is not possible.
    rpc_library_path: libpqcached_rpc.so; empty = in the folder of libpqcached_client.so, then where
    the loader searches.
    staging_slot_bytes, staging_slot_count: shared memory through which rows reach the sidecar on the
    local path, in slots of a multiple of 1 MiB; both 0 = the library's default.
    tls_ca, tls_certificate, tls_key: PEM files of a TLS connection: the CA of the sidecar's
    certificate, and this client's own certificate and key. tls_server_name: the name in the
    sidecar's certificate; empty = the endpoint's host. token_file: a file with the client's token.

    Client, Cache and Sequence may be used from several threads at once; calls release the GIL. A
    forked child needs its own client.

    Raises InvalidArgument (endpoint, tenant), Unavailable (no server listens), DeadlineExceeded (a
    server listens and does not answer), FailedPrecondition (a library is not found, or its version
    differs), PermissionDenied (another tenant), Unauthenticated (no certificate and no valid token).
    """

    def __init__(self, endpoint: str, *, tenant: Optional[str] = None, client_name: str = "", timeout_ms: int = 0,
                 thread_count: int = 0, path: PathChoice = PathChoice.ANY, rpc_library_path: str = "",
                 staging_slot_bytes: int = 0, staging_slot_count: int = 0,
                 tls_ca: str = "", tls_certificate: str = "", tls_key: str = "", tls_server_name: str = "",
                 token_file: str = "") -> None:
        if tenant is None and not tls_ca:
            tenant = "default"
        options = abi.ClientOptions(
            endpoint=text("endpoint", endpoint), tenant=None if tenant is None else text("tenant", tenant),
            client_name=text("client_name", client_name) or None, timeout_ms=uint32("timeout_ms", timeout_ms),
            thread_count=uint32("thread_count", thread_count), path=member(PathChoice, "path", path),
            rpc_library_path=text("rpc_library_path", rpc_library_path) or None,
            staging_slot_bytes=uint64("staging_slot_bytes", staging_slot_bytes),
            staging_slot_count=uint32("staging_slot_count", staging_slot_count),
            tls_ca=text("tls_ca", tls_ca) or None, tls_certificate=text("tls_certificate", tls_certificate) or None,
            tls_key=text("tls_key", tls_key) or None, tls_server_name=text("tls_server_name", tls_server_name) or None,
            token_file=text("token_file", token_file) or None)
        self._tenant = tenant or ""  # empty: only the sidecar knows it
        self._library = library()
        clear_error_text()
        handle = ctypes.c_void_p()
        check(self._library.pqc_client_open(byref(options), byref(handle)))
        assert handle.value
        self._operations = Operations(self._library)
        self._own(Handle("client", handle.value, self._operations.close_client), at_exit=True)
        self._operations.attach(self._handle)

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

    def open_cache(self, name: str, *, model_fingerprint: str, groups: SequenceOf[LayerGroup], capacity_bytes: int = 0,
                   default_index: Index = Index(), rank: Optional[Rank] = None, numa_node: int = 0,
                   prefill_seconds: SequenceOf[float] = (), prefill_measured: bool = False) -> "Cache":
        """Opens the tenant's cache of this name; creates it if it does not exist.

        name: 1..128 bytes. model_fingerprint: 1..256 bytes, must include everything that affects K
        and V. capacity_bytes: size of the cache's pool; 0: it grows within the tenant's quota.
        default_index: of the calls of this handle that name no index; pq(4, 8) when not given.
        rank: for a model that spans several processes. numa_node: -1 or 0.
        prefill_seconds: a, b, c of the engine's prefill of n tokens in one layer, which takes
        a n^2 + b n + c seconds: live indexes, and builds with iterations=0, cluster the keys for as
        long (paper, section 3.3). prefill_measured: the sidecar measures it from the arrival of
        chunks. Neither: the sidecar's option, or what the open cache has.

        Raises FailedPrecondition (the cache exists with another fingerprint or shape),
        InvalidArgument (a limit), ResourceExhausted (no room for such a pool), Unimplemented (a
        kind of layer of later versions).
        """
        parts = [group.c() for group in groups]
        spec = abi.CacheSpec(name=text("name", name), model_fingerprint=text("model_fingerprint", model_fingerprint),
                             groups=(abi.LayerGroup * len(parts))(*parts), group_count=len(parts),
                             capacity_bytes=uint64("capacity_bytes", capacity_bytes), default_index=default_index.c(),
                             numa_node=operator.index(numa_node), prefill_measured=bool(prefill_measured))
        if len(prefill_seconds) not in (0, 3):
            raise InvalidArgument.about("prefill_seconds", f"{len(prefill_seconds)} numbers, must be 3")
        for number, seconds in enumerate(prefill_seconds):
            spec.prefill_seconds[number] = float(seconds)
        if rank is not None:
            spec.rank_group, spec.rank = text("rank.group", rank.group), uint32("rank.rank", rank.rank)
            spec.rank_count = uint32("rank.rank_count", rank.rank_count)
            spec.kv_head_begin = uint32("rank.kv_head_begin", rank.kv_head_begin)
            spec.layer_begin = uint32("rank.layer_begin", rank.layer_begin)
        handle = ctypes.c_void_p()
        with self._handle as client:
            check(self._library.pqc_cache_open(client, byref(spec), byref(handle)))
        assert handle.value
        return Cache(self, handle.value, name, groups)

    def open_page_cache(self, name: str, *, capacity_bytes: int, quota_bytes: int = 0) -> PageCache:
        """Opens the tenant's page cache of this name; creates it if it does not exist.

        name: 1..128 bytes; page caches and other caches share their names. capacity_bytes: memory
        of the pages. quota_bytes: bytes that may be in use; 0 = the capacity. An open page cache
        keeps its own. Raises FailedPrecondition (a cache of rows has the name), InvalidArgument,
        ResourceExhausted, Unimplemented (libpqcached_rpc or the sidecar is older).
        """
        spec = abi.PageCacheSpec(name=text("name", name), capacity_bytes=uint64("capacity_bytes", capacity_bytes),
                                 quota_bytes=uint64("quota_bytes", quota_bytes))
        handle = ctypes.c_void_p()
        with self._handle as client:
            check(self._library.pqc_page_cache_open(client, byref(spec), byref(handle)))
        assert handle.value
        return PageCache(self._library, self._handle, handle.value)

    def begin_step(self, items: SequenceOf[StepItem], selection: Optional[Selection] = None, *,
                   timeout_ms: int = 0, no_wait: bool = False,
                   exact_until_indexed: bool = False, select_per_token: bool = False) -> Step:
        """Begins one decode position, or several (speculation), over all layers for a batch of
        sequences.

        items: of one cache, each sequence once. selection: for all items and layers, unless a call
        passes another one; if it is given, the step waits here for the rows that it needs.
        timeout_ms: for all waits of the step together; 0 = the client's. no_wait: neither this call
        nor those for layers wait; what is not ready raises an error with a retry time at once. On
        the remote path a call for a layer waits for the answer to its RPC. exact_until_indexed: attend() takes all candidates of a layer whose index is
        missing or still being built, instead of waiting for it. select_per_token: each query token
        of an item has a selection of its own, by its own scores; otherwise they share one. In both
        cases the candidates end before the window of the item's first query token: the engine
        attends by itself to the sink, to that window, and to the item's tokens up to its own.
        Raises InvalidArgument (items[i]: listed twice, of another client, positions beyond the
        sequence's end), FailedPrecondition (suspended; no such index), Aborted (in another step),
        DeadlineExceeded (rows or index not available in time), Unavailable (no worker answers).
        """
        return Step(self._library, self._handle, items, selection, uint32("timeout_ms", timeout_ms),
                    (abi.PQC_STEP_NO_WAIT if no_wait else 0) |
                    (abi.PQC_STEP_EXACT_UNTIL_INDEXED if exact_until_indexed else 0) |
                    (abi.PQC_STEP_SELECT_PER_TOKEN if select_per_token else 0))

    def set_threads(self, thread_count: int) -> None:
        """Changes the number of threads of the kernels: 0 = all cores, 1 = only the calling thread."""
        with self._handle as client:
            check(self._library.pqc_client_set_threads(client, uint32("thread_count", thread_count)))

    def index_types(self) -> List[IndexType]:
        """The index types that the sidecar has, with their parameters (Admin.ListIndexTypes).

        Raises Unimplemented with a sidecar of an earlier version, InvalidArgument (method) with an
        earlier libpqcached_rpc.
        """
        return [IndexType.from_json(one) for one in self.admin("ListIndexTypes")["types"]]

    def make_index(self, type: str, **parameters: Union[int, str]) -> Index:
        """An index of a type of the sidecar, which may be one of its plug-ins: `client.make_index("sq",
        bits=4)`. Otherwise as Index.make; Client.index_types lists types and parameters.

        Raises what Index.make raises, and Unimplemented with an earlier sidecar or libpqcached_rpc.
        """
        with self._handle as client:
            return Index.made_by(functools.partial(self._library.pqc_client_index_make, client), type, parameters)

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

    def __init__(self, client: Client, handle: int, name: str, groups: SequenceOf[LayerGroup]) -> None:
        self._name = name
        self._client = client  # keeps the session alive
        self._library = client._library
        self._own(Handle("cache", handle, self._library.pqc_cache_close, client._handle), at_exit=False)
        self.groups: Tuple[LayerGroup, ...] = tuple(groups)
        self._group_of: Dict[int, LayerGroup] = {
            int(layer): group for group in groups if group.kind != LayerKind.NONE for layer in group.layers}

    def drop(self) -> None:
        """Drops the cache in the sidecar, with its cached prefixes, and returns its memory to the
        machine. The name may be opened again, as another cache.

        Raises FailedPrecondition while a sequence of a session is there or a prefix is pinned, and
        NotFound when it was dropped before.
        """
        with self._handle as cache:
            check(self._library.pqc_cache_drop(cache))

    def create_sequence(self, token_ids: Optional[Any] = None, *, extra_key: bytes = b"", live_index: bool = False,
                        index: Index = Index(), iterations: int = 0, seed: int = 0, train_tokens: int = 0,
                        sink_tokens: int = 0, group_key: bytes = b"", content_keys: bytes = b"",
                        at_least_tokens: int = 0, retain: Optional[bool] = None) -> "Sequence":
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
        at_least_tokens: raises NotFound, and creates nothing, when fewer tokens of the prompt are
        stored, for engines that have planned with the answer of match_prefix.
        retain: whether named tokens remain as a cached prefix when the sequence, or a fork of it,
        ends; None: as the sidecar's option `retain` says.
        """
        key, group = key_bytes("extra_key", extra_key), key_bytes("group_key", group_key)
        options = abi.SequenceOptions(
            extra_key=key or None, extra_key_bytes=len(key),
            has_live_index=1 if live_index else 0, iterations=uint32("iterations", iterations), index=index.c(),
            seed=uint64("seed", seed), train_tokens=uint64("train_tokens", train_tokens),
            sink_tokens=uint64("sink_tokens", sink_tokens), group_key=group or None, group_key_bytes=len(group),
            at_least_tokens=uint64("at_least_tokens", at_least_tokens),
            retain=0 if retain is None else 1 if retain else 2)
        set_names(options, token_ids, content_keys)
        handle, shared = ctypes.c_void_p(), ctypes.c_uint64()
        with self._handle as cache:
            check(self._library.pqc_sequence_create_with(cache, byref(options), byref(handle), byref(shared)))
        assert handle.value
        return Sequence(self, handle.value, shared.value)

    def attach(self, sequence_id: int) -> "Sequence":
        """Opens a handle for a sequence of this cache that another client of the tenant may have created
        (Sequence.id), for an engine of several processes. Sequence.shared_tokens is its number of
        tokens. Closing the handle stores the rows of finished steps and does not drop the sequence,
        which ends with the session that created it, or by drop().

        Raises NotFound (the cache has no such sequence, or only the cached prefix of one that has
        ended) and Unimplemented (libpqcached_rpc or the sidecar is older).
        """
        wanted, handle, tokens = uint64("sequence_id", sequence_id), ctypes.c_void_p(), ctypes.c_uint64()
        with self._handle as cache:
            check(self._library.pqc_sequence_attach(cache, wanted, byref(handle), byref(tokens)))
        assert handle.value
        return Sequence(self, handle.value, tokens.value, attached=True)

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

    def prefix_keys(self, token_ids: Optional[Any] = None, *, extra_key: bytes = b"",
                    content_keys: bytes = b"") -> PrefixKeys:
        """Computes the keys by which events name the tokens of a prompt, stored or not. Raises
        Unimplemented (libpqcached_rpc or the sidecar is older).
        """
        key = key_bytes("extra_key", extra_key)
        prompt = abi.SequenceOptions(extra_key=key or None, extra_key_bytes=len(key))
        set_names(prompt, token_ids, content_keys)
        capacity = prompt.token_id_count // 128 + prompt.content_key_count
        root, keys, count = abi.PrefixKey(), (abi.PrefixKey * max(capacity, 1))(), ctypes.c_uint64()
        with self._handle as cache:
            check(self._library.pqc_prefix_keys(cache, byref(prompt), byref(root), keys, capacity, byref(count)))
        return PrefixKeys(bytes(root.bytes), [bytes(each.bytes) for each in keys[:count.value]])

    def events(self, epoch: int = 0, number: int = 0) -> CacheEvents:
        """Reads the events of the cache, after the position of the last event that the caller has
        applied (0 and 0 = none).

        Events that the sidecar no longer has are replaced by CLEARED and STORED of each present
        key. A caller that applies all events in order knows exactly the keys that match_prefix
        finds, a moment later; of a rank's cache, those of this rank. The reader reconnects by
        itself after a restart of the sidecar's worker.
        """
        first, after = uint64("epoch", epoch), uint64("number", number)
        handle = ctypes.c_void_p()
        with self._handle as cache:
            check(self._library.pqc_cache_events_open(cache, first, after, byref(handle)))
        assert handle.value
        return CacheEvents(self._library, self._handle, handle.value, self._client._tenant, self._name)

    def admit(self, token_count: int, output_token_count: int = 0) -> Admission:
        """Asks whether a request fits: `token_count` prefill tokens that match_prefix has not found,
        and `output_token_count` expected tokens, with the default index of this handle. Reserves nothing.

        Raises OutOfRange (more than 2^30 tokens together), Unavailable (also while the sidecar is
        draining).
        """
        admission = abi.Admission()
        tokens, output = uint64("token_count", token_count), uint64("output_token_count", output_token_count)
        with self._handle as cache:
            check(self._library.pqc_admit(cache, tokens, output, byref(admission)))
        made: Admission = from_c(Admission, admission)
        return made
