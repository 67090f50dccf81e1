"""The requests of a worker, each with its sequence in the sidecar.

A row is stored only when all before it are known to be right. A request of which this is not so, or
of which a call has failed, is not stored any further: vLLM keeps all rows itself, and computes its
attention.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import numpy as np
import pqcached
from pqcached import Sequence, TokenNames

from .plan import Beginning, NewNames, Part
from .settings import Settings
from .sidecar import Sidecar

LayerRows = Mapping[int, Tuple[Any, Any]]  # layer -> (keys, values), [tokens, kv_heads, dim]


@dataclasses.dataclass
class Counts:
    """Since the worker began."""

    beginnings: int = 0  # of requests, and of those that were preempted
    loaded_tokens: int = 0  # of prefixes
    passed_tokens: int = 0  # whose rows were passed to the sidecar
    steps: int = 0  # passes whose attention the sidecar's rows gave
    failed_calls: int = 0


@dataclasses.dataclass
class Stored:
    """A request whose first `passed` tokens are in the sidecar, or on their way there."""

    sequence: Sequence
    passed: int
    has_stepped: bool = False  # rows then come for all layers at once
    names: Optional[TokenNames] = None  # that its next rows bring along


class Requests:
    """The requests that the sidecar has, and how they begin, grow and end."""

    def __init__(self, sidecar: Sidecar, settings: Settings) -> None:
        self._sidecar, self._settings = sidecar, settings
        self.counts = Counts()
        self._stored: Dict[str, Stored] = {}
        # Requests of this pass whose first tokens are being stored by another one.
        self._late: Dict[str, Beginning] = {}
        self._distrusted_passes = 0

    def begin_pass(self) -> None:
        self._sidecar.connect()
        self._late.clear()
        if self._distrusted_passes > 0:
            self._distrusted_passes -= 1
            self._drop_all()

    @property
    def is_distrusted(self) -> bool:
        """Whether rows of this pass may have been computed from blocks that were not loaded."""
        return self._distrusted_passes > 0

    def distrust(self) -> None:
        """Stores nothing of this pass and of the next one, which vLLM may have planned already."""
        self._distrusted_passes = 2
        self._late.clear()
        self._drop_all()

    def loaded(self) -> None:
        """Takes note that all prefixes of the pass are loaded. When it is distrusted, nothing of it is stored."""
        if self.is_distrusted:
            self._drop_all()

    def find(self, request_id: str) -> Optional[Stored]:
        return self._stored.get(request_id)

    def call(self, request_id: str, what: str, function: Callable[[], object]) -> bool:
        """Makes a call about a request's sequence. After an error the request is not stored any further."""
        try:
            function()
            return True
        except pqcached.Error as error:
            self.failed(error, what)
            self.drop(request_id)
            return False

    def failed(self, error: pqcached.Error, what: str) -> None:
        """Takes note of a call that has failed. All sequences end with the connection."""
        self.counts.failed_calls += 1
        self._sidecar.failed(error, what)
        if self._sidecar.cache is None:
            self._drop_all()

    def drop(self, request_id: str) -> None:
        """Ends a request's sequence. Its rows with names stay as a cached prefix."""
        stored = self._stored.pop(request_id, None)
        if stored is not None:
            stored.sequence.close()

    def _drop_all(self) -> None:
        for request_id in list(self._stored):
            self.drop(request_id)

    # ---- Life of a request

    def begin(self, beginning: Beginning) -> Optional[Stored]:
        """Begins a request; returns None when its first tokens are not in the sidecar, or not yet."""
        self.counts.beginnings += 1
        self.drop(beginning.request_id)
        self._create(beginning)
        stored = self.find(beginning.request_id)
        if stored is None and beginning.loaded_tokens == 0 and beginning.local_tokens > 0 and beginning.token_ids is not None:
            self._late[beginning.request_id] = beginning
        return stored

    def _create(self, beginning: Beginning) -> None:
        if beginning.token_ids is None or (self.is_distrusted and not beginning.loaded_tokens) or not self._sidecar.connect():
            return
        assert self._sidecar.cache is not None
        live = self._settings.is_selecting and self._settings.index != "flat" and len(beginning.token_ids) >= self._settings.min_tokens
        more: Dict[str, Any] = {"index": self._settings.key_index(), "sink_tokens": self._settings.sink_tokens} if live else {}
        try:
            sequence = self._sidecar.cache.create_sequence(
                np.asarray(beginning.token_ids, np.uint32), extra_key=beginning.extra_key, at_least_tokens=beginning.first,
                retain=True, live_index=live, **more)
        except pqcached.NotFound as error:
            if beginning.first == 0:  # no prefix was asked for
                self.counts.failed_calls += 1
                self._sidecar.gone(error)
                self._drop_all()
            return
        except pqcached.Error as error:
            self.failed(error, "a request begins")
            return
        self._stored[beginning.request_id] = Stored(sequence, sequence.shared_tokens)

    def is_late(self, request_id: str) -> bool:
        return request_id in self._late

    def is_followed(self, request_id: str) -> bool:
        """Whether the rows of a request are stored in this pass, or may be at its end."""
        return request_id in self._stored or request_id in self._late

    def begin_late(self) -> None:
        """Begins the requests whose first tokens other requests have stored in this pass."""
        if not self._late:
            return
        for request_id, stored in list(self._stored.items()):
            self.call(request_id, "rows of a pass", stored.sequence.flush)
        for beginning in self._late.values():
            self._create(beginning)
        self._late.clear()

    def name(self, names: NewNames) -> None:
        stored = self.find(names.request_id)
        if stored is None:
            return
        if stored.names is None:
            stored.names = TokenNames(names.begin, list(names.token_ids))
        else:
            stored.names = TokenNames(stored.names.begin, [*list(stored.names.token_ids or ()), *names.token_ids])

    def end(self, request_id: str) -> None:
        """Ends a request that has finished or was preempted."""
        stored = self.find(request_id)
        if stored is not None:
            sequence, names = stored.sequence, stored.names
            if names is not None:
                self.call(request_id, "names of a reply", functools.partial(sequence.name_tokens, names))
            self.call(request_id, "the end of a request", sequence.flush)
        self.drop(request_id)

    # ---- Rows

    def ingest(self, part: Part, layer: int, keys: Any, values: Any) -> None:
        """Stores rows of one layer of a long part; the part is complete after pass_on."""
        stored = self.find(part.request_id)
        skipped = stored.passed - part.first if stored is not None else part.count
        if stored is not None and skipped < part.count:
            call = functools.partial(stored.sequence.ingest, layer, stored.passed, keys[skipped:], values[skipped:])
            self.call(part.request_id, "rows of a prompt", call)

    def enqueue(self, part: Part, rows: LayerRows) -> None:
        """Passes on the rows of all layers of a part; they are stored in the background."""
        stored = self.find(part.request_id)
        if stored is None:
            return
        skipped = stored.passed - part.first
        if skipped < part.count:
            left = {layer: (keys[skipped:], values[skipped:]) for layer, (keys, values) in rows.items()}
            call = functools.partial(stored.sequence.enqueue_rows, stored.passed, left, names=stored.names)
            if not self.call(part.request_id, "rows of a pass", call):
                return
            stored.names = None
        self.pass_on(part)

    def pass_on(self, part: Part) -> None:
        """Takes note that all rows of a part are stored, or on their way."""
        stored = self.find(part.request_id)
        if stored is not None:
            self.counts.passed_tokens += max(0, part.end - stored.passed)
            stored.passed = max(stored.passed, part.end)

    def continues(self, part: Part) -> bool:
        """Returns whether a part's rows continue those in the sidecar; otherwise ends its sequence."""
        stored = self.find(part.request_id)
        if stored is None:
            return False
        if stored.passed < part.first:
            self.drop(part.request_id)
            return False
        return True

    def close(self) -> None:
        for request_id in list(self._stored):
            self.end(request_id)
