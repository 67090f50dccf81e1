"""PqcachedConnector, which vLLM makes once in its scheduler and once in each worker.

No hook raises: after an error vLLM computes everything itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Set, Tuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from . import log, model, settings, versions
from .plan import Plan
from .scheduler import Scheduler
from .settings import Refused
from .worker import Worker


@dataclasses.dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """The plan of a pass; None when this package does not take part."""

    plan: Optional[Plan] = None


class PqcachedConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Takes no part when vLLM's version, the model or the settings cannot be served, after one line that says why."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Optional[Scheduler] = None
        self._worker: Optional[Worker] = None
        try:
            self._version = versions.installed()
            self._settings = settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = self._make_scheduler()
            else:
                self._worker = self._make_worker()
        except Refused as refusal:
            log.warn(f"takes no part in this engine: {refusal}")

    def _describe(self, rank: int) -> model.Model:
        return model.describe(self._vllm_config, self._kv_cache_config, self._settings, rank)

    def _make_scheduler(self) -> Scheduler:
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        return Scheduler([self._describe(rank) for rank in range(ranks)], self._settings)

    def _make_worker(self) -> Worker:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return Worker(self._describe(get_tensor_model_parallel_rank()), self._settings, self._vllm_config.compilation_config.static_forward_context)

    # ---- In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        return (self._scheduler.matched(request, num_computed_tokens) if self._scheduler else 0), False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler:
            self._scheduler.bind_pool(gpu_block_pool)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler:
            self._scheduler.unloaded(connector_output.invalid_block_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler:
            self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        if self._scheduler is None:
            return Metadata()
        return Metadata(self._scheduler.plan(scheduler_output, self._version.replaced_blocks(scheduler_output)))

    def request_finished(self, request: Any, block_ids: List[int]) -> Tuple[bool, Optional[Dict[str, Any]]]:
        if self._scheduler:
            self._scheduler.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        if self._scheduler:
            self._scheduler.reset()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- In a worker

    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        if self._worker:
            self._worker.register_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker and isinstance(connector_metadata, Metadata) and connector_metadata.plan:
            self._worker.begin_pass(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded when the model begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The attention backend has taken the rows: those in vLLM's cache are packed."""

    def wait_for_save(self) -> None:
        if self._worker:
            self._worker.end_pass()

    def get_block_ids_with_load_errors(self) -> Set[int]:
        return self._worker.take_unloaded() if self._worker else set()

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self._worker:
            self._worker.clear()

    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            if half:
                half.close()
