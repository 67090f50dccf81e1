"""Options and results of calls, as plain values. Shapes are in brackets; counts are tokens unless
named otherwise.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import _abi as abi
from ._arguments import MAX_TOKENS, member, number, text, uint32, uint64
from ._arrays import ArrayLike, Tensor, floats_to_read, floats_to_write, tensor, tensor_to_write
from ._enums import BudgetKind, Device, DType, GroupRule, IndexKind, LayerKind, LogBase, RopeLayout, SubspaceLayout, Verdict
from ._errors import InvalidArgument
from ._library import check, clear_error_text, library


@dataclasses.dataclass(frozen=True)
class Index:
    """The index that scores the tokens. The default is the default_index of open_cache."""

    kind: IndexKind = IndexKind.DEFAULT
    subspaces: int = 0  # pq: m, divides key_dim, at most half of it; 1, 2, 4, 8, 16 are fast
    bits: int = 0  # pq: b in 1..8; 4..8 are fast
    layout: SubspaceLayout = SubspaceLayout.PAIRS  # pq
    plugin: Tuple[int, ...] = ()  # what make or Client.make_index has made

    @staticmethod
    def pq(subspaces: int, bits: int, layout: SubspaceLayout = SubspaceLayout.PAIRS) -> "Index":
        return Index(IndexKind.PQ, subspaces, bits, layout)

    @staticmethod
    def flat() -> "Index":
        return Index(IndexKind.FLAT)

    @staticmethod
    def make(type: str, **parameters: Union[int, str]) -> "Index":
        """An index of a type by name: `Index.make("pq", subspaces=4, layout="contiguous")`. Parameters
        that are not given have their defaults; Client.index_types lists them.

        Raises InvalidArgument (type: there is no such type; parameters[NAME]: no such parameter, or a
        value that its description does not allow) (pqc_index_make).
        """
        return Index.made_by(library().pqc_index_make, type, parameters)

    @staticmethod
    def made_by(call: Callable[..., int], type: str, parameters: Mapping[str, Union[int, str]]) -> "Index":
        """The result of one of the calls that make an index by its name."""
        given = (abi.IndexParameter * len(parameters))()
        for one, (name, value) in zip(given, parameters.items()):
            one.struct_size = ctypes.sizeof(abi.IndexParameter)
            one.name = text(f"parameters[{name}]", name)
            if isinstance(value, str):
                one.value_name = text(f"parameters[{name}]", value)
            else:
                one.number = uint64(f"parameters[{name}]", value)
        made = abi.Index()
        clear_error_text()
        check(call(text("type", type), given, len(parameters), ctypes.byref(made)))
        kind, words = IndexKind(made.kind), tuple(made.reserved[abi.PQC_INDEX_LAYOUT + 1:])
        return Index(kind, made.subspaces, made.bits, SubspaceLayout(made.reserved[abi.PQC_INDEX_LAYOUT]),
                     words if any(words) else ())

    def c(self) -> abi.Index:
        made = abi.Index(kind=member(IndexKind, "index.kind", self.kind),
                         subspaces=uint32("index.subspaces", self.subspaces), bits=uint32("index.bits", self.bits))
        made.reserved[abi.PQC_INDEX_LAYOUT] = member(SubspaceLayout, "index.layout", self.layout)
        for word, value in enumerate(self.plugin, abi.PQC_INDEX_LAYOUT + 1):
            made.reserved[word] = uint32("index.plugin", value)
        return made


@dataclasses.dataclass(frozen=True)
class IndexParameter:
    """A parameter of an index type: a number in [least, most], or one of `names`."""

    name: str
    text: str  # the meaning
    least: int
    most: int
    default: Union[int, str]
    power_of_two: bool  # only powers of two
    names: Tuple[str, ...]  # empty: a number


@dataclasses.dataclass(frozen=True)
class IndexType:
    """An index type that a sidecar has, as Client.index_types returns it."""

    name: str  # of Index.make
    text: str  # the method
    parameters: Tuple[IndexParameter, ...]
    needs_build: bool  # otherwise it reads rows only

    @staticmethod
    def from_json(answer: Dict[str, Any]) -> "IndexType":
        """Reads an IndexTypeDescription of Admin.ListIndexTypes."""
        return IndexType(answer["name"], answer["text"], tuple(
            IndexParameter(one["name"], one["text"], int(one["least"]), int(one["most"]),
                           one["default_value"].get("name") or int(one["default_value"]["number"]),
                           one["power_of_two"], tuple(one["names"]))
            for one in answer["parameters"]), answer["needs_build"])


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers of one shape. Query head h reads kv head h / (query_heads / kv_heads)."""

    layers: Sequence[int]  # absolute numbers, ascending, < 1024
    kv_heads: int  # 1..256
    query_heads: int  # a multiple of kv_heads, at most 1024
    key_dim: int  # 32..256, a multiple of 8; 0 for LayerKind.VALUES
    value_dim: int  # a multiple of 8, 32..256
    dtype: DType = DType.F16  # dtype of the stored rows; ingested rows may have another
    kind: LayerKind = LayerKind.SELECTED
    softmax_scale: float = 0.0  # 0 = 1 / sqrt(key_dim)
    softcap: float = 0.0  # 0 = none
    rope_layout: RopeLayout = RopeLayout.UNKNOWN
    rope_theta: float = 0.0
    rotary_dim: int = 0
    window_tokens: int = 0  # LayerKind.WINDOW: at least 1; 0 for other kinds

    def __post_init__(self) -> None:
        for name, kind in (("kind", LayerKind), ("dtype", DType), ("rope_layout", RopeLayout)):
            # accepts an int
            object.__setattr__(self, name, member(kind, name, getattr(self, name)))

    def c(self) -> abi.LayerGroup:
        layers = [uint32("layers", layer) for layer in self.layers]
        return abi.LayerGroup(
            kind=self.kind, layers=(ctypes.c_uint32 * len(layers))(*layers),
            layer_count=len(layers), kv_heads=uint32("kv_heads", self.kv_heads),
            query_heads=uint32("query_heads", self.query_heads), key_dim=uint32("key_dim", self.key_dim),
            value_dim=uint32("value_dim", self.value_dim), dtype=self.dtype,
            softmax_scale=number("softmax_scale", self.softmax_scale), softcap=number("softcap", self.softcap),
            rope_layout=self.rope_layout, rope_theta=number("rope_theta", self.rope_theta), rotary_dim=uint32("rotary_dim", self.rotary_dim),
            window_tokens=uint32("window_tokens", self.window_tokens))


@dataclasses.dataclass(frozen=True)
class Rank:
    """Part of a model that a process has: each rank opens the cache of one name with its own layers
    and kv heads.
    """

    group: str  # one name for all ranks, at most 128 bytes
    rank: int
    rank_count: int
    kv_head_begin: int = 0  # first of its kv heads in the model
    layer_begin: int = 0  # its layers have numbers at or above this


@dataclasses.dataclass(frozen=True)
class Selection:
    """Choice of tokens. With n = query_position + 1 tokens of context, the engine itself attends to
    the sink [0, sink_tokens) and the window [n - window_tokens, n); the best of the other tokens,
    without `excluded`, are selected. Give one budget: `ratio` or `token_count`, which count all
    three, `retrieved_tokens`, or `attention_mass`.

    Raises InvalidArgument when none or several are given.
    """

    ratio: Optional[float] = None  # in (0, 1], of n
    # in [sink + window + 1, number of tokens that may be attended to]
    token_count: Optional[int] = None
    sink_tokens: int = 0
    window_tokens: int = 0
    index: Index = Index()
    group_rule: GroupRule = GroupRule.SUM_SOFTMAX
    # Ranges [begin, end), ascending, disjoint, at most 16: masked, neither attended to nor counted.
    excluded: Sequence[Tuple[int, int]] = ()
    # selected tokens, at least 1; all candidates when there are fewer
    retrieved_tokens: Optional[int] = None
    # of k, candidates that the index proposes and that are scored exactly: in [1, 8]; 0 = off
    rerank_factor: float = 0
    # attention also estimates the candidates that are not selected, by an index of type clusters
    tail_estimate: bool = False
    # the share of the attention, in (0, 1], that sink, window and selected tokens are to have by
    # estimate; there are then least_tokens to most_tokens (0: all candidates) selected ones
    attention_mass: Optional[float] = None
    least_tokens: int = 0
    most_tokens: int = 0

    def __post_init__(self) -> None:
        if [self.ratio, self.token_count, self.retrieved_tokens, self.attention_mass].count(None) != 3:
            raise InvalidArgument("selection: give one of ratio, token_count, retrieved_tokens and attention_mass")
        self.c()

    def set_count(self, group: LayerGroup) -> int:
        """Returns the number of sets of tokens in a layer of the group."""
        return group.query_heads if self.group_rule == GroupRule.PER_QUERY_HEAD else group.kv_heads

    def c(self) -> abi.Selection:
        made: Optional[abi.Selection] = self.__dict__.get("_c")
        if made is None:
            made = self._to_c()
            object.__setattr__(self, "_c", made)
        return made

    def __getstate__(self) -> Dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_c"}

    def _to_c(self) -> abi.Selection:
        ranges = [abi.TokenRange(uint64("excluded.begin", begin), uint64("excluded.end", end))
                  for begin, end in self.excluded]
        c = abi.Selection(index=self.index.c(), group_rule=member(GroupRule, "group_rule", self.group_rule),
                          sink_tokens=uint64("sink_tokens", self.sink_tokens),
                          window_tokens=uint64("window_tokens", self.window_tokens), excluded_count=len(ranges),
                          rerank_factor=number("rerank_factor", self.rerank_factor), tail_estimate=int(bool(self.tail_estimate)),
                          least_tokens=uint64("least_tokens", self.least_tokens), most_tokens=uint64("most_tokens", self.most_tokens))
        if ranges:
            c.excluded = (abi.TokenRange * len(ranges))(*ranges)
        if self.token_count is not None:
            c.budget, c.token_count = BudgetKind.COUNT, uint64("token_count", self.token_count)
        elif self.retrieved_tokens is not None:
            c.budget, c.token_count = BudgetKind.RETRIEVED, uint64("retrieved_tokens", self.retrieved_tokens)
        elif self.attention_mass is not None:
            c.budget, c.attention_mass = BudgetKind.MASS, number("attention_mass", self.attention_mass)
        else:
            c.budget, c.ratio = BudgetKind.RATIO, number("ratio", self.ratio)
        return c

    def max_tokens(self, context_tokens: int) -> int:
        """Returns an upper bound of the selected tokens per kv head."""
        limit = min(context_tokens, MAX_TOKENS)
        if self.token_count is not None:
            return min(limit, self.token_count)
        if self.retrieved_tokens is not None:
            return min(limit, self.retrieved_tokens)
        if self.attention_mass is not None:
            return min(limit, self.most_tokens or limit)
        ratio = number("ratio", self.ratio)
        return min(limit, int(ratio * limit) + 1) if 0 < ratio <= 1 else 0


@dataclasses.dataclass(frozen=True)
class BuildProgress:
    """Progress of one layer of a build, after an iteration or when it is done."""

    layer: int
    layers_done: int
    layer_count: int
    codebook_generation: int
    codebook_generation_count: int
    iterations: int
    inertia: float  # mean squared distance of the keys to their centroids
    seconds: float  # since the build began
    index_bytes: int  # of this layer
    codebook_bytes: int  # of this layer


@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    token_count: int  # complete over all stored layers
    row_bytes: int  # content of the stored rows
    index_bytes: int  # bytes of codes and counts
    codebook_bytes: int  # centroids
    used_bytes: int  # memory used in the pool
    segment_count: int
    index_count: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """Whether a request fits into a cache, as allocation would decide it."""

    verdict: Verdict
    needed_bytes: int  # memory of the request's rows and index
    bytes_to_evict: int  # with FITS_AFTER_EVICTION
    shortfall_bytes: int  # with FITS_LATER and FITS_NEVER
    limit_bytes: int  # bytes that the cache may use at present
    retry_after_ms: int  # with FITS_LATER: when to ask again

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", Verdict(self.verdict))


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a client knows of a sequence without an RPC. Fields that begin with is_ or has_ are 0 or 1."""

    passed_tokens: int  # those of finished steps included whose rows are still being sent
    stored_tokens: int  # leading tokens whose rows are stored in all layers
    indexed_tokens: int  # leading tokens that the index covers in all layers; local path only
    layer_count: int  # stored layers
    layers_ready: int  # of them, those that the index covers, or that need none; local path only
    has_index: int  # local path only
    is_changing: int  # a call of this client changes the sequence
    is_suspended: int
    is_revoked: int  # another call shortened or dropped the sequence, or its lease has expired
    is_unattached: int  # rows and index may be out of date until the next calls
    is_restarting: int  # no worker answers at present
    is_lost: int  # a new client is needed
    row_status: int  # Status of rows of finished steps that were refused; 0 = none


@dataclasses.dataclass(frozen=True)
class ClientCounts:
    """Counts of a client's RPCs and resources."""

    rpcs: int  # RPCs that a call of this client waited for
    background_rpcs: int  # RPCs that no call waited for
    mapped_bytes: int  # mapped pool memory
    lease_count: int


def from_c(kind: Any, c: Any) -> Any:
    """Returns the plain value of a struct whose fields have the same names."""
    return kind(**{field.name: getattr(c, field.name) for field in dataclasses.fields(kind)})


@dataclasses.dataclass(frozen=True)
class Selected:
    """Tokens that a selection chose."""

    count: int  # per set
    kv_heads: int  # sets; with GroupRule.PER_QUERY_HEAD one for each query head
    sink_tokens: int  # part of the context that the engine attends to itself
    window_tokens: int
    # uint32 [kv_heads, count], ascending; None if not requested
    positions: Optional[np.ndarray[Any, Any]] = None


@dataclasses.dataclass(frozen=True)
class Attention:
    """A partial attention over the selected tokens."""

    # [query_heads, value_dim], or [tokens, query_heads, value_dim] of attend_range; zeros where
    # nothing was selected
    output: Any
    # [query_heads], or [tokens, query_heads]: log-sum-exp of the scaled logits; -inf where nothing
    # was selected
    lse: Any
    selected: Selected

    def merge(self, output: Any, lse: Any) -> "Attention":
        """Merges the attention over another, disjoint set of tokens into this one, in place;
        returns self.

        output, lse: contiguous float32 of the same shapes: the engine's own part over sink and
        window.
        """
        merge(self.output, self.lse, output, lse)
        return self


@dataclasses.dataclass(frozen=True)
class Scores:
    logits: np.ndarray[Any, Any]  # float32 [query_heads, tokens], scaled
    max: np.ndarray[Any, Any]  # float32 [query_heads]
    sum_exp: np.ndarray[Any, Any]  # float32 [query_heads], of exp(logit - max)


def merge(output_a: Any, lse_a: Any, output_b: Any, lse_b: Any) -> None:
    """Merges partial attention b into a, in place: lse_a = log(exp(lse_a) + exp(lse_b)), outputs
    weighted accordingly.

    output_a, output_b: float32 [..., dim]; lse_a, lse_b: float32 [...]; contiguous numpy arrays or
    CPU torch tensors; those of a writable. The token sets must be disjoint; -inf in an lse means no
    tokens.
    Raises TypeError (kind of array, dtype), InvalidArgument (shapes, not contiguous, not writable).
    """
    shape = tuple(getattr(output_a, "shape", ()))
    if not shape:
        raise InvalidArgument("output_a: must have at least one dimension")
    addresses = (floats_to_write("output_a", output_a, shape), floats_to_write("lse_a", lse_a, shape[:-1]),
                 floats_to_read("output_b", output_b, shape), floats_to_read("lse_b", lse_b, shape[:-1]))
    rows = 1
    for size in shape[:-1]:
        rows *= size
    clear_error_text()
    check(library().pqc_merge(uint32("rows", rows), uint32("dim", shape[-1]), *addresses))


def merge_tensors(output_a: Any, lse_a: Any, output_b: Any, lse_b: Any, *, log_base_a: LogBase = LogBase.NATURAL,
                  log_base_b: LogBase = LogBase.NATURAL, sink_logits: Optional[ArrayLike] = None) -> None:
    """Merges partial attention b into a like merge, for arrays of any strides of float32, float16
    or bfloat16: outputs [tokens, heads, dim], log-sum-exps [tokens, heads] in the given bases.

    sink_logits: the model's learned attention sinks, [heads]: exp(sink_logits) is added to the
    denominator of each head's softmax. Of several merges, exactly one has them.

    Raises TypeError (kind of array, dtype), InvalidArgument (shapes, not writable).
    """
    partials = Partials(output_a, lse_a, output_b, lse_b, log_base_a, log_base_b, sink_logits, Device.CPU)
    clear_error_text()
    check(library().pqc_merge_tensors(ctypes.byref(partials.a), ctypes.byref(partials.b)))


class Partials:
    """The two partial attentions of a merge as structs of the C ABI, and the tensors behind them."""

    __slots__ = ("a", "b", "_tensors")

    def __init__(self, output_a: Any, lse_a: Any, output_b: Any, lse_b: Any, log_base_a: LogBase,
                 log_base_b: LogBase, sink_logits: Optional[ArrayLike], device: Device) -> None:
        shape = tuple(getattr(output_a, "shape", ()))
        if len(shape) != 3:
            raise InvalidArgument.about("output_a.shape", f"{shape}, must be [tokens, heads, dim]")
        tensors = [tensor_to_write("output_a", output_a, shape, device),
                   tensor_to_write("lse_a", lse_a, shape[:2], device),
                   tensor("output_b", output_b), tensor("lse_b", lse_b)]

        def partial(output: Tensor, lse: Tensor, log_base: LogBase) -> abi.Partial:
            return abi.Partial(output=output.c, lse=lse.c, lse_base=member(LogBase, "log_base", log_base))

        self.a, self.b = partial(tensors[0], tensors[1], log_base_a), partial(tensors[2], tensors[3], log_base_b)
        if sink_logits is not None:
            tensors.append(tensor("sink_logits", sink_logits))
            self.a.sink_logits = ctypes.pointer(tensors[-1].c)
        self._tensors = tensors
