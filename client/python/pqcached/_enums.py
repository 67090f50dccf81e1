"""The enums of client.h. A member of a later version is one more line."""

from __future__ import annotations

import enum


class DType(enum.IntEnum):
    """Element type of rows and queries. numpy has no bfloat16: see Tensor."""

    F16 = 1
    BF16 = 2
    F32 = 3


class Device(enum.IntEnum):
    CPU = 0
    CUDA = 1  # Unimplemented in this version


class Path(enum.IntEnum):
    """Path by which a client reaches the rows."""

    REMOTE = 0  # by RPC
    LOCAL = 1  # in mapped memory


class PathChoice(enum.IntEnum):
    """Paths that a client may use to reach the rows."""

    ANY = 0  # local if the sidecar offers it, else remote
    ONLY_REMOTE = 1
    ONLY_LOCAL = 2


class LayerKind(enum.IntEnum):
    SELECTED = 1
    FULL = 2  # Unimplemented in this version
    WINDOW = 3  # Unimplemented in this version
    NONE = 4  # nothing is stored


class RopeLayout(enum.IntEnum):
    UNKNOWN = 0
    NONE = 1
    HALF = 2
    INTERLEAVED = 3


class IndexKind(enum.IntEnum):
    DEFAULT = 0  # the cache's
    PQ = 1
    FLAT = 2  # exact scores of all keys


class GroupRule(enum.IntEnum):
    """GQA head aggregation: combines the scores of the query heads of one kv head."""

    SUM_SOFTMAX = 0
    MAX_SOFTMAX = 1
    MEAN_LOGIT = 2
    MAX_LOGIT = 3


class BudgetKind(enum.IntEnum):
    RATIO = 0
    COUNT = 1
    MASS = 2  # Unimplemented in this version


class GpuPolicy(enum.IntEnum):
    """Eviction policy of the block cache."""

    FREQUENCY = 0  # as LFU, but a new block must have been requested 1.25 times as often
    LRU = 1
    LFU = 2


class RowPart(enum.IntEnum):
    """A row is [key | value]."""

    ROW = 0
    KEY = 1
    VALUE = 2
