"""Differences between the versions of vLLM, and checks of the signatures that this package relies on.

A version that is not in the table, or that has changed a hook, is refused with one line, and vLLM
goes on as if this package were not there.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Callable, Dict, Mapping, Tuple

from .settings import Refused


class V32:
    """vLLM 0.32."""

    numbers = (0, 32)

    @staticmethod
    def replaced_blocks(scheduler_output: Any) -> Dict[str, Any]:
        """Returns the block tables that replace those of running requests."""
        return {}


class V31(V32):
    """vLLM 0.31, whose scheduler may replace the block table of a running request."""

    numbers = (0, 31)

    @staticmethod
    def replaced_blocks(scheduler_output: Any) -> Dict[str, Any]:
        return {request_id: blocks[0] for request_id, blocks in (scheduler_output.block_table_updates or {}).items()}


VERSIONS = (V32, V31)

# Hook -> the parameters that it must have, in their order. A hook is a name in a module, or a class
# and its function.
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_CPU = "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend"
HOOKS: Mapping[str, str] = {
    f"{_CONNECTOR}.__init__": "self vllm_config role kv_cache_config",
    f"{_CONNECTOR}.register_kv_caches": "self kv_caches",
    f"{_CONNECTOR}.bind_connector_metadata": "self connector_metadata",
    f"{_CONNECTOR}.clear_connector_metadata": "self",
    f"{_CONNECTOR}.start_load_kv": "self forward_context kwargs",
    f"{_CONNECTOR}.wait_for_layer_load": "self layer_name",
    f"{_CONNECTOR}.save_kv_layer": "self layer_name kv_layer attn_metadata kwargs",
    f"{_CONNECTOR}.wait_for_save": "self",
    f"{_CONNECTOR}.get_block_ids_with_load_errors": "self",
    f"{_CONNECTOR}.shutdown": "self",
    f"{_CONNECTOR}.get_num_new_matched_tokens": "self request num_computed_tokens",
    f"{_CONNECTOR}.bind_gpu_block_pool": "self gpu_block_pool",
    f"{_CONNECTOR}.update_connector_output": "self connector_output",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": "self block_ids",
    f"{_CONNECTOR}.update_state_after_alloc": "self request blocks num_external_tokens",
    f"{_CONNECTOR}.build_connector_meta": "self scheduler_output",
    f"{_CONNECTOR}.reset_cache": "self",
    f"{_CONNECTOR}.request_finished": "self request block_ids",
    f"{_CPU}Impl.forward": "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    f"{_CPU}Impl.do_kv_cache_update": "self layer key value kv_cache slot_mapping",
    f"{_CPU}.get_impl_cls": "",
    "vllm.v1.attention.backends.registry:register_backend": "backend class_path is_mamba",
}
# Class -> fields and attributes that it must have.
FIELDS: Mapping[str, str] = {
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": "block_table seq_lens query_start_loc",
    "vllm.v1.core.sched.output:SchedulerOutput":
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids preempted_req_ids has_sync_kv_loads",
    "vllm.v1.outputs:KVConnectorOutput": "invalid_block_ids",
    "vllm.v1.core.sched.output:NewRequestData": "req_id block_ids num_computed_tokens",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids resumed_req_ids new_block_ids num_computed_tokens",
}


def _find(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _parameters(hook: Callable[..., Any]) -> Tuple[str, ...]:
    return tuple(inspect.signature(hook).parameters)


def check_hooks(hooks: Mapping[str, str] = HOOKS, fields: Mapping[str, str] = FIELDS) -> None:
    """Raises Refused, which names the hook that differs."""
    for name, expected in {**hooks, **fields}.items():
        try:
            found = _find(name)
        except (ImportError, AttributeError):
            raise Refused(f"vLLM has no {name} any more") from None
        if name in fields:
            missing = set(expected.split()) - set(getattr(found, "__dataclass_fields__", ()))
            if missing:
                raise Refused(f"vLLM's {name} has no {', '.join(sorted(missing))} any more")
        elif _parameters(found) != tuple(expected.split()):
            raise Refused(f"vLLM's {name} has the parameters {' '.join(_parameters(found))}; must be {expected}")


def find(text: str) -> Any:
    """Returns the class for a version's text. Raises Refused for one that is not in the table."""
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    for version in VERSIONS:
        if version.numbers == numbers:
            return version
    known = ", ".join(".".join(str(number) for number in version.numbers) for version in VERSIONS)
    raise Refused(f"vLLM {text}: only {known} are known")


def installed() -> Any:
    """Returns the class for the installed vLLM. Raises Refused."""
    import vllm

    version = find(vllm.__version__)
    check_hooks()
    return version
