"""PqcCache: a DynamicCache whose layers with full attention have their rows in the sidecar."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from types import TracebackType
from typing import Any, Dict, List, Optional, Sequence as SequenceOf, Type

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from .._client import Cache, Client
from .._enums import DType, IndexKind, LayerKind
from .._errors import FailedPrecondition, InvalidArgument, Unimplemented
from .._model_config import groups_of
from .._names import TokenNames
from .._options import Index, LayerGroup, Selection
from .._sequence import Sequence
from . import _hooks, _versions
from ._layer import PqcLayer
from ._passes import STEP_TOKENS, Buffers, ExactPass, Pass, StepPass
from ._rows import Row

_DTYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return config if get is None else get(decoder=True)


def _refuse(config: Any) -> None:
    """Refuses models whose cache would have more than causal rows of its own layers."""
    if getattr(config, "is_encoder_decoder", False):
        raise Unimplemented("config.is_encoder_decoder: cross attention cannot be served")
    text = _text_config(config)
    if getattr(text, "num_kv_shared_layers", 0) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise Unimplemented("config.num_kv_shared_layers: layers that share keys and values cannot be served")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise Unimplemented("config.is_causal: only causal attention can be served")


class PqcCache(DynamicCache):  # type: ignore[misc]
    """Cache of one generation, or of one batch of them, for generate(past_key_values=...).

    client: must stay open longer than the cache. config: the model's.
    selection: the tokens that decoding attends to; window_tokens is at least 1. Its own index is not
    used, but `index`: rows with fewer than index_tokens selectable tokens are attended to as a whole,
    and so are longer ones until their index is ready; with wait_for_index the first token waits for
    it. The clusters that its tail_estimate needs are built behind the index. A selection of all
    tokens (ratio=1) needs no index.
    model_fingerprint: includes everything that affects K and V. Prompts share rows (begin()) only
    when it is given.
    cache_name: of the cache in the sidecar, which remains when this object is closed; by default each
    fingerprint has one. capacity_bytes: of that cache; 0 = it grows within the tenant's quota.
    dtype: of the stored rows; by default that of the model's keys.

    One thread at a time. Closing the cache drops its sequences. copy.deepcopy makes a fork, which
    shares the rows.

    Raises Unimplemented for models that cannot be served, and InvalidArgument, by name.
    """

    def __init__(self, client: Client, config: Any, *, selection: Selection, index: Index = Index.pq(4, 8),
                 index_tokens: int = 1024, wait_for_index: bool = False, model_fingerprint: str = "",
                 cache_name: str = "", capacity_bytes: int = 0, dtype: Optional[torch.dtype] = None) -> None:
        _refuse(config)
        self._versions = _versions.installed()
        super().__init__(config=config)
        if selection.window_tokens < 1:
            raise InvalidArgument.about("selection.window_tokens", "must be at least 1: the new token itself")
        if selection.excluded:
            raise InvalidArgument.about("selection.excluded", "cannot be given: rows have padding of their own")
        self.client, self._config, self._text = client, config, _text_config(config)
        takes_all = selection.ratio is not None and selection.ratio >= 1
        self._index = Index.flat() if takes_all else index
        self.step_selection = dataclasses.replace(selection, index=self._index,
                                                  tail_estimate=selection.tail_estimate and not takes_all)
        self.indexes = [] if self._index.kind == IndexKind.FLAT else [self._index]
        if self.step_selection.tail_estimate:
            self.indexes.append(Index.make("clusters"))
        self._index_tokens, self._waits = index_tokens, wait_for_index
        self._fingerprint, self._name, self._capacity = model_fingerprint, cache_name, capacity_bytes
        self._dtype = dtype
        self.retry_seconds = 10.0
        self._places = self._replace_layers()
        self._group = self._find_group(DType.F32)
        self._others = [layer for layer in self.layers if not isinstance(layer, PqcLayer)]
        self._store: Optional[Cache] = None
        self._forget()

    def _forget(self) -> None:
        self.rows: List[Row] = []
        self.length = 0  # of complete passes, padding included
        self.buffers: Optional[Buffers] = None
        self._pass: Optional[Pass] = None
        self._expected: Optional[Dict[str, Any]] = None
        self._is_broken = False

    def _replace_layers(self) -> Dict[int, int]:
        """Returns the places of the stored layers among themselves, by their numbers."""
        numbers = [number for number, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        if not numbers:
            raise InvalidArgument.about("config", "no layer has full attention")
        for number in numbers:
            self.layers[number] = PqcLayer(self, number)
        return {number: place for place, number in enumerate(numbers)}

    def _find_group(self, dtype: DType) -> LayerGroup:
        for group in groups_of(self._text, dtype=dtype):
            if group.kind == LayerKind.SELECTED and set(self._places) <= set(group.layers):
                return dataclasses.replace(group, layers=list(self._places))
        raise Unimplemented("config: its layers with full attention are not of one shape")

    # ---- Life

    def __enter__(self) -> "PqcCache":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()

    def close(self) -> None:
        """Drops the sequences. Prompts that begin() has named stay as cached prefixes."""
        self.reset()
        if self._store is not None:
            self._store.close()
            self._store = None

    def reset(self) -> None:
        """Empties the cache, for another generation."""
        if self._pass is not None and isinstance(self._pass, StepPass):
            self._pass.abandon()
        for row in self.rows:
            row.drop()
        self._forget()
        # Earlier versions' reset() of a layer only fills its rows with zeros.
        fresh = DynamicCache(config=self._config).layers
        self.layers: List[Any] = [layer if isinstance(layer, PqcLayer) else new for layer, new in zip(self.layers, fresh)]
        self._others = [layer for layer in self.layers if not isinstance(layer, PqcLayer)]

    @property
    def sequences(self) -> List[Optional[Sequence]]:
        """The sequence of each row of the batch; None for a row that has padding only."""
        return [row.sequence for row in self.rows]

    def _open(self, dtype: Optional[torch.dtype]) -> Cache:
        if self._store is None:
            dtype = self._dtype or dtype or torch.float32
            if dtype not in _DTYPES:
                raise InvalidArgument.about("dtype", f"{dtype}, must be float32, float16 or bfloat16")
            self._group = dataclasses.replace(self._group, dtype=_DTYPES[dtype])
            print_of = self._fingerprint_of()
            key = hashlib.sha256(f"{print_of} {self._group}".encode()).hexdigest()[:16]
            self._store = self.client.open_cache(
                self._name or f"transformers-{key}", model_fingerprint=print_of, groups=[self._group],
                capacity_bytes=self._capacity)
        return self._store

    def _fingerprint_of(self) -> str:
        if self._fingerprint:
            return self._fingerprint
        return hashlib.sha256(json.dumps(self._config.to_dict(), default=str, sort_keys=True).encode()).hexdigest()

    # ---- Prompts that are stored already

    def begin(self, input_ids: torch.Tensor, attention_mask: Optional[torch.Tensor] = None) -> int:
        """Begins an empty cache with the stored part of a prompt, which is then not computed again;
        returns the number of leading columns of input_ids that it has.

        generate(input_ids, ...) continues behind them. The prompt's rows are stored under its token
        ids, and later prompts that begin alike share them. A model that has layers of other kinds
        computes all of its prompt, and gets 0.

        Raises InvalidArgument without a model_fingerprint, FailedPrecondition when the cache is not
        empty.
        """
        if not self._fingerprint:
            raise InvalidArgument.about("model_fingerprint", "must be given to share prompts")
        if self.length or self.rows:
            raise FailedPrecondition("begin: the cache is not empty; reset() empties it")
        batch, columns = int(input_ids.shape[0]), int(input_ids.shape[1])
        pads = self._pads(batch, columns, attention_mask)
        if max(pads) >= columns:
            raise InvalidArgument.about("attention_mask", "a row has no token")
        store = self._open(getattr(self._text, "dtype", None) or getattr(self._text, "torch_dtype", None))
        self.rows = [Row(pad=pad) for pad in pads]
        for row, ids in zip(self.rows, on_rows(input_ids)):
            row.ids = ids[row.pad:]
            self._create(row, store, columns - row.pad)
        # The last token of a prompt is computed in any case, and all rows continue at one column.
        length = min(columns - 1, *(row.pad + row.passed for row in self.rows))
        if self._others or any(length <= row.pad for row in self.rows):
            length = 0
        for row in self.rows:
            ids = row.ids
            row.truncate(length - row.pad)
            row.ids = ids
            if row.sequence is None:
                self._create(row, store, columns - row.pad, shares=False)
            elif row.named < len(ids):
                row.sequence.name_tokens(TokenNames(row.named, ids[row.named:]))
                row.named = len(ids)
        self.length = length
        return length

    def name_tokens(self, token_ids: torch.Tensor) -> None:
        """Names the tokens of the cache that have no names yet, those that were generated for example.
        token_ids: [batch, tokens], padding included, as generate() returns them.
        """
        for row, ids in zip(self.rows, on_rows(token_ids)):
            end = min(self.length, len(ids))
            if row.sequence is not None and row.pad + row.named < end:
                row.sequence.name_tokens(TokenNames(row.named, ids[row.pad + row.named:end]))
                row.named = end - row.pad

    def create(self, row: Row, tokens: int) -> None:
        """Makes the sequence of a row whose first tokens come."""
        assert self._store is not None
        self._create(row, self._store, tokens, shares=False)

    def _create(self, row: Row, store: Cache, tokens: int, shares: bool = True) -> None:
        """shares: whether the sequence begins with the stored tokens of its prompt."""
        row.is_live = self._needs_index(tokens) and self._index.kind != IndexKind.FLAT
        live: Dict[str, Any] = {}
        if row.is_live:
            live = {"live_index": True, "index": self._index, "sink_tokens": self.step_selection.sink_tokens}
        row.sequence = store.create_sequence(row.ids if shares else None, **live)
        row.passed, row.named = row.sequence.shared_tokens, 0
        if row.ids is not None and not shares:
            row.sequence.name_tokens(TokenNames(0, row.ids))
        if row.ids is not None:
            row.named = len(row.ids)

    # ---- Indexes

    def _needs_index(self, tokens: int) -> bool:
        return bool(self.indexes) and tokens >= self.step_selection.sink_tokens + self.step_selection.window_tokens + self._index_tokens

    def advance_indexes(self) -> None:
        """Begins indexes that the next step needs."""
        for row in self.rows:
            row.has_decoded = True
            if row.sequence is not None and (row.is_live or self._needs_index(self.length - row.pad)):
                row.advance_indexes(self.indexes, self.step_selection.sink_tokens, self._waits)

    def _complete_indexes(self) -> None:
        """Waits for indexes that forks would lack."""
        for row in self.rows:
            if row.is_live or row.build is not None:
                row.complete_indexes(self.indexes, self.step_selection.sink_tokens)

    # ---- Passes

    @staticmethod
    def _pads(batch: int, columns: int, mask: Optional[torch.Tensor]) -> List[int]:
        """Returns the number of padding tokens of each row; refuses padding that is not on the left."""
        if mask is None:
            return [0] * batch
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < columns:
            raise InvalidArgument.about("attention_mask", f"shape {tuple(mask.shape)}, must be [{batch}, {columns}]")
        seen = mask[:, :columns].bool()
        counts = seen.sum(1).tolist()
        pads = [columns - int(count) for count in counts]
        if any(pads) and bool((seen[:, :-1] & ~seen[:, 1:]).any()):
            raise Unimplemented("attention_mask: padding that is not on the left of all tokens")
        return pads

    def expect_pass(self, batch: int, queries: int, mask: Optional[torch.Tensor]) -> int:
        """Takes the mask of the pass that begins; returns the number of tokens before it."""
        self._expected = {"queries": queries, "pads": self._pads(batch, self.length + queries, mask)}
        return self.length

    def abandon_pass(self) -> None:
        """Ends a pass that an error or an interrupt has left, so that the cache is as before it."""
        if self._pass is None:
            return
        unfinished, self._pass = self._pass, None
        unfinished.abandon()
        self._is_broken = bool(self._others)

    def update_layer(self, layer: PqcLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Takes the rows of new tokens of a layer; the first layer begins a pass."""
        if torch.compiler.is_compiling():
            raise Unimplemented("torch.compile: a model with a PqcCache must not be compiled")
        place = self._places[layer.number]
        if place == 0:
            self.abandon_pass()
            self._begin_pass(key)
        if self._pass is None or self._pass.done != place:
            raise FailedPrecondition(f"layer {layer.number}: its attention is not the next one; is {_hooks.NAME!r} the "
                                     "model's attention implementation?")
        group, shape = self._group, (key.shape[1], key.shape[3], value.shape[3])
        if shape != (group.kv_heads, group.key_dim, group.value_dim):
            raise InvalidArgument.about(f"layer {layer.number}", f"kv heads, key and value dimensions are {shape}, but "
                                        f"{(group.kv_heads, group.key_dim, group.value_dim)} by the config")
        self._pass.update(layer.number, key, value)
        _hooks.expect_attention(_hooks.Updated(self, layer.number, key, value))

    def _begin_pass(self, key: torch.Tensor) -> None:
        if self._text._attn_implementation not in _hooks.NAMES:
            raise FailedPrecondition(f"attn_implementation: {self._text._attn_implementation!r}, must be {_hooks.NAME!r} for "
                                     "a PqcCache; see model.set_attn_implementation")
        if self._is_broken:
            raise FailedPrecondition("past_key_values: a pass has failed, and layers of other kinds may have its tokens; "
                                     "reset() empties the cache")
        expected, self._expected = self._expected, None
        batch, tokens = key.shape[0], key.shape[2]
        if expected is None or expected["queries"] != tokens or len(expected["pads"]) != batch:
            raise Unimplemented("attention_mask: the model has not asked for a causal mask of this pass; masks of four "
                                "dimensions cannot be served")
        self._set_rows(expected["pads"])
        self._open(key.dtype)
        is_step = self.length > 0 and tokens <= STEP_TOKENS and all(row.pad < self.length for row in self.rows)
        self._pass = StepPass(self, tokens) if is_step else ExactPass(self, tokens)

    def _set_rows(self, pads: List[int]) -> None:
        if not self.rows:
            self.rows = [Row() for _ in pads]
        if len(self.rows) != len(pads):
            raise FailedPrecondition(f"input_ids: {len(pads)} rows, but the cache has {len(self.rows)}")
        for i, (row, pad) in enumerate(zip(self.rows, pads)):
            if self.length > row.pad and row.sequence is not None and row.pad != pad:
                raise Unimplemented(f"attention_mask: row {i} has {pad} padding tokens, and had {row.pad} before")
            row.pad = pad

    def attend(self, module: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               mask: Optional[torch.Tensor], scaling: float, named: Any) -> torch.Tensor:
        """Computes the attention of a layer; the last one ends the pass."""
        running = self._pass
        if running is None:
            raise FailedPrecondition("past_key_values: the pass was abandoned")
        group = self._group
        expected = group.softmax_scale or group.key_dim ** -0.5
        if abs(scaling - expected) > 1e-5 * expected or query.shape[1] != group.query_heads:
            raise Unimplemented(f"scaling: {scaling} with {query.shape[1]} query heads, but {expected} with "
                                f"{group.query_heads} by the config")
        if abs((named.get("softcap") or 0.0) - group.softcap) > 1e-5 * max(1.0, group.softcap):
            raise Unimplemented(f"softcap: {named.get('softcap')}, but {group.softcap} by the config")
        output = running.attend(module, layer, query, key, value, mask, scaling, named)
        running.done += 1
        if running.done == len(self._places):
            running.finish()
            self._pass = None
            self.length += running.tokens
        return output

    # ---- Roll-back and batches

    def crop(self, tokens: int) -> None:
        """Removes the last -tokens tokens; versions before 5.19 also take the length to keep. The next
        step or pass makes the sequences shorter, without an RPC of its own.
        """
        self.abandon_pass()
        if tokens > 0 and not self._versions.positive_crop:
            raise ValueError(f"crop({tokens}): must be negative, the number of tokens to remove")
        keeps = tokens > 0 or (tokens == 0 and self._versions.zero_crop_empties)
        length = max(0, min(tokens, self.length) if keeps else self.length + tokens)
        for layer in self._others:
            layer.crop(tokens)
        self.length = length
        for row in self.rows:
            if length <= row.pad:
                row.drop()
            elif row.named > length - row.pad:  # names must not outlive their tokens
                row.truncate(length - row.pad)
        if length == 0:
            self.rows = []

    def _reorder(self, parents: SequenceOf[int]) -> None:
        """Makes row i continue row parents[i]."""
        self.abandon_pass()
        if not self.rows or list(parents) == list(range(len(self.rows))):
            return
        if len(set(parents)) < len(parents):
            self._complete_indexes()
        places = {i: place for place, i in enumerate(i for i, row in enumerate(self.rows) if row.sequence is not None)}
        wanted = [places[parent] for parent in parents if parent in places]
        for i, row in enumerate(self.rows):
            if i not in parents and row.build is not None:
                row.build.close()
        if wanted:
            made = iter(Sequence.reorder([row.sequence for row in self.rows if row.sequence is not None], wanted))
        elif places:
            for row in self.rows:
                row.drop()
        rows, taken = [], set()
        for parent in parents:
            row = self.rows[parent]
            rows.append(dataclasses.replace(row, sequence=next(made) if parent in places else None,
                                            build=row.build if parent not in taken else None))
            taken.add(parent)
        self.rows = rows

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._reorder([int(parent) for parent in beam_idx.tolist()])
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._reorder([i for i in range(len(self.rows)) for _ in range(repeats)])
        for layer in self._others:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._reorder(torch.arange(len(self.rows))[indices.cpu()].tolist())
        for layer in self._others:
            layer.batch_select_indices(indices)

    def fork(self) -> "PqcCache":
        """Returns another cache that continues with the same tokens, whose rows both share."""
        self.abandon_pass()
        self._complete_indexes()
        made = copy.copy(self)
        made.layers = [PqcLayer(made, layer.number) if isinstance(layer, PqcLayer) else copy.deepcopy(layer)
                       for layer in self.layers]
        made._others = [layer for layer in made.layers if not isinstance(layer, PqcLayer)]
        made.buffers = None
        made.rows = [dataclasses.replace(row, build=None, sequence=None if row.sequence is None else row.sequence.fork())
                     for row in self.rows]
        made._store = None
        if self._store is not None:
            made._open(None)
        return made

    def __deepcopy__(self, memo: Any) -> "PqcCache":
        return self.fork()


def on_rows(ids: torch.Tensor) -> List[Any]:
    """Returns the rows of integers as numpy arrays."""
    return list(ids.detach().cpu().numpy())
