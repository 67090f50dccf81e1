"""Real host pools and storages of SGLang on the CPU.

Import it first: it starts the program again in the environment of tests/environments.py, if that is installed.
"""

import importlib.machinery
import os
import pathlib
import sys
import tempfile
import types
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("client/python", ".")] + [str(TESTS.parent / "client/engines/sglang")]
os.environ["HF_HUB_OFFLINE"] = "1"

import environments  # noqa: E402
from skip import skip_unless  # noqa: E402

IS_INSTALLED = environments.run_in_environment("sglang")
needs_sglang = skip_unless("sglang", IS_INSTALLED, "SGLang is not installed: tests/environments.py sglang")

import daemon as daemons  # noqa: E402


def without_torchvision():
    """Lets SGLang import torchvision, which its modules of host pools do for images; no wheel of it goes with torch for CPUs."""
    import transformers  # noqa: F401  (asks first whether there is a torchvision)

    class Empty(types.ModuleType):
        __path__ = []

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = Empty(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)


if IS_INSTALLED:
    import torch
    import sglang.srt.mem_cache.hicache_storage as hicache_storage
    without_torchvision()
    import sglang.srt.mem_cache.pool_host.base as pool_base
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    torch.set_num_threads(1)
    pool_base.host_memory_budget_bytes = lambda *_, **__: 1 << 40  # it would leave 10 GB of the machine free

PAGE_TOKENS, LAYERS, HEADS, HEAD_DIM, TOKENS = 16, 3, 2, 32, 16 * 16


def host_pool(layout="layer_first", dtype=None):
    """SGLang's host memory for 16 pages, with content that differs everywhere."""
    dtype = dtype or torch.bfloat16
    keys, values = ([torch.zeros((TOKENS, HEADS, HEAD_DIM), dtype=dtype) for _ in range(LAYERS)] for _ in range(2))
    pointers = [torch.tensor([each.data_ptr() for each in part], dtype=torch.uint64) for part in (keys, values)]
    buffers = KVBuffers(k=tuple(keys), v=tuple(values), k_data_ptrs=pointers[0], v_data_ptrs=pointers[1],
                        layout=KVBufferLayout.NHD)
    info = MHABufferInfo(buffers=buffers, page_size=PAGE_TOKENS, head_num=HEADS, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM, dtype=dtype,
                         device=torch.device("cpu"))
    pool = MHATokenToKVPoolHost(info, 1.0, 0, PAGE_TOKENS, layout, pin_memory=False, device_capacity_tokens=TOKENS, start_layer=0,
                                end_layer=LAYERS - 1)
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def config(extra=None, **fields):
    return hicache_storage.HiCacheStorageConfig(**{
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "org/model", "extra_config": extra, **fields})


def indices_of(*pages):
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


class Controller:
    """The parts of SGLang's controller that move pages between a host pool and a storage, called as it calls them."""

    def __init__(self, storage, pool):
        self.storage_backend, self.storage_host_pool, self.page_size = storage, pool, PAGE_TOKENS

    request_id = "request"

    @staticmethod
    def is_terminated():
        return False

    def set(self, zero_copy, keys, indices):
        move = HiCacheController._page_set_zero_copy if zero_copy else HiCacheController._generic_page_set
        return move(self, keys, indices)

    def get(self, zero_copy, keys, indices):
        move = HiCacheController._page_get_zero_copy if zero_copy else HiCacheController._generic_page_get
        return move(self, self, keys, indices)


def storage_of(endpoint, pool=None, settings=None, **fields):
    """A storage that SGLang's factory has made, as for `--hicache-storage-backend dynamic`."""
    extra = {"backend_name": "pqcached", "module_path": "pqcached_sglang.hicache", "class_name": "HiCacheStore",
             "pqcached.endpoint": endpoint, "pqcached.capacity_bytes": 64 << 20, "pqcached.timeout_ms": 60000,
             "pqcached.retry_seconds": 0, **(settings or {})}
    storage = StorageBackendFactory.create_backend("dynamic", config(extra, **fields), pool)
    if pool is not None:
        storage.register_mem_pool_host(pool)
    return storage


class SGLangTest(unittest.TestCase):
    """A folder for a daemon's socket, and daemons that are stopped."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.endpoint = folder.name, f"unix://{folder.name}/s"

    def start(self):
        daemon = daemons.Daemon(self.folder)
        self.addCleanup(daemon.stop)
        return daemon

    def storage(self, pool=None, settings=None, **fields):
        storage = storage_of(self.endpoint, pool, settings, **fields)
        self.addCleanup(storage.close)
        return storage
