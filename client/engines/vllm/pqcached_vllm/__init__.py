"""vLLM with pqcached: prefixes that outlive the engine, and decoding over rows in the sidecar.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PqcachedConnector",
        "kv_connector_module_path": "pqcached_vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

vLLM loads this package as a plug-in of the group vllm.general_plugins. The connector (connector.py)
has a half in the scheduler and one in each worker; the attention backend (backend.py) takes the
place of vLLM's own on the CPU, which it also is without the connector. Settings: settings.py.
"""

from __future__ import annotations


def register() -> None:
    """The plug-in's entry: puts the attention backend in its place. May be called again."""
    from . import log, versions
    from .settings import Refused

    try:
        versions.installed()
    except Refused as refusal:
        log.warn(f"takes no part in this engine: {refusal}")
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "pqcached_vllm.backend.Backend")
