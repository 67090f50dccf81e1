"""Rows of a batch, each with its sequence, and indexes that are built in the background."""

from __future__ import annotations

import ctypes
import dataclasses
from ctypes import byref
from typing import Any, Optional, Sequence as SequenceOf

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
    is_live: bool = False  # its first index grows by itself
    indexed: int = 0  # indexes that are known to be complete, of those that the cache wants
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

    def advance_indexes(self, indexes: SequenceOf[Index], sink_tokens: int, waits: bool) -> None:
        """Begins the next of the indexes that the row does not have, and learns whether it is complete."""
        self.has_decoded = True
        if waits:
            self.complete_indexes(indexes, sink_tokens)
        while self.indexed < len(indexes) and self._has(indexes[self.indexed], sink_tokens):
            self.indexed += 1

    def _has(self, index: Index, sink_tokens: int) -> bool:
        """Returns whether the next index is complete; begins it otherwise."""
        assert self.sequence is not None
        if self.build is None and not (self.is_live and self.indexed == 0):
            self.build = Build(self.sequence, index, sink_tokens)
        if self.build is None:
            progress = self.sequence.progress()
            return bool(progress.has_index) and progress.layers_ready == progress.layer_count
        is_begun = True
        try:
            if not self.build.is_done():
                return False
        except AlreadyExists:
            pass
        except Aborted:  # a step was faster; the next one begins it again
            is_begun = False
        self.build.close()
        self.build = None
        return is_begun

    def complete_indexes(self, indexes: SequenceOf[Index], sink_tokens: int) -> None:
        """Builds the indexes, or waits for them."""
        if self.sequence is None:
            return
        if self.build is not None:
            self.build.close()
            self.build = None
        for index in indexes[self.indexed:]:
            try:
                self.sequence.build_index(index, sink_tokens=sink_tokens)
            except AlreadyExists:
                pass
            self.indexed += 1
            self.has_decoded = True
