"""The connector's half in a worker: loads prefixes into vLLM's blocks, and has the pass that is going on."""

from __future__ import annotations

import functools
from typing import Any, Dict, Mapping, Optional, Set

import torch

from . import log
from .model import Model
from .passes import Pass
from .plan import Beginning, Plan, blocks_of, slots
from .requests import Requests, Stored
from .settings import Settings
from .sidecar import Sidecar

LOADED_TOKENS = 1024  # that are copied at once

_going_on: Optional["Worker"] = None


def going_on() -> Optional["Worker"]:
    """Returns the worker whose pass is going on in this process, if there is one."""
    return _going_on


class Worker:
    """layers: vLLM's attention layers by name."""

    def __init__(self, model: Model, settings: Settings, layers: Mapping[str, Any]) -> None:
        self._model, self._layers = model, layers
        self._sidecar = Sidecar(settings, model.group, model.fingerprint, model.cache, settings.threads or torch.get_num_threads())
        self._requests = Requests(self._sidecar, settings)
        self.counts = self._requests.counts
        self._numbers = {name: number for number, name in enumerate(model.layer_names)}
        self._caches: Dict[str, torch.Tensor] = {}
        self._selection = self._find_selection(settings)
        self._pass: Optional[Pass] = None
        self._to_load: Dict[str, Beginning] = {}
        self._unloaded: Set[int] = set()

    def _find_selection(self, settings: Settings) -> Any:
        """Returns the selection of decode steps; None when vLLM computes the attention of decoding."""
        if settings.decode == "vllm":
            return None
        for name in self._model.layer_names:
            layer = self._layers[name].impl
            unusual = [what for what, is_there in (
                ("a softcap", layer.logits_soft_cap), ("attention sinks", layer.sinks is not None), ("ALiBi", layer.alibi_slopes is not None),
                ("a window", layer.sliding_window != -1), ("shared rows", layer.kv_sharing_target_layer_name),
                ("another scale", abs(layer.scale * layer.head_size ** 0.5 - 1) > 1e-6)) if is_there]
            if unusual:
                log.warn(f"layer {name} has {unusual[0]}: prefixes are stored, and vLLM computes all attention")
                return None
        return settings.selection()

    def register_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        self._caches = dict(caches)
        self._sidecar.connect()

    # ---- A pass

    def begin_pass(self, plan: Plan) -> None:
        global _going_on
        self._requests.begin_pass()
        for names in plan.names:
            self._requests.name(names)
        for request_id in plan.ended:
            self._requests.end(request_id)
        self._to_load = {}
        for beginning in plan.beginnings:
            self._requests.begin(beginning)
            if beginning.loaded_tokens:
                self._to_load[beginning.request_id] = beginning
        self._pass = Pass(plan, self._requests, self._sidecar, self._selection, len(self._numbers))
        _going_on = self

    def load(self) -> None:
        """Loads the prefixes of requests that begin; to be called before the model's first layer."""
        for beginning in self._to_load.values():
            stored = self._requests.find(beginning.request_id)
            load = functools.partial(self._load, beginning, stored)
            if stored is None or not self._requests.call(beginning.request_id, "a prefix is loaded", load):
                self._unloaded.update(blocks_of(beginning.blocks, beginning.local_tokens, beginning.first, self._model.block_tokens))
        self._to_load = {}
        if self._unloaded:
            self._requests.distrust()
        self._requests.loaded()

    def _load(self, beginning: Beginning, stored: Optional[Stored]) -> None:
        assert stored is not None
        group = self._model.group
        places = torch.tensor(slots(beginning.blocks, beginning.local_tokens, beginning.first, self._model.block_tokens), dtype=torch.int64)
        dtype = self._caches[self._model.layer_names[0]].dtype
        size = min(LOADED_TOKENS, beginning.loaded_tokens)
        keys, values = (torch.empty(size, group.kv_heads, group.key_dim, dtype=dtype) for _ in range(2))
        for number, name in enumerate(self._model.layer_names):
            layer = self._layers[name]
            for begin in range(0, beginning.loaded_tokens, size):
                count = min(size, beginning.loaded_tokens - begin)
                first = beginning.local_tokens + begin
                stored.sequence.load((first, first + count), {number: (keys[:count], values[:count])})
                layer.impl.do_kv_cache_update(layer, keys[:count], values[:count], self._caches[name], places[begin:begin + count])
        self.counts.loaded_tokens += beginning.loaded_tokens

    def attend(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, metadata: Any, stock: Any) -> Any:
        """Computes the attention of a layer of the pass that is going on."""
        number = self._numbers.get(layer.layer_name)
        if self._pass is None or number is None:
            return stock()
        return self._pass.attend(number, query, key, value, output, metadata, stock)

    def end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()
            self._pass = None

    def clear(self) -> None:
        global _going_on
        if _going_on is self:
            _going_on = None

    def take_unloaded(self) -> Set[int]:
        """Returns the blocks that were to be loaded in this pass and were not."""
        unloaded, self._unloaded = self._unloaded, set()
        return unloaded

    def close(self) -> None:
        self._requests.close()
        self._sidecar.close()
