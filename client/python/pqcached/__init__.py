"""pqcached from Python: the KV cache of long contexts in a sidecar, with an index over the keys.

    import pqcached

    with pqcached.Client("unix:///run/pqcached/pqcached.sock") as client:
        cache = client.open_cache("demo", model_fingerprint="demo-1", groups=[layers],
                                  capacity_bytes=64 << 20)
        with cache.create_sequence() as sequence:
            sequence.ingest(0, 0, keys, values)
            sequence.build_index(sink_tokens=16)
            attention = sequence.attend(0, tokens - 1, queries, selection)
            attention.merge(*attend_own(keys, values, queries))  # engine's sink and window

Arrays are numpy's, torch's or any with DLPack, and are read in place. A failed call raises
pqcached.Error, with one subclass per status, or TypeError for an argument of a wrong type.
Positions are absolute token positions.
"""

from ._abi import PQC_THREADS_CALLER as THREADS_CALLER, PQC_TIMEOUT_POLL as TIMEOUT_POLL
from ._arrays import ArrayLike, Paged, PagedSlots, Tensor
from ._cache_events import CacheEvent, CacheEvents, PrefixKeys
from ._client import Cache, Client
from ._enums import (BudgetKind, CacheEventKind, Device, DType, EventKind, GpuPolicy, GroupRule, HeadRule, IndexKind, LayerKind, LogBase, PageOutcome, Path, PathChoice,
                     RopeLayout, RowPart, SubspaceLayout, Verdict)
from ._errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, Error, FailedPrecondition, Internal,
                      InvalidArgument, NotFound, OutOfRange, PermissionDenied, ResourceExhausted, Status,
                      Unauthenticated, Unavailable, Unimplemented, Unknown)
from ._gpu import Gpu, GpuCounts, GpuStep
from ._library import library as _load_library
from ._load import Load
from ._model_config import groups_of
from ._names import TokenNames
from ._operations import Event
from ._options import (Admission, Attention, BuildProgress, ClientCounts, Index, IndexParameter, IndexType, LayerGroup, Progress, Rank, Scores, Selected,
                       Selection, SequenceInfo, merge, merge_tensors)
from ._page_cache import PageCache
from ._prepared import PreparedAttention, StepAttention
from ._sequence import Sequence
from ._steps import Decoder, Step, StepItem, StepPages

__version__ = "0.1.0"


def library_path() -> str:
    """Returns the path of the client library that this process uses; loads the library."""
    return str(_load_library()._name)


__all__ = [
    "Aborted", "Admission", "AlreadyExists", "ArrayLike", "Attention", "BudgetKind",
    "BuildProgress", "Cache", "CacheEvent", "CacheEventKind", "CacheEvents", "Cancelled",
    "Client", "ClientCounts", "DType", "DataLoss", "DeadlineExceeded", "Decoder", "Device",
    "Error", "Event", "EventKind", "FailedPrecondition", "Gpu", "GpuCounts", "GpuPolicy",
    "GpuStep", "GroupRule", "HeadRule", "Index", "IndexKind", "IndexParameter", "IndexType",
    "Internal", "InvalidArgument", "LayerGroup", "LayerKind", "Load", "LogBase", "NotFound",
    "OutOfRange", "PageCache", "PageOutcome", "Paged", "PagedSlots", "Path", "PathChoice",
    "PermissionDenied", "PrefixKeys", "PreparedAttention", "Progress", "Rank",
    "ResourceExhausted", "RopeLayout", "RowPart", "Scores", "Selected", "Selection", "Sequence",
    "SequenceInfo", "Status", "Step", "StepAttention", "StepItem", "StepPages",
    "SubspaceLayout", "THREADS_CALLER", "TIMEOUT_POLL", "Tensor", "TokenNames",
    "Unauthenticated", "Unavailable", "Unimplemented", "Unknown", "Verdict", "groups_of",
    "library_path", "merge", "merge_tensors",
]
