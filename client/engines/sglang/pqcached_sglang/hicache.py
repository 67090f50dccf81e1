"""HiCacheStore: the storage of SGLang's HiCache, by its back end `dynamic`.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "pqcached",
        "module_path": "pqcached_sglang.hicache", "class_name": "HiCacheStore",
        "pqcached.capacity_bytes": 4294967296}'

Names that begin with "pqcached." are the arguments of pqcached.page_store.PageStore, and
pqcached.lease_ms, the time for which a page that was found is kept for the load that follows (10000).
"""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from pqcached.page_store import PageStore

_log = logging.getLogger(__name__)
PREFIX = "pqcached."


def ranks_of(config: Any, by_tensor_rank: bool) -> str:
    """Returns the part of a page's key that tells the processes of an engine apart. Pages of MLA are
    the same in all tensor ranks, states of Mamba layers are not.
    """
    parts = [f"pp{config.pp_rank}.{config.pp_size}", f"cp{config.attn_cp_rank}.{config.attn_cp_size}"]
    if by_tensor_rank or not config.is_mla_model:
        parts.append(f"tp{config.tp_rank}.{config.tp_size}")
    if config.dcp_size > 1:
        parts.append(f"dcp{config.dcp_rank}.{config.dcp_size}.{config.tp_size}.{config.logical_page_size}")
    return "@".join(parts)


def leading(found: Sequence[bool]) -> int:
    """Returns how many of the first elements are true."""
    return next((i for i, each in enumerate(found) if not each), len(found))


class HiCacheStore(HiCacheStorage):  # type: ignore[misc]
    """Pages of the host pools are pages of the sidecar, which evicts them by itself; without a sidecar
    nothing is found or stored. Raises InvalidArgument for wrong settings.
    """

    def __init__(self, storage_config: Any, kwargs: Optional[Dict[str, Any]] = None) -> None:
        extra = storage_config.extra_config or {}
        settings = {name[len(PREFIX):]: value for name, value in extra.items() if name.startswith(PREFIX)}
        self._lease_ms = int(settings.pop("lease_ms", 10_000))
        self._store = PageStore.from_settings(settings, "sglang")
        self._model = f"sglang@{storage_config.model_name or ''}"
        self._ranks = {mamba: ranks_of(storage_config, mamba) for mamba in (False, True)}
        self._formats: Dict[str, str] = {}  # by pool

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(str(PoolName.KV), mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def exists(self, key: str) -> bool:
        return self._found([key])[0]

    def batch_exists(self, keys: List[str], extra_info: Any = None) -> int:
        return leading(self._found(keys))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Optional[torch.Tensor]:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str], target_locations: Any = None, target_sizes: Any = None) -> List[Optional[torch.Tensor]]:
        targets = target_locations or [None] * len(keys)
        return [target if done else None for target, done in zip(targets, self._read(str(PoolName.KV), keys, targets))]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys: List[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return all(self._write(str(PoolName.KV), keys, values or [None] * len(keys)))

    def batch_get_v1(self, keys: List[str], host_indices: torch.Tensor, extra_info: Any = None) -> List[bool]:
        return self._load(str(PoolName.KV), self.mem_pool_host, keys, host_indices)

    def batch_set_v1(self, keys: List[str], host_indices: torch.Tensor, extra_info: Any = None) -> List[bool]:
        return self._back_up(str(PoolName.KV), self.mem_pool_host, keys, host_indices)

    def batch_exists_v2(self, keys: List[str], pool_transfers: Optional[List[Any]] = None, extra_info: Any = None) -> Any:
        """As SGLang's file storage: the longest prefix of which all pools have what they need."""
        kv_pages = leading(self._found(keys))
        hits: Dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        usable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not usable:
                break
            found = self._found(keys[:kv_pages], str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                prefixes = set(range(1, leading(found) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing = max(1, len(transfer.keys or []))
                prefixes = {end for end in range(1, kv_pages + 1) if all(found[max(0, end - trailing):end])}
            else:
                _log.error("pqcached: pool %s: hit policy %s is not supported", transfer.name, transfer.hit_policy)
                prefixes = set()
            if prefixes:
                hits[transfer.name] = max(prefixes)
            usable = [prefix for prefix in usable if prefix in prefixes]
        return PoolTransferResult(usable[-1] if usable else 0, hits, usable)

    def batch_get_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[Any, List[bool]]:
        return self._move(transfers, self._load)

    def batch_set_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[Any, List[bool]]:
        return self._move(transfers, self._back_up)

    def clear(self) -> None:
        """Removes all pages. Waits for the leases of pages that were found: SGLang reports success
        whatever happens here.
        """
        end = time.monotonic() + self._lease_ms / 1000 + 1
        while not (is_clear := self._store.clear()) and time.monotonic() < end:
            time.sleep(0.1)
        if not is_clear:
            _log.error("pqcached: the stored pages were NOT cleared, and can be found again")

    def close(self) -> None:
        self._store.close()

    def _register(self, name: str, pool: Any) -> None:
        """Records the format of a pool's pages, so that pages of another format are not found."""
        shape = [getattr(pool, field, "") for field in ("layout", "dtype", "page_size")]
        self._formats[name] = "@".join(str(each) for each in shape)

    def _name(self, key: str, pool: str) -> str:
        return "@".join([self._model, self._ranks[pool == str(PoolName.MAMBA)], pool, self._formats.get(pool, ""), key])

    def _found(self, keys: Sequence[str], pool: str = str(PoolName.KV)) -> List[bool]:
        return [size > 0 for size in self._store.sizes([self._name(key, pool) for key in keys], self._lease_ms)]

    def _read(self, pool: str, keys: Sequence[str], targets: Sequence[Optional[torch.Tensor]]) -> List[bool]:
        usable = [target is not None and target.device.type == "cpu" and target.is_contiguous() for target in targets]
        done = iter(self._store.get([(self._name(key, pool), _bytes_of(target))
                                     for key, target, good in zip(keys, targets, usable) if good]))
        return [good and next(done) for good in usable]

    def _write(self, pool: str, keys: Sequence[str], values: Sequence[Optional[torch.Tensor]]) -> List[bool]:
        usable = [value is not None and value.device.type == "cpu" for value in values]
        done = iter(self._store.put([(self._name(key, pool), _bytes_of(value.contiguous()))
                                     for key, value, good in zip(keys, values, usable) if good and value is not None]))
        return [good and next(done) for good in usable]

    def _load(self, name: str, pool: Any, keys: Sequence[str], indices: torch.Tensor) -> List[bool]:
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        done = self._read(name, keys, pages)
        for i, (page, is_done) in enumerate(zip(pages, done)):
            if is_done:
                pool.set_from_flat_data_page(int(indices[i * self._page_size(pool)]), page)
        return done

    def _back_up(self, name: str, pool: Any, keys: Sequence[str], indices: torch.Tensor) -> List[bool]:
        firsts = [int(indices[i * self._page_size(pool)]) for i in range(len(keys))]
        return self._write(name, keys, [pool.get_data_page(first, flat=True) for first in firsts])

    def _move(self, transfers: List[Any], move: Callable[..., List[bool]]) -> Dict[Any, List[bool]]:
        results: Dict[Any, List[bool]] = {}
        for transfer in transfers:
            pool, keys, indices = self.registered_pools[transfer.name], transfer.keys or [], transfer.host_indices
            expected = len(keys) * self._page_size(pool)
            if indices is None or indices.numel() != expected:
                _log.error("pqcached: pool %s: indices of %d tokens are expected", transfer.name, expected)
                results[transfer.name] = [False] * len(keys)
            else:
                results[transfer.name] = move(str(transfer.name), pool, keys, indices)
        return results

    @staticmethod
    def _page_size(pool: Any) -> int:
        return getattr(pool, "page_size", 1) or 1


def _bytes_of(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
