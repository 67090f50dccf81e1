"""Settings: the keys of kv_connector_extra_config, all optional."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional

from pqcached import Index, Selection

DECODE_MODES = ("exact", "select", "vllm")


class Refused(Exception):
    """Something that this plug-in cannot serve. The message is the line for the user."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values that hold for an engine's whole life."""

    endpoint: str = "unix:///run/pqcached/pqcached.sock"
    tenant: str = "default"
    cache: str = ""  # name of the cache; empty: made of the model's fingerprint
    capacity_bytes: int = 0  # of the cache's pool; 0: it grows within the tenant's quota
    # Name of the weights; empty: vLLM's model and revision. Equal names promise equal weights.
    model: str = ""
    # exact: attention to all tokens; select: to a selection of them; vllm: by vLLM itself.
    decode: str = "exact"
    ratio: float = 0.1  # of the tokens, for `select`; sink and window included
    sink_tokens: int = 16
    window_tokens: int = 64
    index: str = "pq"  # pq or flat
    subspaces: int = 4  # of pq
    bits: int = 8  # of pq
    rerank_factor: float = 2.0
    min_tokens: int = 4096  # of a prompt that gets an index; shorter ones are decoded exactly
    timeout_ms: int = 1000  # of each call; after it vLLM goes on without the sidecar for retry_ms
    retry_ms: int = 10000
    threads: int = 0  # of attention in a worker; 0: torch's number

    @property
    def is_selecting(self) -> bool:
        return self.decode == "select"

    def key_index(self) -> Index:
        """The index of long prompts; flat when all tokens are attended to."""
        if not self.is_selecting or self.index == "flat":
            return Index.flat()
        return Index.pq(self.subspaces, self.bits)

    def selection(self) -> Selection:
        if not self.is_selecting:
            return Selection(ratio=1.0, window_tokens=self.window_tokens, index=Index.flat())
        return Selection(ratio=self.ratio, sink_tokens=self.sink_tokens, window_tokens=self.window_tokens,
                         index=self.key_index(), rerank_factor=0.0 if self.index == "flat" else self.rerank_factor)


# Key: lowest and highest value.
_LIMITS = {"ratio": (0.001, 1.0), "window_tokens": (1, 1 << 20), "sink_tokens": (0, 1 << 20), "min_tokens": (1, 1 << 30), "timeout_ms": (1, 600000),
           "retry_ms": (1, 600000), "threads": (0, 1024), "capacity_bytes": (0, 1 << 62), "subspaces": (1, 128), "bits": (1, 8),
           "rerank_factor": (0.0, 8.0)}
_WORDS = {"decode": DECODE_MODES, "index": ("pq", "flat")}


def _value(name: str, default: Any, given: Any) -> Any:
    """Returns the checked value of a key. Raises Refused."""
    kind = type(default)
    if kind is float and isinstance(given, int) and not isinstance(given, bool):
        given = float(given)
    if not isinstance(given, kind) or isinstance(given, bool):
        raise Refused(f"kv_connector_extra_config: {name}: {given!r}, must be of type {kind.__name__}")
    if name in _LIMITS and not _LIMITS[name][0] <= given <= _LIMITS[name][1]:
        lowest, highest = _LIMITS[name]
        raise Refused(f"kv_connector_extra_config: {name}: {given}, must be in {lowest}..{highest}")
    if name in _WORDS and given not in _WORDS[name]:
        raise Refused(f"kv_connector_extra_config: {name}: {given!r}, must be one of {', '.join(_WORDS[name])}")
    return given


def read(extra: Optional[Mapping[str, Any]]) -> Settings:
    """Reads kv_connector_extra_config. Raises Refused, which names the key and its limits."""
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    given = dict(extra or {})
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise Refused(f"kv_connector_extra_config: {unknown[0]}: there is no such key; known are {', '.join(sorted(defaults))}")
    return Settings(**{name: _value(name, defaults[name], value) for name, value in given.items()})
