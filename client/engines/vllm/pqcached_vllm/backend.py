"""vLLM's attention on the CPU, with the attention and the new rows of passes that the connector takes part in."""

from __future__ import annotations

from typing import Any, Type

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from .worker import going_on


class Impl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The attention of one layer."""

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *more: Any,
                **named: Any) -> Any:
        def stock() -> Any:
            return super(Impl, self).forward(layer, query, key, value, kv_cache, attn_metadata, output, *more, **named)

        worker = going_on()
        if worker is None or attn_metadata is None:
            return stock()
        return worker.attend(layer, query, key, value, output, attn_metadata, stock)


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    """Takes the place of CPU_ATTN, and is the same without a connector of this package."""

    @staticmethod
    def get_impl_cls() -> Type[Impl]:
        return Impl
