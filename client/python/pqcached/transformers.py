"""Attention implementation "pqcached" for Hugging Face Transformers: prefill ingests, decode
attends.

    import pqcached
    from pqcached.transformers import Session, register

    register()
    model.set_attn_implementation("pqcached")
    with pqcached.Client(endpoint) as client, Session(
            client, model.config, model_fingerprint="my-model-1", capacity_bytes=4 << 30,
            selection=pqcached.Selection(ratio=0.1, sink_tokens=16, window_tokens=64)):
        model.generate(**inputs)

A pass over several tokens uses exact attention (SDPA), and its rows are stored in pqcached, one
sequence per row of the batch. A pass over one token attends to sink and window itself, requests the
attention over the other tokens from pqcached, and merges the two by log-sum-exp.

The module serves to measure methods on real models, and as a pattern for engines. The model's own
cache keeps all rows, since prefill and the window read them; an engine that wants to save the
memory keeps only sink and window.

Needs transformers with AttentionInterface and AttentionMaskInterface (4.53 or later), its
DynamicCache, and batch rows in step: no padding, no beam search. Layers that do not have full
attention stay exact.
"""

from __future__ import annotations

import contextvars
import dataclasses
from types import TracebackType
from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import torch

from ._client import Cache, Client
from ._enums import DType, IndexKind
from ._errors import FailedPrecondition, InvalidArgument, Unimplemented
from ._options import Index, LayerGroup, Selection
from ._sequence import Sequence

NAME = "pqcached"

_DTYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}
# Each append is one message: all layers' rows together must stay well below max_message_bytes.
_APPEND_BYTES = 4 << 20

_active: contextvars.ContextVar[Optional["Session"]] = contextvars.ContextVar("pqcached_session", default=None)


def register(name: str = NAME) -> None:
    """Registers `name` as an attention implementation of transformers, with the masks of "sdpa"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: Optional[torch.Tensor], **kwargs: Any) -> Tuple[torch.Tensor, None]:
    """Attention function that transformers calls per layer. query [batch, query_heads, tokens,
    dim], key and value [batch, kv_heads, all tokens, dim]; returns [batch, tokens, query_heads,
    value_dim].

    Raises FailedPrecondition outside of a Session, Unimplemented for the cases that the module's
    docstring excludes.
    """
    session = _active.get()
    if session is None:
        raise FailedPrecondition(f"attention implementation {NAME!r}: use the model inside `with Session(...):`")
    return session.attend(module, query, key, value, attention_mask, **kwargs)


def _exact(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attention_mask: Optional[torch.Tensor], **kwargs: Any) -> Tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output, None


def _full_attention_layers(config: Any) -> List[int]:
    config = getattr(config, "text_config", config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


def _masks_nothing(mask: Optional[torch.Tensor]) -> bool:
    """Returns True if the last query may attend to all tokens, as it does without padding."""
    if mask is None:
        return True
    last = mask[..., -1, :] if mask.dim() == 4 else mask
    return bool(last.all() if last.dtype == torch.bool else (last == 0).all())


def _attend_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> Tuple[torch.Tensor,
                                                                                               torch.Tensor]:
    """Attention of one token over all of `key`: float32 output [batch, query_heads, dim], lse [batch, query_heads]."""
    batch, query_heads, _, dim = query.shape
    grouped = query.float().view(batch, key.shape[1], -1, dim)
    logits = torch.matmul(grouped, key.float().transpose(2, 3)) * scaling
    lse = torch.logsumexp(logits, -1)
    output = torch.matmul(torch.exp(logits - lse.unsqueeze(-1)), value.float())
    return output.reshape(batch, query_heads, -1), lse.reshape(batch, query_heads)


def _merged(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    total = torch.logaddexp(lse, other_lse)
    return (output * torch.exp(lse - total).unsqueeze(-1) + other * torch.exp(other_lse - total).unsqueeze(-1))


class Session:
    """Store of the rows of a model's generations, for the `with` block in which it is used. One
    thread at a time.

    client: must stay open longer than the session. config: the model's. model_fingerprint: must
    include everything that affects K and V. capacity_bytes: of the cache, which exists under
    `cache_name` until the sidecar ends.
    selection: the tokens that decoding attends to; window_tokens must be at least 1, for the new
    token itself.
    index: built when a context is longer than sink, window and `index_tokens`; shorter contexts are
    scored exactly (flat). Index.flat() builds none. The selection's own index is not used.
    exact: attention over several tokens, with the signature of transformers; SDPA when not given.
    """

    def __init__(self, client: Client, config: Any, *, model_fingerprint: str, capacity_bytes: int,
                 selection: Selection, index: Index = Index.pq(4, 8), index_tokens: int = 1024,
                 cache_name: str = "transformers", exact: Optional[Callable[..., Any]] = None) -> None:
        if selection.window_tokens < 1:
            raise InvalidArgument("selection.window_tokens: must be at least 1: the new token itself")
        self._client, self._selection, self._index, self._exact = client, selection, index, exact or _exact
        self._with_index = dataclasses.replace(selection, index=index)
        self._with_flat = dataclasses.replace(selection, index=Index.flat())
        self._index_tokens = index_tokens
        self._cache_name, self._model_fingerprint, self._capacity_bytes = cache_name, model_fingerprint, capacity_bytes
        self._layers = _full_attention_layers(config)
        if not self._layers:
            raise InvalidArgument("config: no layer has full attention")
        self._cache: Optional[Cache] = None
        self._scaling = 0.0
        self._value_dim = 0
        self._token: Optional[contextvars.Token[Optional["Session"]]] = None
        self._forget()

    def __enter__(self) -> "Session":
        self._token = _active.set(self)
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        if self._token is not None:
            _active.reset(self._token)
            self._token = None
        self._forget()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    @property
    def sequences(self) -> List[Sequence]:
        """Sequences of the generation in progress, one per row of the batch."""
        return self._sequences

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: Optional[torch.Tensor], *, scaling: Optional[float] = None,
               **kwargs: Any) -> Tuple[torch.Tensor, None]:
        """Computes one layer of one pass; see attention_forward."""
        layer = module.layer_idx
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        if layer not in self._layers or kwargs.get("sliding_window") is not None:
            output, _ = self._exact(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            return output, None
        self._check(module, attention_mask, scaling, kwargs)
        new, total = query.shape[2], key.shape[2]
        self._begin(layer, query, key, value, total - new, scaling)
        if layer == self._layers[0] and new == 1:
            self._build_when_due(total - 1)
        self._store(layer, key, value, total - new)
        if new > 1 or total == 1:
            output, _ = self._exact(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        else:
            output = self._decode(layer, query, key, value, scaling)
        if layer == self._layers[-1]:
            self._append(total - new)
        return output, None

    def _check(self, module: Any, mask: Optional[torch.Tensor], scaling: float, kwargs: Dict[str, Any]) -> None:
        for name in ("softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise Unimplemented(f"{name}: attention with it is not supported in this version")
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise Unimplemented("is_causal: only causal attention")
        if kwargs.get("dropout"):
            raise Unimplemented("dropout: for inference only")
        if not _masks_nothing(mask):
            raise Unimplemented("attention_mask: padded batches and static caches are not supported in this version")
        if self._scaling and scaling != self._scaling:
            raise Unimplemented(f"scaling: {scaling}, but {self._scaling} in the layers before")

    # ---- Writing rows

    def _forget(self) -> None:
        for sequence in getattr(self, "_sequences", []):
            sequence.close()
        self._sequences: List[Sequence] = []
        self._stored = dict.fromkeys(self._layers, 0)
        self._pending: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
        self._indexed = False
        # of the first layer, to detect rows that have moved
        self._last_keys: Optional[torch.Tensor] = None

    def _begin(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int,
               scaling: float) -> None:
        """Prepares the sequences for this pass, whose tokens begin at `first`."""
        if layer == self._layers[0]:
            if first == 0:
                self._forget()
                self._open_cache(query, key, value, scaling)
            elif first < self._stored[layer]:
                self._truncate(first)
            elif first == self._stored[layer] and self._last_keys is not None and not torch.equal(
                    self._last_keys, key[:, :, first - 1]):
                raise FailedPrecondition("key: its rows are not those of the pass before; beam search, and two "
                                         "generations at once in one Session, are not in this version")
            self._last_keys = key[:, :, -1].detach().clone()
        if self._stored[layer] != first or len(self._sequences) != key.shape[0]:
            raise FailedPrecondition(
                f"key: new tokens begin at {first} in {key.shape[0]} rows, but {self._stored[layer]} tokens are stored "
                f"of {len(self._sequences)}; the session has to see a generation from its first token on")

    def _open_cache(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> None:
        if self._cache is None:
            if key.dtype not in _DTYPES:
                raise TypeError(f"key: dtype {key.dtype}; must be float16, bfloat16 or float32")
            group = LayerGroup(self._layers, kv_heads=key.shape[1], query_heads=query.shape[1], key_dim=key.shape[3],
                               value_dim=value.shape[3], dtype=_DTYPES[key.dtype], softmax_scale=scaling)
            self._cache = self._client.open_cache(self._cache_name, model_fingerprint=self._model_fingerprint,
                                                  groups=[group], capacity_bytes=self._capacity_bytes)
            self._scaling, self._value_dim = scaling, value.shape[3]
        cache = self._cache
        self._sequences = [cache.create_sequence() for _ in range(key.shape[0])]

    def _truncate(self, first: int) -> None:
        """Truncates the sequences after the model's cache was cropped."""
        for sequence in self._sequences:
            sequence.truncate(first)
        self._stored = dict.fromkeys(self._layers, first)
        self._pending.clear()

    @staticmethod
    def _rows(states: torch.Tensor, row: int, begin: int, end: int) -> torch.Tensor:
        """Returns [kv_heads, all tokens, dim] of one batch row as [tokens, kv_heads, dim]; a view
        on the CPU.
        """
        return states[row, :, begin:end].detach().transpose(0, 1).cpu()

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor, first: int) -> None:
        total = key.shape[2]
        if self._indexed:  # append takes all layers at once
            self._pending[layer] = (key, value)
        else:
            for row, sequence in enumerate(self._sequences):
                sequence.ingest(layer, first, self._rows(key, row, first, total), self._rows(value, row, first, total))
        self._stored[layer] = total

    def _build_when_due(self, stored: int) -> None:
        """Builds the index when it is due, before a decoding pass stores its rows: a build ends the
        prefill of all layers.
        """
        shortest = self._selection.sink_tokens + self._selection.window_tokens + self._index_tokens
        if self._indexed or self._index.kind == IndexKind.FLAT or stored <= shortest:
            return
        for sequence in self._sequences:
            sequence.build_index(self._index, sink_tokens=self._selection.sink_tokens)
        self._indexed = True

    def _append(self, first: int) -> None:
        if not self._pending:
            return
        if len(self._pending) != len(self._layers):
            raise FailedPrecondition("layers: not all of the config's layers were called in this pass")
        key, value = self._pending[self._layers[0]]
        total = key.shape[2]
        token_bytes = len(self._layers) * key.shape[1] * (key.shape[3] + value.shape[3]) * key.element_size()
        step = max(1, _APPEND_BYTES // token_bytes)
        for row, sequence in enumerate(self._sequences):
            for begin in range(first, total, step):
                end = min(total, begin + step)
                sequence.append(begin, {layer: (self._rows(k, row, begin, end), self._rows(v, row, begin, end))
                                        for layer, (k, v) in self._pending.items()})
        self._pending.clear()

    # ---- Attention

    def _decode(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                scaling: float) -> torch.Tensor:
        total = key.shape[2]
        sink, window = self._selection.sink_tokens, self._selection.window_tokens
        if total <= sink + window:
            output, _ = _attend_all(query, key, value, scaling)
        else:
            begin = total - window
            output, lse = _attend_all(query, torch.cat([key[:, :, :sink], key[:, :, begin:]], 2),
                                torch.cat([value[:, :, :sink], value[:, :, begin:]], 2), scaling)
            middle, middle_lse = self._middle(layer, query, total)
            output = _merged(output, lse, middle.to(output.device), middle_lse.to(lse.device))
        return output.to(query.dtype).unsqueeze(1)

    def _middle(self, layer: int, query: torch.Tensor, total: int) -> Tuple[torch.Tensor, torch.Tensor]:
        terms = self._with_index if self._indexed else self._with_flat
        queries = query[:, :, 0].detach().cpu()
        shape = (len(self._sequences), query.shape[1])
        output = torch.empty(*shape, self._value_dim, dtype=torch.float32, device="cpu")
        lse = torch.empty(*shape, dtype=torch.float32, device="cpu")
        for row, sequence in enumerate(self._sequences):
            sequence.attend(layer, total - 1, queries[row], terms, out=(output[row], lse[row]))
        return output, lse
