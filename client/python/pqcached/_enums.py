"""The enums of client.h. A member of a later version is one more line."""

from __future__ import annotations

import enum

from . import _abi as abi


class DType(enum.IntEnum):
    """Element type of rows and queries. numpy has no bfloat16: see Tensor."""

    F16 = abi.PQC_F16
    BF16 = abi.PQC_BF16
    F32 = abi.PQC_F32


class Device(enum.IntEnum):
    CPU = abi.PQC_CPU
    CUDA = abi.PQC_CUDA  # Unimplemented in this version


class Path(enum.IntEnum):
    """Path by which a client reaches the rows."""

    REMOTE = abi.PQC_PATH_REMOTE  # by RPC
    LOCAL = abi.PQC_PATH_LOCAL  # in mapped memory


class PathChoice(enum.IntEnum):
    """Paths that a client may use to reach the rows."""

    ANY = abi.PQC_PATH_ANY  # local if the sidecar offers it, else remote
    ONLY_REMOTE = abi.PQC_PATH_ONLY_REMOTE
    ADMIN = abi.PQC_PATH_ADMIN  # for operators: only Client.admin, which reaches all tenants
    ONLY_LOCAL = abi.PQC_PATH_ONLY_LOCAL


class LayerKind(enum.IntEnum):
    SELECTED = abi.PQC_LAYERS_SELECTED
    FULL = abi.PQC_LAYERS_FULL  # attends to all tokens
    WINDOW = abi.PQC_LAYERS_WINDOW  # attends to its last window_tokens tokens
    NONE = abi.PQC_LAYERS_NONE  # nothing is stored
    VALUES = abi.PQC_LAYERS_VALUES  # rows are values; the engine keeps the keys


class RopeLayout(enum.IntEnum):
    UNKNOWN = abi.PQC_ROPE_UNKNOWN
    NONE = abi.PQC_ROPE_NONE
    HALF = abi.PQC_ROPE_HALF
    INTERLEAVED = abi.PQC_ROPE_INTERLEAVED


class SubspaceLayout(enum.IntEnum):
    """How the sub-spaces of Index.pq are cut from a key."""

    PAIRS = abi.PQC_SUBSPACES_PAIRS  # pairs of RopeLayout.HALF are kept together
    CONTIGUOUS = abi.PQC_SUBSPACES_CONTIGUOUS
    WEIGHTED = abi.PQC_SUBSPACES_WEIGHTED  # needs Sequence.add_query_samples


class IndexKind(enum.IntEnum):
    DEFAULT = abi.PQC_INDEX_DEFAULT  # the cache's
    PQ = abi.PQC_INDEX_PQ
    FLAT = abi.PQC_INDEX_FLAT  # exact scores of all keys
    PLUGIN = abi.PQC_INDEX_PLUGIN  # of a plug-in of the sidecar; Client.make_index
    GRAPH = abi.PQC_INDEX_GRAPH  # Index.make("graph"); needs Sequence.add_query_samples
    CLUSTERS = abi.PQC_INDEX_CLUSTERS  # Index.make("clusters"); for Selection.tail_estimate


class HeadRule(enum.IntEnum):
    """The lists of pages of an item (Step.topk_pages)."""

    EACH = abi.PQC_HEADS_EACH  # one for each kv head
    MAX = abi.PQC_HEADS_MAX  # one, by the maximum of a token's scores over the kv heads
    SUM = abi.PQC_HEADS_SUM  # one, by their sum


class Verdict(enum.IntEnum):
    """Answer of Cache.admit: when a request fits into the cache's memory."""

    FITS_NOW = abi.PQC_FITS_NOW
    FITS_AFTER_EVICTION = abi.PQC_FITS_AFTER_EVICTION  # of cached prefixes and idle sequences
    FITS_LATER = abi.PQC_FITS_LATER  # when sequences in use have ended or shrunk
    FITS_NEVER = abi.PQC_FITS_NEVER  # a larger cache is needed


class GroupRule(enum.IntEnum):
    """GQA head aggregation: combines the scores of the query heads of one kv head."""

    SUM_SOFTMAX = abi.PQC_SUM_SOFTMAX
    MAX_SOFTMAX = abi.PQC_MAX_SOFTMAX
    MEAN_LOGIT = abi.PQC_MEAN_LOGIT
    MAX_LOGIT = abi.PQC_MAX_LOGIT
    PER_QUERY_HEAD = abi.PQC_PER_QUERY_HEAD  # a set of its own for each query head


class BudgetKind(enum.IntEnum):
    RATIO = abi.PQC_BUDGET_RATIO
    COUNT = abi.PQC_BUDGET_COUNT
    MASS = abi.PQC_BUDGET_MASS
    RETRIEVED = abi.PQC_BUDGET_RETRIEVED


class LogBase(enum.IntEnum):
    """Logarithm of log-sum-exps."""

    NATURAL = abi.PQC_LOG_NATURAL
    BASE2 = abi.PQC_LOG_BASE2


class GpuPolicy(enum.IntEnum):
    """Eviction policy of the block cache."""

    # as LFU, but a new block must have been requested 1.25 times as often
    FREQUENCY = abi.PQC_GPU_FREQUENCY
    LRU = abi.PQC_GPU_LRU
    LFU = abi.PQC_GPU_LFU


class RowPart(enum.IntEnum):
    """A row is [key | value]."""

    ROW = abi.PQC_ROW
    KEY = abi.PQC_KEY
    VALUE = abi.PQC_VALUE


class CacheEventKind(enum.IntEnum):
    """A change of the prefixes that match_prefix finds in a cache."""

    STORED = abi.PQC_CACHE_STORED  # match_prefix finds the key from now on
    REMOVED = abi.PQC_CACHE_REMOVED  # match_prefix finds the key no longer; it may be unknown
    CLEARED = abi.PQC_CACHE_CLEARED  # the reader forgets all keys of the cache


class PageOutcome(enum.IntEnum):
    """What became of one page of a call of PageCache."""

    UNKNOWN = abi.PQC_PAGE_UNKNOWN  # the call has failed before
    STORED = abi.PQC_PAGE_STORED
    PRESENT = abi.PQC_PAGE_PRESENT  # the key has a page, which stays
    NO_ROOM = abi.PQC_PAGE_NO_ROOM  # not stored: no memory even after eviction
    FOUND = abi.PQC_PAGE_FOUND
    MISSING = abi.PQC_PAGE_MISSING  # no page has the key
    TOO_LARGE = abi.PQC_PAGE_TOO_LARGE  # it exceeds the buffer, which is unchanged


class EventKind(enum.IntEnum):
    """What has happened to a client."""

    NONE = abi.PQC_EVENT_NONE
    OPERATION = abi.PQC_EVENT_OPERATION  # an awaited call has ended
    SEQUENCE_REVOKED = abi.PQC_EVENT_SEQUENCE_REVOKED  # another call shortened or dropped it
    SEQUENCE_SUSPENDED = abi.PQC_EVENT_SEQUENCE_SUSPENDED  # by another client, or by the sidecar
    NEW_WORKER = abi.PQC_EVENT_NEW_WORKER
    SESSION_LOST = abi.PQC_EVENT_SESSION_LOST  # a new Client is needed
