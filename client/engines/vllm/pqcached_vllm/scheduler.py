"""The connector's half in the scheduler: asks the sidecar for stored prefixes, and plans the passes."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from typing import AbstractSet, Any, Dict, List, Optional, Tuple

import numpy as np
import pqcached

from .model import Model
from .plan import Plan, Planner, Scheduled, tokens_to_load
from .settings import Settings
from .sidecar import Sidecar

# Time for which an answer about a waiting request holds: vLLM asks again in each pass.
ANSWER_SECONDS = 1.0

AdapterState = Tuple[int, Tuple[Tuple[str, int], ...]]


def adapter_state(path: str) -> AdapterState:
    """Returns the newest time of an adapter's files, and their sizes: they change when it is trained
    again at the same path.
    """
    try:
        with os.scandir(path) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    except OSError:  # the name of a repository
        return 0, ()
    return max((state.st_mtime_ns for _, state in files), default=0), tuple((name, state.st_size) for name, state in files)


@functools.lru_cache(maxsize=1024)
def first_state(path: str, number: int) -> AdapterState:
    """Returns the state at an adapter's first request, when vLLM reads it. number: vLLM's of what it has read."""
    return adapter_state(path)


def extra_key(request: Any) -> Optional[bytes]:
    """Returns what else than tokens the rows depend on; None when they must not be stored."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
        return None
    if request.lora_request is None and request.cache_salt is None:
        return b""
    lora = request.lora_request
    parts: List[Any] = [request.cache_salt]
    if lora is not None:  # load_inplace: vLLM reads it for each request
        state = adapter_state(lora.lora_path) if lora.load_inplace else first_state(lora.lora_path, lora.lora_int_id)
        parts += lora.lora_name, lora.lora_path, state
    return hashlib.sha256(repr(parts).encode()).digest()


class Scheduler:
    """models: one for each rank of tensor parallelism. A prefix is stored when all ranks have it."""

    def __init__(self, models: List[Model], settings: Settings) -> None:
        self._block_tokens = models[0].block_tokens
        self._sidecars = [Sidecar(settings, model.group, model.fingerprint, model.cache, 1) for model in models]
        self._planner = Planner(self._block_tokens)
        self._epoch = b""  # a part of the keys of all prefixes since the last reset
        # Request -> (time, its tokens, stored ones).
        self._answers: Dict[str, Tuple[float, int, int]] = {}
        for sidecar in self._sidecars:
            sidecar.connect()
        self._pool: Any = None
        # Prompts that the pass being planned loads: tokens to the end of their first loaded block.
        self._loading: List[List[int]] = []

    def bind_pool(self, pool: Any) -> None:
        """pool: vLLM's blocks, with its own prefix cache."""
        self._pool = pool

    def unloaded(self, blocks: AbstractSet[int]) -> None:
        """Takes the blocks out of vLLM's prefix cache that were not loaded in the last pass, and
        those behind them. vLLM has put them there before the pass, and keeps them when it
        recomputes: a request that ends before would leave them to later ones.
        """
        if blocks and self._pool is not None:
            self._pool.evict_blocks(self._planner.blocks_from(blocks))

    def reset(self) -> None:
        """Leaves all that is stored to other engines: the weights may have changed. Rows of requests
        that are running end, and those that begin have keys that none had before.
        """
        self._epoch = os.urandom(16)
        self._answers.clear()
        self._planner.forget()

    def _key(self, request: Any) -> Optional[bytes]:
        key = extra_key(request)
        return hashlib.sha256(self._epoch + key).digest() if key is not None and self._epoch else key

    def matched(self, request: Any, local: int) -> Optional[int]:
        """Returns the tokens to load for a request behind `local` ones; None to be asked again for the
        next pass, because the local ones are loaded in this one for another request: when that fails,
        vLLM computes them again for the other request only, and not if it ends before.
        """
        if any(len(ids) <= local and list(request.all_token_ids[:len(ids)]) == ids for ids in self._loading):
            return None
        key = self._key(request)
        if key is None or request.skip_reading_prefix_cache:
            return 0
        tokens = len(request.all_token_ids)
        if tokens <= self._block_tokens:
            return 0
        when, asked, stored = self._answers.get(request.request_id, (0.0, 0, 0))
        if asked != tokens or time.monotonic() - when > ANSWER_SECONDS:
            ids = np.fromiter(request.all_token_ids, np.uint32, tokens)
            stored = min(self._stored(sidecar, ids, key) for sidecar in self._sidecars)
            self._answers[request.request_id] = time.monotonic(), tokens, stored
        return tokens_to_load(stored, tokens, local, self._block_tokens)

    @staticmethod
    def _stored(sidecar: Sidecar, ids: Any, key: bytes) -> int:
        if not sidecar.connect():
            return 0
        assert sidecar.cache is not None
        try:
            return int(sidecar.cache.match_prefix(ids, extra_key=key))
        except pqcached.NotFound as error:
            sidecar.gone(error)
            return 0
        except pqcached.Error as error:
            sidecar.failed(error, "a prefix is looked for")
            return 0

    def allocated(self, request: Any, loaded: int) -> None:
        _, tokens, stored = self._answers.pop(request.request_id, (0.0, 0, 0))
        if loaded > 0:
            local = tokens_to_load(stored, tokens, 0, self._block_tokens) - loaded
            self._loading.append(list(request.all_token_ids[:local + self._block_tokens]))
        self._planner.allocated(request.request_id, request.all_token_ids, self._key(request), loaded)

    def finished(self, request: Any) -> None:
        self._answers.pop(request.request_id, None)
        self._planner.finished(request.request_id)

    def plan(self, output: Any, replaced: Dict[str, Any]) -> Plan:
        """replaced: block tables that have changed as a whole."""
        self._loading.clear()
        cached = output.scheduled_cached_reqs
        begun = [Scheduled(one.req_id, one.block_ids[0], one.num_computed_tokens) for one in output.scheduled_new_reqs]
        running: List[Scheduled] = []
        for request_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            one = Scheduled(request_id, blocks[0] if blocks else (), computed)
            (begun if request_id in cached.resumed_req_ids else running).append(one)
        ended = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
        return self._planner.plan(begun, running, replaced, output.num_scheduled_tokens, ended)

    def close(self) -> None:
        for sidecar in self._sidecars:
            sidecar.close()
