"""Converts foreign arrays to tensors of the C ABI by address, without copies.

Readable: numpy arrays, torch tensors on CPU or CUDA, and objects with __dlpack__ or
__array_interface__. Writable: numpy arrays and torch tensors on the CPU; by loads and steps on a
GPU, torch tensors and objects with __dlpack__ there.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from . import _abi as abi
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
    owner: Any  # keeps the memory alive


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
    return _Memory(array.__array_interface__["data"][0], Device.CPU, dtype, array.shape, strides, 0, array)


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
    return _Memory(array.data_ptr(), device, dtype, tuple(array.shape), strides, stream, array)


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_DL_DEVICES = {1: Device.CPU, 2: Device.CUDA, 3: Device.CPU}  # 3: page-locked host memory
_DL_INT, _DL_UINT, _DL_FLOAT, _DL_BFLOAT = 0, 1, 2, 4
_DL_CUDA = 2
_DL_DTYPES = {(_DL_FLOAT, 16): DType.F16, (_DL_FLOAT, 32): DType.F32, (_DL_BFLOAT, 16): DType.BF16,
              (_DL_UINT, 16): None}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _of_dlpack(name: str, array: Any) -> _Memory:
    # The capsule is not consumed: it lives until the call ends, and then frees the tensor itself.
    capsule = array.__dlpack__()
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if tensor.device_type not in _DL_DEVICES:
        raise TypeError(f"{name}: DLPack device {tensor.device_type}; must be CPU or CUDA")
    kind = (tensor.code, tensor.bits)
    if kind not in _DL_DTYPES or tensor.lanes != 1:
        raise _wrong_dtype(name, f"{kind} x {tensor.lanes} of DLPack")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    return _Memory((tensor.data or 0) + tensor.byte_offset, _DL_DEVICES[tensor.device_type], _DL_DTYPES[kind], shape,
                   strides, 0, capsule)


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
    to 4 dimensions.
    dtype: DType.BF16 means that an array of uint16 holds bfloat16; otherwise it must be the array's
    own dtype.

    Raises TypeError for an object that is no such array, InvalidArgument for strides that are not
    multiples of the element size.
    """

    __slots__ = ("c", "device", "dtype", "shape", "strides", "_owner")

    c: abi.Tensor
    device: Device
    dtype: DType
    shape: Tuple[int, ...]
    strides: Optional[Tuple[int, ...]]  # in elements; None = contiguous

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
        c = abi.Tensor()
        c.ptr = memory.address
        c.device, c.dtype, c.ndim = memory.device, self.dtype, ndim
        c.shape = _SHAPES[ndim](*memory.shape)
        if memory.strides is not None:
            c.strides = _STRIDES[ndim](*memory.strides)
        if memory.stream:
            c.stream = memory.stream
        self.c = c

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
        array = np.asarray(slots)
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


def _address(name: str, array: Any, dtypes: Sequence[Any], torch_dtypes: Sequence[str], shape: Tuple[int, ...],
             write: bool = True) -> int:
    torch = _torch()
    if isinstance(array, np.ndarray):
        dtype_fits, contiguous = array.dtype in dtypes, array.flags.c_contiguous
        writable, address = array.flags.writeable, array.__array_interface__["data"][0]
    elif torch is not None and isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise TypeError(f"{name}: on device {array.device}; must be on cpu")
        dtype_fits = array.dtype in [getattr(torch, dtype) for dtype in torch_dtypes]
        contiguous, writable, address = array.is_contiguous(), not array.requires_grad, array.data_ptr()
    else:
        raise TypeError(f"{name}: {type(array).__name__}; must be a numpy array or a torch tensor on the CPU")
    if not dtype_fits:
        raise TypeError(f"{name}: dtype {array.dtype}; must be {' or '.join(torch_dtypes)}")
    if tuple(array.shape) != shape:
        raise InvalidArgument.about(f"{name}.shape", f"{tuple(array.shape)}, must be {shape}")
    if not contiguous:
        raise InvalidArgument.about(name, "must be contiguous")
    if write and not writable:
        raise InvalidArgument.about(name, "must be writable (numpy), and not require a gradient (torch)")
    return int(address)


def device_floats(name: str, array: Any, shape: Tuple[int, ...]) -> Tuple[int, Any]:
    """Returns the address of float32 on a GPU that a call may write to, by DLPack, and the object
    that keeps the memory alive.
    """
    return _device_words(name, array, (_DL_FLOAT,), 32, shape)


def device_uint32s(name: str, array: Any, shape: Tuple[int, ...]) -> Tuple[int, Any]:
    """Like device_floats for 32-bit integers, signed or not: torch has only signed ones."""
    return _device_words(name, array, (_DL_INT, _DL_UINT), 32, shape)


def device_uint64s(name: str, array: Any, shape: Tuple[int, ...]) -> Tuple[int, Any]:
    """Like device_uint32s for 64-bit integers."""
    return _device_words(name, array, (_DL_INT, _DL_UINT), 64, shape)


def _device_words(name: str, array: Any, kinds: Tuple[int, ...], bits: int,
                  shape: Tuple[int, ...]) -> Tuple[int, Any]:
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name}: {type(array).__name__}; must be an array on a GPU that has __dlpack__")
    capsule = array.__dlpack__()
    found = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if found.device_type != _DL_CUDA:
        raise TypeError(f"{name}: on DLPack device {found.device_type}; must be on a GPU")
    if found.code not in kinds or found.bits != bits or found.lanes != 1:
        wanted = "floats" if kinds == (_DL_FLOAT,) else "integers"
        raise TypeError(f"{name}: dtype {(found.code, found.bits)} of DLPack; must be {bits}-bit {wanted}")
    has = tuple(found.shape[i] for i in range(found.ndim))
    strides = tuple(found.strides[i] for i in range(found.ndim)) if found.strides else None
    packed, step = [], 1
    for size in reversed(has):
        packed.append(step)
        step *= size
    if has != shape or (strides is not None and strides != tuple(reversed(packed))):
        raise InvalidArgument.about(name, f"shape {has}, must be {shape}, contiguous")
    return (found.data or 0) + found.byte_offset, capsule


def floats_to_write(name: str, array: Any, shape: Tuple[int, ...]) -> int:
    """Returns the address of an array to which a call may write float32."""
    return _address(name, array, [np.dtype(np.float32)], ["float32"], shape)


def floats_to_read(name: str, array: Any, shape: Tuple[int, ...]) -> int:
    """Returns the address of contiguous float32."""
    return _address(name, array, [np.dtype(np.float32)], ["float32"], shape, write=False)


def rows_to_write(name: str, array: Any, dtype: DType, shape: Tuple[int, ...]) -> int:
    """Returns the address of an array to which a call may write rows of the cache."""
    torch_dtype = {DType.F16: "float16", DType.BF16: "bfloat16", DType.F32: "float32"}[dtype]
    numpy_dtypes = [numpy_dtype(dtype)]
    if dtype is DType.BF16 and isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
        numpy_dtypes.append(array.dtype)
    return _address(name, array, numpy_dtypes, [torch_dtype], shape)


def tensor_to_fill(name: str, array: ArrayLike, device: Device = Device.CPU) -> Tensor:
    """Returns a tensor of any strides, paged or not, and of a dtype that the cache has, to which a
    call may write: a numpy array or a torch tensor on the CPU, or a Tensor of one; with Device.CUDA
    a torch tensor on a GPU, or an array there that has __dlpack__.
    """
    target = tensor(name, array)
    owner = target._owner
    torch = _torch()
    writable = True
    if isinstance(owner, np.ndarray):
        writable = bool(owner.flags.writeable)
    elif torch is not None and isinstance(owner, torch.Tensor):
        writable = not owner.requires_grad
    elif device is Device.CPU:
        raise TypeError(f"{name}: {type(array).__name__}; must be a numpy array or a torch tensor on the CPU")
    if target.device is not device:
        raise TypeError(f"{name}: on {'the CPU; must be on a GPU' if device is Device.CUDA else 'a GPU; must be on cpu'}")
    if not writable:
        raise InvalidArgument.about(name, "must be writable (numpy), and not require a gradient (torch)")
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
    array = np.asarray(positions)
    if array.ndim != 2 or array.shape[0] != kv_heads:
        raise InvalidArgument.about(f"{name}.shape", f"{array.shape}, must be [kv_heads, count] with {kv_heads} kv_heads")
    return _uint32s(name, array)


def position_lists_to_read(name: str, positions: Any, items: int) -> np.ndarray[Any, Any]:
    """Returns positions [items, lists, capacity], or [items, capacity] of one list each, as contiguous int32."""
    array = np.asarray(positions)
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
    array = np.asarray(token_ids)
    if array.ndim != 1:
        raise InvalidArgument.about(f"{name}.shape", f"{array.shape}, must be [tokens]")
    return _uint32s(name, array) if array.size else np.empty(0, np.uint32)
