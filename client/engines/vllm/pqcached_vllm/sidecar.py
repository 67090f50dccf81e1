"""The connection of one process to the sidecar: opened anew after failures, and never waited for
longer than the configured time."""

from __future__ import annotations

import time
from typing import Optional, Tuple, Type

import pqcached
from pqcached import Cache, Client, LayerGroup

from . import log
from .settings import Settings

# Errors after which the sidecar is left alone for a while.
LOST: Tuple[Type[pqcached.Error], ...] = (pqcached.Unavailable, pqcached.DeadlineExceeded, pqcached.Internal, pqcached.Unauthenticated)


class Sidecar:
    """A client and a cache, when the sidecar answers."""

    def __init__(self, settings: Settings, group: LayerGroup, fingerprint: str, name: str, threads: int) -> None:
        self._settings, self._group, self._fingerprint, self._name = settings, group, fingerprint, name
        self._threads = threads
        self._retry_at = 0.0
        self._is_closed = False
        self.client: Optional[Client] = None
        self.cache: Optional[Cache] = None

    def connect(self) -> bool:
        """Returns whether there is a connection; opens one, but not before it is time to try again."""
        if self.cache is not None:
            return True
        if self._is_closed or time.monotonic() < self._retry_at:
            return False
        settings = self._settings
        try:
            self.client = Client(settings.endpoint, tenant=settings.tenant, client_name="vllm", timeout_ms=settings.timeout_ms,
                                 thread_count=self._threads)
            self.cache = self.client.open_cache(self._name, model_fingerprint=self._fingerprint, groups=[self._group],
                                                capacity_bytes=settings.capacity_bytes)
        except pqcached.Error as error:
            self.lose(f"no sidecar at {settings.endpoint}, or no cache there; vLLM goes on without it: {error}")
            return False
        return True

    def lose(self, text: str) -> None:
        """Ends the connection; the next one is tried after a while."""
        log.warn(text)
        client, self.client, self.cache = self.client, None, None
        self._retry_at = time.monotonic() + self._settings.retry_ms / 1000
        if client is not None:
            client.close()

    def failed(self, error: pqcached.Error, what: str) -> None:
        """Takes note of a call that has failed."""
        if self.cache is None:  # it is lost already
            return
        if isinstance(error, LOST):
            self.lose(f"the sidecar does not answer ({what}); vLLM goes on without it: {error}")
        else:
            log.warn(f"{what}: {error}")

    def gone(self, error: pqcached.Error) -> None:
        """Takes note that the cache was dropped. The next connection makes it anew."""
        self.lose(f"the cache is gone; vLLM goes on without it for a while: {error}")

    def close(self) -> None:
        self._is_closed = True
        if self.client is not None:
            self.client.close()
        self.client = self.cache = None
