"""Converts foreign arrays to tensors of the C ABI by address, without copies.

Readable and writable: numpy arrays, torch tensors, and objects with __dlpack__ or
__array_interface__, where they permit writing; those on CUDA devices by loads and by calls of a Gpu.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from . import _abi as abi, _dlpack as dlpack
from ._arguments import member, uint32, uint64
from ._enums import Device, DType, LogBase
from ._errors import InvalidArgument, ResourceExhausted

MAX_NDIM = 4
_SHAPES = [ctypes.c_uint64 * ndim for ndim in range(MAX_NDIM + 1)]
_STRIDES = [ctypes.c_int64 * ndim for ndim in range(MAX_NDIM + 1)]
_OF_NUMPY = {np.dtype(np.float16): DType.F16, np.dtype(np.float32): DType.F32}
_TO_NUMPY: Dict[DType, np.dtype[Any]] = {
    DType.F16: np.dtype(np.float16), DType.BF16: np.dtype(np.uint16), DType.F32: np.dtype(np.float32)}
_BITS16 = np.dtype(np.uint16)


class _Memory(NamedTuple):
    """Properties of a foreign array. Strides are in elements; None = contiguous."""

    address: int
    device: Device
    dtype: Optional[DType]  # None: 16 bits whose meaning the caller must give
    shape: Tuple[int, ...]
    strides: Optional[Tuple[int, ...]]
    stream: int
    owner: Any  # the array
    writable: bool
    held: Any = None  # what else keeps the memory alive


def _wrong_dtype(name: str, dtype: Any) -> TypeError:
    return TypeError(f"{name}: dtype {dtype}; must be float16, float32, bfloat16, or uint16 in a "
                     "Tensor(array, dtype=DType.BF16)")


def _of_numpy(name: str, array: np.ndarray[Any, Any]) -> _Memory:
    dtype: Optional[DType] = _OF_NUMPY.get(array.dtype)
    if dtype is None and array.dtype.name == "bfloat16":  # of package ml_dtypes
        dtype = DType.BF16
    if dtype is None and array.dtype != _BITS16:
        raise _wrong_dtype(name, array.dtype)
    strides: Optional[Tuple[int, ...]] = None
    if not array.flags.c_contiguous:
        size = array.itemsize
        if any(stride % size for stride in array.strides):
            raise InvalidArgument.about(f"{name}.strides", f"{array.strides} bytes, must be multiples of the {size} of an element")
        strides = tuple(stride // size for stride in array.strides)
    return _Memory(array.__array_interface__["data"][0], Device.CPU, dtype, array.shape, strides, 0, array,
                   bool(array.flags.writeable))


def _torch() -> Any:
    """Returns module torch if the program has imported it: otherwise no object can be a torch
    tensor.
    """
    return sys.modules.get("torch")


def _torch_dtype(torch: Any, dtype: Any) -> Optional[DType]:
    if dtype is torch.float32:
        return DType.F32
    if dtype is torch.bfloat16:
        return DType.BF16
    return DType.F16 if dtype is torch.float16 else None


def _of_torch(name: str, torch: Any, array: Any) -> _Memory:
    dtype = _torch_dtype(torch, array.dtype)
    if dtype is None:
        raise _wrong_dtype(name, array.dtype)
    if array.layout is not torch.strided or array.is_neg():
        raise TypeError(f"{name}: must be a plain strided tensor")
    stream = 0
    if array.device.type == "cuda":
        device = Device.CUDA
        stream = torch.cuda.current_stream(array.device).cuda_stream
    elif array.device.type == "cpu":
        device = Device.CPU
    else:
        raise TypeError(f"{name}: on device {array.device}; must be on cpu or cuda")
    strides = None if array.is_contiguous() else tuple(array.stride())
    return _Memory(array.data_ptr(), device, dtype, tuple(array.shape), strides, stream, array, not array.requires_grad)


def _of_dlpack(name: str, array: Any) -> _Memory:
    borrowed = dlpack.borrow(name, array)
    found = borrowed.tensor
    kind = (found.code, found.bits)
    if kind not in dlpack.DTYPES or found.lanes != 1:
        raise _wrong_dtype(name, f"{kind} x {found.lanes} of DLPack")
    return _Memory(borrowed.address, dlpack.DEVICES[found.device_type], dlpack.DTYPES[kind], borrowed.shape,
                   borrowed.strides, 0, array, borrowed.writable, borrowed.capsule)


def _memory_of(name: str, array: Any) -> _Memory:
    if isinstance(array, np.ndarray):
        return _of_numpy(name, array)
    torch = _torch()
    if torch is not None and isinstance(array, torch.Tensor):
        return _of_torch(name, torch, array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(name, array)
    if hasattr(array, "__array_interface__"):
        return _of_numpy(name, np.asarray(array))  # a view: the interface is an address
    raise TypeError(f"{name}: {type(array).__name__}; must be a numpy array, a torch tensor, or have __dlpack__ or "
                    "__array_interface__")


class Tensor:
    """An array that pqcached reads in place: never copied, whatever its strides.

    Every call also takes the array itself. A Tensor adds information that the array lacks, and
    saves work when one array is passed again and again. The array must keep its address and shape
    for as long as the Tensor lives.

    array: numpy array, torch tensor (CPU, or CUDA, for loads and for calls of a Gpu and their steps only), or an
    object with `__dlpack__` or `__array_interface__`; of float16, float32 or bfloat16, of up
    to 4 dimensions. A Tensor is itself exported by DLPack, in place and with its dtype:
    `torch.from_dlpack(Tensor(rows, dtype=DType.BF16))` are the rows of fetch_blocks as bfloat16.
    dtype: DType.BF16 means that an array of uint16 holds bfloat16; otherwise it must be the array's
    own dtype.

    Raises TypeError for an object that is no such array, InvalidArgument for strides that are not
    multiples of the element size, and for an array that DLPack exports as a copy only.
    """

    __slots__ = ("c", "device", "dtype", "shape", "strides", "writable", "_owner", "_held")

    c: abi.Tensor
    device: Device
    dtype: DType
    shape: Tuple[int, ...]
    strides: Optional[Tuple[int, ...]]  # in elements; None = contiguous
    writable: bool

    def __init__(self, array: Any, dtype: Optional[DType] = None, *, name: str = "array") -> None:
        memory = _memory_of(name, array)
        if dtype is not None:
            dtype = member(DType, f"{name}.dtype", dtype)
        if memory.dtype is None:
            if dtype is not DType.BF16:
                raise TypeError(f"{name}: 16-bit integers; Tensor(array, dtype=DType.BF16) says that they are bfloat16")
            self.dtype = DType.BF16
        else:
            self.dtype = memory.dtype
            if dtype is not None and dtype is not memory.dtype:
                raise TypeError(f"{name}: dtype {memory.dtype.name}, but {dtype.name} is said")
        ndim = len(memory.shape)
        if ndim > MAX_NDIM:
            raise InvalidArgument.about(f"{name}.ndim", f"{ndim}, must be at most {MAX_NDIM}")
        self.device, self.shape, self.strides, self._owner = memory.device, memory.shape, memory.strides, memory.owner
        self.writable, self._held = memory.writable, memory.held
        c = abi.Tensor()
        c.ptr = memory.address
        c.device, c.dtype, c.ndim = memory.device, self.dtype, ndim
        c.shape = _SHAPES[ndim](*memory.shape)
        if memory.strides is not None:
            c.strides = _STRIDES[ndim](*memory.strides)
        if memory.stream:
            c.stream = memory.stream
        self.c = c

    def __dlpack_device__(self) -> Tuple[int, int]:
        kind, number = self._owner.__dlpack_device__()
        return int(kind), int(number)

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None, copy: Optional[bool] = None) -> Any:
        owner, as_bfloat16 = self._owner, False
        if isinstance(owner, np.ndarray) and self.dtype is DType.BF16:
            owner, as_bfloat16 = owner.view(_BITS16), True
        return dlpack.export(owner, as_bfloat16, stream, max_version, dl_device, copy)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype.name}, device={self.device.name})"


class Paged(Tensor):
    """Rows of a paged engine, read in place: token t is row t % block_tokens of block
    blocks[t // block_tokens].

    memory: all blocks, K's or V's, as a view [blocks, block_tokens, heads, dim], whatever the order
    in memory. For vLLM's [blocks, 2, tokens, heads, dim] that is `memory[:, 0]`, for [blocks,
    heads, tokens, dim] `memory.transpose(1, 2)` in torch.
    blocks: integers, the block table of one sequence. token_count: number of the sequence's tokens
    that a call passes, from `first_token` on, which may lie inside a block.
    Raises what Tensor raises, and InvalidArgument for a memory that does not have four dimensions.
    """

    __slots__ = ("_table", "_blocks")

    def __init__(self, memory: Any, blocks: Any, token_count: int, dtype: Optional[DType] = None, *,
                 first_token: int = 0, name: str = "memory") -> None:
        super().__init__(memory, dtype, name=name)
        _check_paged(name, self.shape)
        self._blocks = token_ids_to_read("blocks", blocks)
        table = abi.BlockTable(block_count=len(self._blocks), block_tokens=uint32("block_tokens", self.shape[1]),
                               token_count=uint64("token_count", token_count),
                               first_token=uint64("first_token", first_token))
        table.blocks = self._blocks.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
        self._table = table
        self.c.block_table = ctypes.pointer(table)


class PagedSlots(Tensor):
    """Rows of a paged engine by a slot mapping, read in place: token t of the call is row slots[t] %
    block_tokens of block slots[t] // block_tokens.

    memory: as in Paged. slots: int64 [tokens], as vLLM's slot_mapping; read in place when it is
    contiguous.
    Raises what Paged raises, and TypeError for slots that are not integers.
    """

    __slots__ = ("_table", "_slots")

    def __init__(self, memory: Any, slots: Any, dtype: Optional[DType] = None, *, name: str = "memory") -> None:
        super().__init__(memory, dtype, name=name)
        _check_paged(name, self.shape)
        array = integers("slots", slots)
        if array.ndim != 1:
            raise InvalidArgument.about("slots.shape", f"{array.shape}, must be [tokens]")
        if array.dtype.kind not in "iu":
            raise TypeError(f"slots: dtype {array.dtype}; must be integers")
        self._slots = np.ascontiguousarray(array, dtype=np.int64)
        table = abi.BlockTable(block_tokens=uint32("block_tokens", self.shape[1]), token_count=len(self._slots))
        table.slots = self._slots.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        self._table = table
        self.c.block_table = ctypes.pointer(table)


def _check_paged(name: str, shape: Tuple[int, ...]) -> None:
    if len(shape) != 4:
        raise InvalidArgument.about(f"{name}.shape", f"{shape}, must be [blocks, block_tokens, heads, dim]")


ArrayLike = Union[Tensor, Any]  # Any: see Tensor; numpy, torch and DLPack have no type in common


def tensor(name: str, array: ArrayLike) -> Tensor:
    return array if isinstance(array, Tensor) else Tensor(array, name=name)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Returns the dtype of arrays that hold rows of the cache; uint16 for BF16, which numpy lacks.
    """
    return _TO_NUMPY[dtype]


def new_array(shape: Tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):  # ValueError: more elements than addresses
        raise ResourceExhausted(f"no memory for an answer of shape {shape}") from None


_NAMES = {DType.F16: "float16", DType.BF16: "bfloat16", DType.F32: "float32"}


def _address(name: str, array: Any, dtype: DType, shape: Tuple[int, ...], write: bool = True) -> int:
    """Returns the address of a contiguous array of a dtype and shape on the CPU."""
    torch = _torch()
    if isinstance(array, np.ndarray):  # the usual array, of which no Tensor needs to be made
        if (array.dtype == _TO_NUMPY[dtype] and array.shape == shape and array.flags.c_contiguous
                and (array.flags.writeable or not write)):
            return int(array.__array_interface__["data"][0])
    elif torch is not None and isinstance(array, torch.Tensor):
        if (_torch_dtype(torch, array.dtype) is dtype and array.shape == shape and array.device.type == "cpu"
                and array.is_contiguous() and not (write and array.requires_grad)):
            return int(array.data_ptr())
    bits16 = dtype is DType.BF16 and isinstance(array, np.ndarray) and array.dtype == _BITS16
    try:
        found = Tensor(array, DType.BF16, name=name) if bits16 else tensor(name, array)
    except TypeError as error:
        if not str(error).startswith(f"{name}: dtype"):
            raise
        raise TypeError(f"{name}: dtype {array.dtype}; must be {_NAMES[dtype]}") from None
    if found.device is not Device.CPU:
        raise TypeError(f"{name}: on a GPU; must be on cpu")
    if found.dtype is not dtype:
        raise TypeError(f"{name}: dtype {_NAMES[found.dtype]}; must be {_NAMES[dtype]}")
    if found.shape != shape:
        raise InvalidArgument.about(f"{name}.shape", f"{found.shape}, must be {shape}")
    if not is_packed(found.shape, found.strides):
        raise InvalidArgument.about(f"{name}.strides", f"{found.strides} of shape {shape}, must be contiguous")
    if write:
        _check_writable(name, found)
    return int(found.c.ptr or 0)


def is_packed(shape: Tuple[int, ...], strides: Optional[Tuple[int, ...]]) -> bool:
    """Returns whether the elements lie in the order of C without gaps."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides or ())):
        if size != 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def _check_writable(name: str, target: Tensor) -> None:
    if not target.writable:
        raise InvalidArgument.about(name, f"must be writable (numpy, DLPack), and not require a gradient (torch), of shape {target.shape}")
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.strides or ())):
        raise InvalidArgument.about(f"{name}.strides", f"{target.strides} of shape {target.shape}, must not be 0: elements overlap")


def integers(name: str, array: Any) -> np.ndarray[Any, Any]:
    """Returns integers as a numpy array, in place if they are an array on the CPU."""
    if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(f"{name}: {type(array).__name__} is not exported by DLPack: {error}") from None
    return np.asarray(array)


def device_floats(name: str, array: Any, shape: Tuple[int, ...]) -> Tuple[int, Any]:
    """Returns the address of float32 on a GPU that a call may write to, by DLPack, and the object
    that keeps the memory alive.
    """
    return _device_words(name, array, (dlpack.FLOAT,), 32, shape)


def device_uint32s(name: str, array: Any, shape: Tuple[int, ...]) -> Tuple[int, Any]:
    """Like device_floats for 32-bit integers, signed or not: torch has only signed ones."""
    return _device_words(name, array, (dlpack.INT, dlpack.UINT), 32, shape)


def device_uint64s(name: str, array: Any, shape: Tuple[int, ...]) -> Tuple[int, Any]:
    """Like device_uint32s for 64-bit integers."""
    return _device_words(name, array, (dlpack.INT, dlpack.UINT), 64, shape)


def _device_words(name: str, array: Any, kinds: Tuple[int, ...], bits: int,
                  shape: Tuple[int, ...]) -> Tuple[int, Any]:
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name}: {type(array).__name__}; must be an array on a GPU that has __dlpack__")
    borrowed = dlpack.borrow(name, array)
    found = borrowed.tensor
    if found.device_type != dlpack.CUDA:
        raise TypeError(f"{name}: on DLPack device {found.device_type}; must be on a GPU")
    if found.code not in kinds or found.bits != bits or found.lanes != 1:
        wanted = "floats" if kinds == (dlpack.FLOAT,) else "integers"
        raise TypeError(f"{name}: dtype {(found.code, found.bits)} of DLPack; must be {bits}-bit {wanted}")
    if borrowed.shape != shape or not is_packed(shape, borrowed.strides):
        raise InvalidArgument.about(name, f"shape {borrowed.shape}, must be {shape}, contiguous")
    return borrowed.address, borrowed.capsule


def floats_to_write(name: str, array: Any, shape: Tuple[int, ...]) -> int:
    """Returns the address of an array to which a call may write float32."""
    return _address(name, array, DType.F32, shape)


def floats_to_read(name: str, array: Any, shape: Tuple[int, ...]) -> int:
    """Returns the address of contiguous float32."""
    return _address(name, array, DType.F32, shape, write=False)


def rows_to_write(name: str, array: Any, dtype: DType, shape: Tuple[int, ...]) -> int:
    """Returns the address of an array to which a call may write rows of the cache."""
    return _address(name, array, dtype, shape)


def tensor_to_fill(name: str, array: ArrayLike, device: Device = Device.CPU) -> Tensor:
    """Returns a tensor of any strides, paged or not, and of a dtype that the cache has, on this
    device, to which a call may write.
    """
    target = tensor(name, array)
    if target.device is not device:
        raise TypeError(f"{name}: on {'the CPU; must be on a GPU' if device is Device.CUDA else 'a GPU; must be on cpu'}")
    _check_writable(name, target)
    return target


def tensor_to_write(name: str, array: ArrayLike, shape: Tuple[int, ...], device: Device = Device.CPU) -> Tensor:
    """Returns what tensor_to_fill returns, of this shape."""
    target = tensor_to_fill(name, array, device)
    if target.shape != shape:
        raise InvalidArgument.about(f"{name}.shape", f"{target.shape}, must be {shape}")
    return target


def _is_plain(array: Any) -> bool:
    """Returns whether an array is float32 without strides."""
    if isinstance(array, np.ndarray):
        return array.dtype == np.float32 and bool(array.flags.c_contiguous)
    torch = _torch()
    return (torch is not None and isinstance(array, torch.Tensor) and array.dtype is torch.float32
            and array.device.type == "cpu" and bool(array.is_contiguous()))


def set_attention(attention: Any, output: Any, lse: Any, shape: Tuple[int, int, int], one_token: bool,
                  log_base: LogBase) -> None:
    """Lets a call write an attention [tokens, query_heads, value_dim] and its lse to arrays, whose
    first dimension is left out with `one_token`.
    """
    output_shape = shape[1:] if one_token else shape
    if _is_plain(output):
        attention.output = floats_to_write("output", output, output_shape)
        attention.output_capacity = shape[0] * shape[1] * shape[2]
    else:
        attention.output_tensor = ctypes.pointer(tensor_to_write("output", output, output_shape).c)
    if lse is not None and _is_plain(lse):
        attention.lse, attention.lse_capacity = floats_to_write("lse", lse, output_shape[:-1]), shape[0] * shape[1]
    elif lse is not None:
        attention.lse_tensor = ctypes.pointer(tensor_to_write("lse", lse, output_shape[:-1]).c)
    attention.lse_base = member(LogBase, "log_base", log_base)


def _uint32s(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the array as contiguous uint32; copies it only if it is not that already."""
    if array.dtype != np.uint32:
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name}: dtype {array.dtype}; must be integers")
        if array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF):
            raise InvalidArgument.about(name, "must be 0 to 2^32 - 1")
    return np.ascontiguousarray(array, dtype=np.uint32)


def positions_to_read(name: str, positions: Any, kv_heads: int) -> np.ndarray[Any, Any]:
    """Returns positions [kv_heads, count] as contiguous uint32."""
    array = integers(name, positions)
    if array.ndim != 2 or array.shape[0] != kv_heads:
        raise InvalidArgument.about(f"{name}.shape", f"{array.shape}, must be [kv_heads, count] with {kv_heads} kv_heads")
    return _uint32s(name, array)


def position_lists_to_read(name: str, positions: Any, items: int) -> np.ndarray[Any, Any]:
    """Returns positions [items, lists, capacity], or [items, capacity] of one list each, as contiguous int32."""
    array = integers(name, positions)
    if array.ndim == 2:
        array = array[:, None, :]
    if array.ndim != 3 or array.shape[0] != items:
        raise InvalidArgument.about(f"{name}.shape", f"{array.shape}, must be [items, lists, capacity] with {items} items")
    if array.dtype == np.uint32:
        array = np.ascontiguousarray(array).view(np.int32)
    elif array.dtype != np.int32:
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name}: dtype {array.dtype}; must be integers")
        if array.size and (array.min() < -1 or array.max() >= 1 << 31):
            raise InvalidArgument.about(name, "must be -1 to 2^31 - 1")
    return np.ascontiguousarray(array, dtype=np.int32)


def token_ids_to_read(name: str, token_ids: Any) -> np.ndarray[Any, Any]:
    array = integers(name, token_ids)
    if array.ndim != 1:
        raise InvalidArgument.about(f"{name}.shape", f"{array.shape}, must be [tokens]")
    return _uint32s(name, array) if array.size else np.empty(0, np.uint32)
