"""Rows that are copied back into an engine's arrays."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any, List, Tuple

from . import _abi as abi
from ._arguments import uint32, uint64
from ._arrays import ArrayLike, Tensor, tensor, tensor_to_fill
from ._errors import Status
from ._handle import Closable, Handle
from ._library import check
from ._steps import LayerArrays, layer_rows


def _target(name: str, array: ArrayLike) -> Tensor:
    return tensor_to_fill(name, array, tensor(name, array).device)


def layer_targets(layers: LayerArrays, stream: int = 0) -> Tuple[Any, List[Any]]:
    """Returns what layer_rows returns, for arrays that a call writes. stream: of all of them, where
    it is not 0.
    """
    rows, held = layer_rows(layers, _target)
    for row in rows:
        if stream:
            row.keys.stream = row.values.stream = stream
    return rows, held


def token_range(tokens: Tuple[int, int]) -> Any:
    return abi.TokenRange(uint64("tokens.begin", tokens[0]), uint64("tokens.end", tokens[1]))


class Load(Closable):
    """A load that goes on in a thread of the library. Made by Sequence.begin_load; closing it
    cancels it and waits until the arrays are not written any more.
    """

    def __init__(self, library: Any, client: Handle, operation: int, layer_count: int, held: List[Any]) -> None:
        self._library = library
        self._layer_count = layer_count

        # The default argument keeps the arrays alive as long as the handle.
        def close(pointer: int, _held: List[Any] = held) -> None:
            while library.pqc_operation_close(pointer, 0) == Status.DEADLINE_EXCEEDED:
                pass

        self._own(Handle("load", operation, close, client), at_exit=False)

    def wait_layers(self, count: int, timeout_ms: int = 0) -> None:
        """Waits until the first `count` layers are in their arrays, in the order of begin_load.

        timeout_ms: 0 = the client's. Raises DeadlineExceeded while they are not there yet, and what
        ended the load before.
        """
        number, timeout = uint32("count", count), uint32("timeout_ms", timeout_ms)
        with self._handle as operation:
            check(self._library.pqc_load_wait(operation, number, timeout))

    def wait(self, timeout_ms: int = 0) -> None:
        """Waits until all layers are in their arrays."""
        self.wait_layers(self._layer_count, timeout_ms)

    def done(self) -> bool:
        """Returns whether the load has ended, and raises its error. Never waits."""
        done = ctypes.c_uint32()
        with self._handle as operation:
            check(self._library.pqc_operation_poll(operation, byref(done)))
        return bool(done.value)

    def cancel(self) -> None:
        """Asks the load to end after the layer that is being copied."""
        with self._handle as operation:
            check(self._library.pqc_operation_cancel(operation))
