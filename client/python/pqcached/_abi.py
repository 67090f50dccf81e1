"""The ctypes version of pqcached/client.h, step.h and gpu.h: structs, functions, and the search for
the library.

A new function is one line of PROTOTYPES; a new struct is one class with the header's fields in the
header's order. tests/client/python/abi_test.py compares both with the header and the compiler.
"""

from __future__ import annotations

import ctypes
import pathlib
import threading
from ctypes import (CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t,
                    c_uint32, c_uint64, c_void_p)
from typing import Any, Dict, List, Optional, Tuple

from ._errors import ERRORS, Error, FailedPrecondition, Unknown

ABI_VERSION = 1
FILE_NAME = "libpqcached_client.so.1"
BUNDLED = pathlib.Path(__file__).resolve().parent / "lib" / FILE_NAME

c_enum = c_uint32


class Sized(Structure):
    """A struct whose first field is its size, set on construction."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(ctypes.sizeof(self), **fields)


class BlockTable(Sized):
    _fields_ = [("struct_size", c_size_t), ("blocks", POINTER(c_uint32)), ("block_count", c_uint64),
                ("block_tokens", c_uint32), ("token_count", c_uint64)]


class Tensor(Sized):
    _fields_ = [("struct_size", c_size_t), ("ptr", c_void_p), ("device", c_enum), ("dtype", c_enum), ("ndim", c_uint32),
                ("shape", POINTER(c_uint64)), ("strides", POINTER(c_int64)), ("block_table", POINTER(BlockTable)),
                ("stream", c_void_p), ("reserved", c_uint64 * 2)]


class ClientOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("endpoint", c_char_p), ("tenant", c_char_p), ("client_name", c_char_p),
                ("timeout_ms", c_uint32), ("parallel_for", c_void_p), ("parallel_for_context", c_void_p),
                ("thread_count", c_uint32), ("rpc_library_path", c_char_p), ("path", c_enum),
                ("staging_slot_bytes", c_uint64), ("staging_slot_count", c_uint32)]


class ClientCounts(Sized):
    _fields_ = [("struct_size", c_size_t), ("rpcs", c_uint64), ("background_rpcs", c_uint64),
                ("mapped_bytes", c_uint64), ("lease_count", c_uint64)]


class LayerGroup(Sized):
    _fields_ = [("struct_size", c_size_t), ("kind", c_enum), ("layers", POINTER(c_uint32)), ("layer_count", c_uint32),
                ("kv_heads", c_uint32), ("query_heads", c_uint32), ("key_dim", c_uint32), ("value_dim", c_uint32),
                ("dtype", c_enum), ("softmax_scale", c_float), ("softcap", c_float), ("rope_layout", c_enum),
                ("rope_theta", c_double), ("rotary_dim", c_uint32), ("values_alias_keys", c_uint32),
                ("window_tokens", c_uint32)]


_TensorField: Any = Tensor  # for type checkers, which do not accept a struct as the type of a field


class Index(Sized):
    _fields_ = [("struct_size", c_size_t), ("kind", c_enum), ("subspaces", c_uint32), ("bits", c_uint32),
                ("reserved", c_uint32 * 5)]


_IndexField: Any = Index


class CacheSpec(Sized):
    _fields_ = [("struct_size", c_size_t), ("name", c_char_p), ("model_fingerprint", c_char_p),
                ("groups", POINTER(LayerGroup)), ("group_count", c_uint32), ("capacity_bytes", c_uint64),
                ("default_index", Index), ("rank_group", c_char_p), ("rank", c_uint32), ("rank_count", c_uint32),
                ("kv_head_begin", c_uint32), ("layer_begin", c_uint32), ("numa_node", c_int32)]


class SequenceOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("token_ids", c_void_p), ("token_id_count", c_uint64),
                ("extra_key", c_char_p), ("extra_key_bytes", c_uint64), ("has_live_index", c_uint32),
                ("iterations", c_uint32), ("index", _IndexField), ("seed", c_uint64), ("train_tokens", c_uint64),
                ("sink_tokens", c_uint64),
                ("group_key", c_char_p), ("group_key_bytes", c_uint64)]


class SequenceInfo(Sized):
    _fields_ = [("struct_size", c_size_t), ("token_count", c_uint64), ("row_bytes", c_uint64),
                ("index_bytes", c_uint64), ("codebook_bytes", c_uint64), ("used_bytes", c_uint64),
                ("segment_count", c_uint32), ("index_count", c_uint32)]


class LayerRows(Sized):
    _fields_ = [("struct_size", c_size_t), ("layer", c_uint32), ("keys", _TensorField), ("values", _TensorField)]


class BuildProgress(Sized):
    _fields_ = [("struct_size", c_size_t), ("layer", c_uint32), ("layers_done", c_uint32), ("layer_count", c_uint32),
                ("codebook_generation", c_uint32), ("codebook_generation_count", c_uint32), ("iterations", c_uint32),
                ("inertia", c_double), ("seconds", c_double), ("index_bytes", c_uint64), ("codebook_bytes", c_uint64)]


BuildCallback = CFUNCTYPE(c_int, c_void_p, POINTER(BuildProgress))


class BuildOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("index", Index), ("iterations", c_uint32), ("seed", c_uint64),
                ("train_tokens", c_uint64), ("sink_tokens", c_uint64), ("timeout_ms", c_uint32),
                ("callback", BuildCallback), ("callback_context", c_void_p)]


class TokenRange(Structure):
    _fields_ = [("begin", c_uint64), ("end", c_uint64)]


class Selection(Sized):
    _fields_ = [("struct_size", c_size_t), ("index", Index), ("group_rule", c_enum), ("sink_tokens", c_uint64),
                ("window_tokens", c_uint64), ("excluded", POINTER(TokenRange)), ("excluded_count", c_uint32),
                ("budget", c_enum), ("ratio", c_double), ("token_count", c_uint64)]


class Query(Sized):
    _fields_ = [("struct_size", c_size_t), ("layer", c_uint32), ("query_position", c_uint64), ("queries", _TensorField)]


class Positions(Sized):
    _fields_ = [("struct_size", c_size_t), ("positions", c_void_p), ("capacity", c_uint64), ("kv_heads", c_uint32),
                ("count", c_uint32), ("sink_tokens", c_uint64), ("window_tokens", c_uint64)]


_PositionsField: Any = Positions


class Attention(Sized):
    _fields_ = [("struct_size", c_size_t), ("output", c_void_p), ("output_capacity", c_uint64), ("lse", c_void_p),
                ("lse_capacity", c_uint64), ("selected", _PositionsField)]


class StepItem(Sized):
    _fields_ = [("struct_size", c_size_t), ("sequence", c_void_p), ("query_position", c_uint64),
                ("query_length", c_uint32)]


class StepOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("selection", POINTER(Selection)), ("timeout_ms", c_uint32)]


class StepPositions(Sized):
    _fields_ = [("struct_size", c_size_t), ("positions", c_void_p), ("capacity", c_uint64), ("offsets", c_void_p),
                ("counts", c_void_p), ("count", c_uint64)]


class StepAttention(Sized):
    _fields_ = [("struct_size", c_size_t), ("output", c_void_p), ("output_capacity", c_uint64), ("lse", c_void_p),
                ("lse_capacity", c_uint64), ("counts", c_void_p)]


class GpuOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("device", c_int32), ("sequence_capacity", c_uint32),
                ("token_capacity", c_uint64), ("selected_capacity", c_uint64), ("query_length", c_uint32),
                ("segment_capacity", c_uint32), ("codebook_capacity", c_uint32), ("disable_block_cache", c_uint32),
                ("cache_tokens", c_uint32), ("max_block_loads", c_uint32), ("policy", c_enum), ("index", _IndexField),
                ("gpu_library_path", c_char_p), ("codes_bytes", c_uint64)]


class GpuCounts(Sized):
    _fields_ = [("struct_size", c_size_t), ("hits", c_uint64), ("misses", c_uint64), ("loaded", c_uint64),
                ("evicted", c_uint64), ("device_bytes", c_uint64), ("locked_bytes", c_uint64), ("generation", c_uint64),
                ("has_staged_rows", c_uint32), ("resident_layers", c_uint32)]


class GpuPositions(Sized):
    _fields_ = [("struct_size", c_size_t), ("positions", c_void_p), ("stride", c_uint64), ("counts", c_void_p)]


_handle = c_void_p
_status = c_enum

# Result and argument types of each function. Arrays of numbers are passed as addresses.
PROTOTYPES: Dict[str, Tuple[Any, List[Any]]] = {
    "pqc_abi_version": (c_uint32, []),
    "pqc_status_name": (c_char_p, [_status]),
    "pqc_last_error": (c_char_p, []),
    "pqc_last_error_field": (c_char_p, []),
    "pqc_last_error_retry_ms": (c_uint32, []),
    "pqc_client_open": (_status, [POINTER(ClientOptions), POINTER(_handle)]),
    "pqc_client_close": (None, [_handle]),
    "pqc_client_path": (c_enum, [_handle]),
    "pqc_client_count": (_status, [_handle, POINTER(ClientCounts)]),
    "pqc_admin_json": (_status, [_handle, c_char_p, c_char_p, POINTER(c_void_p)]),
    "pqc_free": (None, [c_void_p]),
    "pqc_cache_open": (_status, [_handle, POINTER(CacheSpec), POINTER(_handle)]),
    "pqc_cache_close": (None, [_handle]),
    "pqc_sequence_create": (_status, [_handle, POINTER(_handle)]),
    "pqc_sequence_create_with": (_status, [_handle, POINTER(SequenceOptions), POINTER(_handle), POINTER(c_uint64)]),
    "pqc_sequence_fork": (_status, [_handle, c_uint64, POINTER(_handle)]),
    "pqc_sequence_suspend": (_status, [_handle]),
    "pqc_sequence_resume": (_status, [_handle, POINTER(c_uint64)]),
    "pqc_match_prefix": (_status, [_handle, c_void_p, c_uint64, c_char_p, c_uint64, POINTER(c_uint64)]),
    "pqc_sequence_drop": (_status, [_handle]),
    "pqc_sequence_id": (c_uint64, [_handle]),
    "pqc_sequence_truncate": (_status, [_handle, c_uint64]),
    "pqc_sequence_describe": (_status, [_handle, POINTER(SequenceInfo)]),
    "pqc_ingest": (_status, [_handle, c_uint32, c_uint64, POINTER(Tensor), POINTER(Tensor)]),
    "pqc_append": (_status, [_handle, c_uint64, POINTER(LayerRows), c_uint32, POINTER(c_uint64)]),
    "pqc_build_index": (_status, [_handle, POINTER(BuildOptions)]),
    "pqc_topk": (_status, [_handle, POINTER(Query), POINTER(Selection), POINTER(Positions)]),
    "pqc_score": (_status, [_handle, POINTER(Query), POINTER(Index), TokenRange, c_void_p, c_uint64, c_void_p,
                            c_void_p]),
    "pqc_fetch_blocks": (_status, [_handle, c_uint32, TokenRange, c_enum, c_void_p, c_uint64]),
    "pqc_fetch_tokens": (_status, [_handle, c_uint32, c_void_p, c_uint32, c_enum, c_void_p, c_uint64]),
    "pqc_attend": (_status, [_handle, POINTER(Query), POINTER(Selection), POINTER(Attention)]),
    "pqc_attend_positions": (_status, [_handle, POINTER(Query), c_void_p, c_uint32, POINTER(Attention)]),
    "pqc_step_begin": (_status, [_handle, POINTER(StepItem), c_uint32, POINTER(StepOptions), POINTER(_handle)]),
    "pqc_step_topk": (_status, [_handle, c_uint32, POINTER(Tensor), POINTER(Selection), POINTER(StepPositions)]),
    "pqc_step_attend": (_status, [_handle, c_uint32, POINTER(Tensor), POINTER(Selection), POINTER(StepAttention)]),
    "pqc_step_attend_begin": (_status, [_handle, c_uint32, POINTER(Tensor), POINTER(Selection),
                                        POINTER(StepAttention)]),
    "pqc_step_attend_wait": (_status, [_handle]),
    "pqc_step_end": (_status, [_handle, POINTER(LayerRows), c_uint32, c_void_p]),
    "pqc_step_abandon": (None, [_handle]),
    "pqc_sequence_flush": (_status, [_handle]),
    "pqc_decoder_open": (_status, [_handle, POINTER(Selection), POINTER(_handle)]),
    "pqc_decoder_close": (None, [_handle]),
    "pqc_decoder_prefill": (_status, [_handle, c_uint32, POINTER(Tensor), POINTER(Tensor)]),
    "pqc_decoder_decode": (_status, [_handle, c_uint32, POINTER(Tensor), POINTER(Tensor), POINTER(Tensor), c_void_p,
                                     c_uint64]),
    "pqc_gpu_open": (_status, [_handle, POINTER(GpuOptions), POINTER(_handle)]),
    "pqc_gpu_close": (None, [_handle]),
    "pqc_gpu_count": (_status, [_handle, POINTER(GpuCounts)]),
    "pqc_gpu_ingest": (_status, [_handle, _handle, c_uint32, c_uint64, POINTER(Tensor), POINTER(Tensor), c_void_p]),
    "pqc_gpu_step_begin": (_status, [_handle, POINTER(StepItem), c_uint32, POINTER(StepOptions), c_void_p,
                                     POINTER(_handle)]),
    "pqc_gpu_step_topk": (_status, [_handle, c_uint32, POINTER(Tensor), POINTER(GpuPositions)]),
    "pqc_merge": (_status, [c_uint32, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p]),
}

_lock = threading.Lock()
_library: Optional[Any] = None


def _open(path: str) -> Any:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise FailedPrecondition(
            f"{FILE_NAME} cannot be loaded: {error}. This package looks for it in {BUNDLED.parent} (put there by `pip "
            "install --config-settings library=DIR`, or with PQCACHED_LIBRARY_DIR=DIR in the environment of pip; DIR "
            "is a build folder or an installed prefix), and else where the loader looks: ld.so.conf, LD_LIBRARY_PATH"
        ) from None
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise FailedPrecondition(f"{path} has no {name}: it is older than this package; install those of one "
                                     "release") from None
        function.restype, function.argtypes = result, arguments
    version = library.pqc_abi_version()
    if version != ABI_VERSION:
        raise FailedPrecondition(f"{path} has ABI version {version}, this package {ABI_VERSION}; install those of one "
                                 "release")
    return library


def library() -> Any:
    """Returns the client library, loaded once. Raises FailedPrecondition, which lists the places
    that were searched.
    """
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _open(str(BUNDLED) if BUNDLED.exists() else FILE_NAME)
    return _library


# ---- Errors. The library keeps the error text of a thread's last call. The garbage collector may
# close a handle right after a failed call, and closing is such a call too: the text is then kept
# here.

_kept = threading.local()


def clear_error_text() -> None:
    """Before a call: what was kept before belongs to another one."""
    _kept.reason = None


def keep_error_text() -> None:
    """Before a handle is closed at an unknown time."""
    reason = _last_reason()
    if reason[0]:
        _kept.reason = reason


def _last_reason() -> Tuple[bytes, bytes, int]:
    loaded = library()
    return loaded.pqc_last_error(), loaded.pqc_last_error_field(), loaded.pqc_last_error_retry_ms()


def error_of(status: int) -> Error:
    """The exception of a call that failed, made by the thread that called."""
    reason = _last_reason()
    if not reason[0]:
        reason = getattr(_kept, "reason", None) or reason
    message, field = (text.decode("utf-8", "replace") for text in reason[:2])
    known = ERRORS.get(status)
    if known is None:
        return Unknown(f"status {status}: {message}", field, reason[2])
    return known(message, field, reason[2])


def check(status: int) -> None:
    if status:
        raise error_of(status)

