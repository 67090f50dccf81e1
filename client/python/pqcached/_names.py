"""Names of tokens, by which later sequences find the rows that are stored under them."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Optional, Sequence as SequenceOf

from . import _abi as abi
from ._arguments import key_bytes, uint64
from ._arrays import token_ids_to_read
from ._errors import InvalidArgument

CONTENT_KEY_BYTES = 16


@dataclasses.dataclass(frozen=True)
class TokenNames:
    """Names of consecutive tokens of a sequence: their ids, or content keys of 128 tokens each.

    Sequences whose prompts begin with the same names share the rows, in steps of 128 tokens. Names
    continue those that the sequence has, without a gap; positions that have names must get the same
    ones. Tokens may be named before they are stored, with their rows, or later. Calls that remove
    tokens remove their names.

    begin: position of the first named token; for content keys a multiple of 128.
    token_ids: integers [tokens]. content_keys: bytes, 16 for each 128 tokens, for engines that do
    not know token ids; they differ where the tokens differ.
    """

    begin: int
    token_ids: Optional[Any] = None
    content_keys: bytes = b""


def content_key_array(name: str, content_keys: Any) -> Any:
    """Returns the keys as a ctypes array."""
    data = key_bytes(name, content_keys)
    if len(data) % CONTENT_KEY_BYTES != 0:
        raise InvalidArgument.about(name, f"{len(data)} bytes, must be a multiple of {CONTENT_KEY_BYTES}")
    return (abi.ContentKey * (len(data) // CONTENT_KEY_BYTES)).from_buffer_copy(data)


def set_names(options: Any, token_ids: Any, content_keys: bytes) -> None:
    """Sets the names in a struct of the C ABI, which keeps their memory."""
    ids = token_ids_to_read("token_ids", () if token_ids is None else token_ids)
    keys = content_key_array("content_keys", content_keys)
    options.token_id_count, options.content_key_count = len(ids), len(keys)
    if len(ids):
        options.token_ids = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
    if len(keys):
        options.content_keys = ctypes.cast(keys, ctypes.POINTER(abi.ContentKey))
    options.owner = (ids, keys)


def row_options(names: Optional[TokenNames]) -> Optional[abi.RowOptions]:
    """Returns the options of a call that writes rows; None without names."""
    if names is None:
        return None
    options = abi.RowOptions(names_begin=uint64("names.begin", names.begin))
    set_names(options, names.token_ids, names.content_keys)
    return options


def pointer_to(options: Optional[abi.RowOptions]) -> Any:
    return None if options is None else ctypes.byref(options)


def step_options(names: Optional[SequenceOf[Optional[TokenNames]]], item_count: int) -> Any:
    """Returns the options of a step's items as a ctypes array; None without names."""
    if names is None:
        return None
    if len(names) != item_count:
        raise InvalidArgument.about("names", f"{len(names)} of them, but the step has {item_count} items")
    each = [row_options(one) or abi.RowOptions() for one in names]
    array: Any = (abi.RowOptions * item_count)(*each)
    array.owner = each
    return array
