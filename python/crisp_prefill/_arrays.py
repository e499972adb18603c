"""numpy arrays and torch tensors, told apart once: addresses, strides and new arrays of either kind.

Nothing here copies. Any other array that speaks DLPack becomes a numpy or torch view first.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from . import _core

CPU, CUDA = 0, 1
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
WORKSPACE_ALIGNMENT = 256
_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost


class Arrays(Protocol):
    """One library's arrays on one device. Strides count elements."""

    library: str
    device: int

    def stream(self) -> int: ...
    def guard(self) -> AbstractContextManager[Any]: ...
    def layout(self, a: Any) -> tuple[int, tuple[int, ...]]: ...
    def pointer(self, a: Any) -> int: ...
    def strides(self, a: Any) -> tuple[int, ...]: ...
    def dtype_code(self, name: str, a: Any) -> int: ...
    def empty_like_shape(self, a: Any, shape: tuple[int, ...]) -> Any: ...
    def float32(self, shape: tuple[int, ...]) -> Any: ...
    def words(self, shape: tuple[int, ...]) -> Any: ...
    def bytes(self, count: int) -> tuple[Any, int]: ...
    def to_numpy(self, a: Any) -> np.ndarray: ...
    def writable(self, a: Any) -> bool: ...


class NumpyArrays:
    library = "numpy"
    device = CPU
    _codes: dict[Any, int] = {np.dtype(np.float32): FLOAT32, np.dtype(np.float16): FLOAT16}

    def stream(self) -> int:
        return 0

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def layout(self, a: Any) -> tuple[int, tuple[int, ...]]:
        return _core.array_layout(a.__array_struct__)

    def pointer(self, a: Any) -> int:
        return _core.array_layout(a.__array_struct__)[0]

    def strides(self, a: Any) -> tuple[int, ...]:
        return self.layout(a)[1]

    def dtype_code(self, name: str, a: Any) -> int:
        code = self._codes.get(a.dtype)
        if code is None:
            # ml_dtypes' bfloat16 is a dtype that numpy itself does not know.
            if a.dtype.name != "bfloat16":
                raise TypeError(
                    f"{name}.dtype is {a.dtype}, expected float32, float16 or ml_dtypes.bfloat16"
                )
            code = self._codes[a.dtype] = BFLOAT16
        return code

    def empty_like_shape(self, a: Any, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, a.dtype)

    def float32(self, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, np.float32)

    def words(self, shape: tuple[int, ...]) -> Any:
        # 64-bit words underneath: the library wants the mask 8-byte aligned.
        return np.empty((*shape[:-1], shape[-1] // 2), np.uint64).view(np.uint32)

    def bytes(self, count: int) -> tuple[Any, int]:
        memory = np.empty(count + WORKSPACE_ALIGNMENT, np.uint8)
        address = self.pointer(memory)
        return memory, -(-address // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    def to_numpy(self, a: Any) -> np.ndarray:
        return np.asarray(a)

    def writable(self, a: Any) -> bool:
        return bool(a.flags.writeable)


class TorchArrays:
    library = "torch"

    def __init__(self, torch: Any, device: Any) -> None:
        self.torch = torch
        self.torch_device = device
        self.device = CUDA if device.type == "cuda" else CPU
        self._codes = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}

    def stream(self) -> int:
        if self.device == CPU:
            return 0
        return int(self.torch.cuda.current_stream(self.torch_device).cuda_stream)

    def guard(self) -> AbstractContextManager[Any]:
        if self.device == CPU:
            return nullcontext()
        guard: AbstractContextManager[Any] = self.torch.cuda.device(self.torch_device)
        return guard

    def layout(self, a: Any) -> tuple[int, tuple[int, ...]]:
        return a.data_ptr(), a.stride()

    def pointer(self, a: Any) -> int:
        address: int = a.data_ptr()
        return address

    def strides(self, a: Any) -> tuple[int, ...]:
        strides: tuple[int, ...] = a.stride()
        return strides

    def dtype_code(self, name: str, a: Any) -> int:
        code = self._codes.get(a.dtype)
        if code is None:
            raise TypeError(f"{name}.dtype is {a.dtype}, expected float32, float16 or bfloat16")
        return code

    def empty_like_shape(self, a: Any, shape: tuple[int, ...]) -> Any:
        return self.torch.empty(shape, dtype=a.dtype, device=self.torch_device)

    def float32(self, shape: tuple[int, ...]) -> Any:
        return self.torch.empty(shape, dtype=self.torch.float32, device=self.torch_device)

    def words(self, shape: tuple[int, ...]) -> Any:
        # torch has few operations on unsigned words; the bits are the same.
        return self.torch.empty(shape, dtype=self.torch.int32, device=self.torch_device)

    def bytes(self, count: int) -> tuple[Any, int]:
        memory = self.torch.empty(
            count + WORKSPACE_ALIGNMENT, dtype=self.torch.uint8, device=self.torch_device
        )
        address = memory.data_ptr()
        return memory, -(-address // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    def to_numpy(self, a: Any) -> np.ndarray:
        array: np.ndarray = a.detach().cpu().numpy()
        return array

    def writable(self, a: Any) -> bool:
        return True


_NUMPY = NumpyArrays()
_TORCH: dict[Any, TorchArrays] = {}


def _loaded_torch() -> Any:
    """torch if the process has it: a torch tensor cannot come from anywhere else."""
    return sys.modules.get("torch")


def _from_dlpack(name: str, x: Any) -> Any:
    torch = _loaded_torch()
    if x.__dlpack_device__()[0] in _DLPACK_CPU:
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError):
            if torch is None:  # bfloat16 and the like: numpy has no such dtype
                raise TypeError(
                    f"{name} is a {type(x).__name__} that numpy cannot view, expected float32 or "
                    "float16 (import torch for bfloat16)"
                ) from None
    elif torch is None:
        raise TypeError(
            f"{name} is a {type(x).__name__} on a GPU: import torch, through which it is viewed"
        )
    return torch.from_dlpack(x)


def adopt(name: str, x: Any) -> Any:
    """x as a numpy array or a torch tensor over the same memory."""
    if isinstance(x, np.ndarray):
        return x
    torch = _loaded_torch()
    if torch is not None and isinstance(x, torch.Tensor):
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, expected a tensor that does not: crisp has no backward pass. "
                "Use torch.no_grad() or .detach()"
            )
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(f"{name} is on {x.device}, expected cpu or cuda")
        return x
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(name, x)
    raise TypeError(
        f"{name} is a {type(x).__name__}, expected a numpy array, a torch tensor or any array with "
        "__dlpack__"
    )


def arrays_of(a: Any) -> Arrays:
    """What an adopted array belongs to."""
    if isinstance(a, np.ndarray):
        return _NUMPY
    device = a.device
    found = _TORCH.get(device)
    if found is None:
        found = _TORCH[device] = TorchArrays(_loaded_torch(), device)
    return found


def where(a: Any) -> str:
    """"numpy" or "torch on cuda:0", for messages."""
    return "numpy" if isinstance(a, np.ndarray) else f"torch on {a.device}"


def host_ints(name: str, values: Any) -> list[int]:
    """Ints that live on the host: a list, a numpy array or a CPU tensor."""
    if hasattr(values, "tolist"):
        device = getattr(values, "device", None)
        if device is not None and getattr(device, "type", "cpu") != "cpu":
            raise TypeError(
                f"{name} is on {device}, expected it on the host: reading it would wait for the device"
            )
        values = values.tolist()
    result = list(values)
    for value in result:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise TypeError(f"{name} has {value!r}, expected whole numbers")
    return [int(value) for value in result]
