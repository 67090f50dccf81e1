"""Rows of a batch, each with its sequence, and indexes that are built in the background."""

from __future__ import annotations

import ctypes
import dataclasses
from ctypes import byref
from typing import Any, Optional

from .._errors import Aborted, AlreadyExists
from .._handle import Closable, Handle
from .._library import check
from .._operations import build_options
from .._options import Index
from .._sequence import Sequence


class Build(Closable):
    """A build of a sequence's index that goes on while steps attend to all tokens. Closing it ends it."""

    def __init__(self, sequence: Sequence, index: Index, sink_tokens: int) -> None:
        self._library = sequence._library
        self._options, _ = build_options(index, 0, 0, 0, sink_tokens, 0, False, 0.0, 0, None)
        operation = ctypes.c_void_p()
        with sequence._handle as pointer:
            check(self._library.pqc_build_index_begin(pointer, byref(self._options), None, byref(operation)))
        assert operation.value

        def end(handle: int) -> None:
            self._library.pqc_operation_close(handle, 0)

        self._own(Handle("build", operation.value, end, sequence._handle), at_exit=True)

    def is_done(self) -> bool:
        """Never waits. Raises what build_index raises."""
        done = ctypes.c_uint32()
        with self._handle as operation:
            check(self._library.pqc_operation_poll(operation, byref(done)))
        return bool(done.value)


@dataclasses.dataclass
class Row:
    """One row of the batch. Positions of its sequence begin behind its padding."""

    sequence: Optional[Sequence] = None  # None while the row has padding only
    pad: int = 0
    passed: int = 0  # tokens that the sequence has; more than the cache's length after crop()
    named: int = 0  # leading tokens whose ids the sequence has
    ids: Optional[Any] = None  # of the prompt, when it is to be shared
    is_live: bool = False  # its index grows by itself
    is_indexed: bool = False  # the index is known to be complete
    has_decoded: bool = False  # rows of a prefill then come for all layers at once
    build: Optional[Build] = None

    def drop(self) -> None:
        if self.build is not None:
            self.build.close()
        if self.sequence is not None:
            self.sequence.close()
        self.__init__()  # type: ignore[misc]

    def truncate(self, tokens: int) -> None:
        """Removes the tokens from `tokens` on, with their names; the sequence is dropped when none remains."""
        if self.sequence is None or self.passed <= tokens:
            return
        if tokens <= 0:
            self.drop()
        else:
            self.sequence.truncate(tokens)
            self.passed, self.named = tokens, min(self.named, tokens)

    def advance_index(self, index: Index, sink_tokens: int, waits: bool) -> None:
        """Begins the index when the row has none, and learns whether it is complete."""
        assert self.sequence is not None
        self.has_decoded = True
        if self.is_indexed:
            return
        if waits:
            self.complete_index(index, sink_tokens)
            return
        if not self.is_live and self.build is None:
            self.build = Build(self.sequence, index, sink_tokens)
        if self.build is not None:
            try:
                if not self.build.is_done():
                    return
            except AlreadyExists:
                pass
            except Aborted:  # a step was faster; the next one begins it again
                self.build.close()
                self.build = None
                return
            self.build.close()
            self.build, self.is_indexed = None, True
            return
        progress = self.sequence.progress()
        self.is_indexed = bool(progress.has_index) and progress.layers_ready == progress.layer_count

    def complete_index(self, index: Index, sink_tokens: int) -> None:
        """Builds the index, or waits for it."""
        if self.sequence is None or self.is_indexed:
            return
        if self.build is not None:
            self.build.close()
            self.build = None
        try:
            self.sequence.build_index(index, sink_tokens=sink_tokens)
        except AlreadyExists:
            pass
        self.has_decoded = self.is_indexed = True
