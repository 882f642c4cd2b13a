"""Tensors that say they lie on a device, and the rules of that device."""

import functools
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sigmascope

Kind: TypeAlias = Literal["cuda", "mps"]

_ROOT: Final = str(Path(sigmascope.__file__).parent)
_HERE: Final = (__file__, f"{Path(__file__).parent / 'backends.py'}")
_STANDARD_LIBRARY: Final = sysconfig.get_path("stdlib")

_READS: Final = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
    | {"unique_consecutive", "repeat_interleave"}
)
"""Operations whose result, or its size, the host must know."""
_TO_HOST: Final = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "is_pinned", "_fused_sdp_choice"})
"""Operations that give no tensor of the device."""
_INDEXING: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_WIDE: Final = (torch.float64, torch.complex128)
_NO_FLOAT64: Final = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)
_COPIES: Final = frozenset({"_to_copy", "copy_", "copy"})
_JOINS: Final = frozenset({"cat", "stack"})


@dataclass(frozen=True)
class Wait:
    """What a real device would have made the host wait for, or a copy to it.

    Attributes:
        operation: As PyTorch calls it, such as `_local_scalar_dense` for `item()`.
        place: File, line and function that asked.
        is_ours: Whether that is Sigmascope, not the host or a library.
        thread: The thread's name.
    """

    operation: str
    place: str
    is_ours: bool
    thread: str


@dataclass(eq=False)
class PretendedDevice:
    """One device that does not exist.

    Attributes:
        kind: "cuda" or "mps".
        waits: For what the host would have waited, in order.
        uploads: Copies to the device from memory that is not pinned.
        asked_by: Names of the threads that called the device's own functions: its events, its memory.
        backward: Whether C++ takes its tensors for the CPU's, so that the autograd engine takes them.
    """

    kind: Kind
    waits: list[Wait] = field(default_factory=list)
    uploads: list[Wait] = field(default_factory=list)
    asked_by: set[str] = field(default_factory=set)
    backward: bool = False
    _leaving: threading.local = field(default_factory=threading.local)
    _pinned: dict[int, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, 0)

    @property
    def our_waits(self) -> list[Wait]:
        """Those that Sigmascope asked for."""
        return [wait for wait in self.waits if wait.is_ours]

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one operation on the CPU, as the device would answer it."""
        if _is_composite(function):  # these arrive whole in inference mode alone
            with self.here():
                return function.decompose(*args, **kwargs)
        name = function.overloadpacket.__name__
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        own = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
        wanted = kwargs.get("device")
        there = torch.device(wanted).type if wanted is not None else None
        if self.backward and own and not getattr(self._leaving, "now", False):
            there = None if there == "cpu" else there  # C++ says where it takes its tensors to be
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        if any(
            tensor.device.type == self.kind for tensor in tensors if not isinstance(tensor, PretendedTensor)
        ):
            raise NotImplementedError(f"{function}: a tensor came to the device by a way that is not carried")
        if own or there == self.kind:
            self._refuse_float64(name, args, kwargs)
            self._refuse_mixed(name, function, args, tensors)
            self._note(name, args, kwargs, own, there)
        answer = self._answer_of_pinned(name, tensors, kwargs)
        if answer is not None:
            return answer
        if own and name == "_fused_sdp_choice":
            return 0  # the plain formula
        is_pinned = bool(kwargs.get("pin_memory")) and (there or "cpu") == "cpu"
        own_kwargs = {key: value for key, value in kwargs.items() if not (key == "pin_memory" and value)}
        if there == self.kind:
            own_kwargs["device"] = torch.device("cpu")
        made = function(*mapped(values_of, args), **mapped(values_of, own_kwargs))
        if is_pinned or self._lands_pinned(name, own, there, kwargs):
            self._pinned[made.untyped_storage().data_ptr()] = made
        stays = there == self.kind or (bool(own) and there is None and name not in _TO_HOST)
        return self._as_answer(function, made, tensors, stays=stays)

    def _refuse_float64(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Metal converts on the device, also on the way to the CPU."""
        made = kwargs.get("dtype") if name == "_to_copy" else args[0].dtype if name == "copy_" else None
        source = args[1] if name == "copy_" else args[0] if args else None
        if self.kind == "mps" and made in _WIDE and isinstance(source, PretendedTensor):
            raise TypeError(_NO_FLOAT64)

    def _refuse_mixed(self, name: str, function: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        if name in _COPIES or (self.backward and torch._C._current_graph_task_id() != -1):
            return
        if name in _INDEXING and isinstance(args[0], PretendedTensor):  # its indices may lie on the CPU
            tensors = [args[0], *(leaf for leaf in args[2:3] if isinstance(leaf, Tensor))]
        devices = {str(tensor.device) for tensor in tensors if tensor.dim() > 0 or name in _JOINS}
        own = {str(tensor.device) for tensor in tensors if isinstance(tensor, PretendedTensor)}
        if len(devices | own) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(devices | own))}! ({function})"
            )

    def _note(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Sequence[Tensor],
        there: str | None,
    ) -> None:
        if name in _READS:
            if own:
                self.wait(name)
        elif name in _INDEXING:
            indices = [leaf for leaf in leaves_of(args[1]) if isinstance(leaf, Tensor)]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait(f"{name} by a mask")
            if any(index.device.type == "cpu" and index.dim() for index in indices):
                self.upload(f"{name}: an index on the CPU")
        elif name == "_to_copy":
            if own and there == "cpu":
                if not (kwargs.get("non_blocking") and self.kind == "cuda"):
                    self.wait("copy to the CPU")
            elif not own and not (kwargs.get("non_blocking") and self._is_pinned(args[0])):
                self.upload("copy to the device")
        elif name == "copy_":
            target, source = args[0], args[1]
            if not isinstance(target, PretendedTensor):
                is_free = bool((args[2] if len(args) > 2 else False) or kwargs.get("non_blocking"))
                if not (is_free and self._is_pinned(target)):
                    self.wait("copy to the CPU")
            elif not isinstance(source, PretendedTensor) and source.dim():
                self.upload("copy to the device")

    def wait(self, operation: str) -> None:
        """Note that the host would wait here."""
        self.waits.append(Wait(operation, *_who_asks(), threading.current_thread().name))

    def upload(self, operation: str) -> None:
        """Note a copy to the device."""
        self.uploads.append(Wait(operation, *_who_asks(), threading.current_thread().name))

    def _lands_pinned(
        self, name: str, own: Sequence[Tensor], there: str | None, kwargs: dict[str, Any]
    ) -> bool:
        """Whether PyTorch pins the memory of the copy that it makes."""
        to_cpu = name == "_to_copy" and bool(own) and there == "cpu"
        return to_cpu and bool(kwargs.get("non_blocking")) and self.kind == "cuda"

    def _answer_of_pinned(self, name: str, tensors: list[Tensor], kwargs: dict[str, Any]) -> Any:
        if name == "is_pinned":
            return self._is_pinned(tensors[0])
        if name in ("_pin_memory", "pin_memory"):
            made = tensors[0].clone()
            self._pinned[made.untyped_storage().data_ptr()] = made
            return made
        return None

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._pinned

    def _as_answer(self, function: Any, made: Any, tensors: list[Tensor], *, stays: bool) -> Any:
        """Give arguments that were changed in place themselves, and what is new as tensors of the device."""
        if function._schema.is_mutable:
            changed = {id(values_of(tensor)): tensor for tensor in tensors}
            for tensor in tensors:
                if isinstance(tensor, PretendedTensor) and tensor.shape != tensor.held.shape:
                    raise NotImplementedError(f"{function} changes a shape in place: see CANNOT_CARRY")
        else:
            changed = {}

        def answer(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in changed:
                return changed[id(leaf)]
            return self.put(leaf) if stays and leaf.device.type == "cpu" else leaf

        return mapped(answer, made)

    def put(self, values: Tensor) -> Tensor:
        """A tensor of the device with these values."""
        if self.kind == "mps" and values.dtype in _WIDE:
            raise TypeError(_NO_FLOAT64)
        return PretendedTensor(values, self)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """An operation that names the CPU means it."""
        self._leaving.now = True
        try:
            yield
        finally:
            self._leaving.now = False

    @contextmanager
    def here(self) -> Iterator[None]:
        """Take part in this thread: operations that name the device come here."""
        with _Mode(self):
            yield

    def asked(self, function: Callable[..., Any], *, waits: str = "") -> Callable[..., Any]:
        """One of the device's own functions, which notes who calls it."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.asked_by.add(threading.current_thread().name)
            if waits:
                self.wait(waits)
            return function(*args, **kwargs)

        return call


class PretendedTensor(Tensor):
    """A tensor that says it lies on the device.

    Attributes:
        held: Its values, on the CPU.
        pretended: Its device.
    """

    held: Tensor
    pretended: PretendedDevice
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, pretended: PretendedDevice) -> "PretendedTensor":
        made: PretendedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=torch.device("cpu") if pretended.backward else pretended.device,
        )
        made.held, made.pretended = values, pretended
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, PretendedTensor))
        return own.pretended.run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, tensor: Tensor) -> None:
        set_data(self, tensor)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.pretended.device

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def is_mps(self) -> bool:  # type: ignore[override]
        return self.device.type == "mps"

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.pretended.backward:
            return super().to(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copied = kwargs.pop("copy", False)
        parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, non_blocking, memory_format = parsed
        dtype = dtype or self.dtype
        if device is None or device.type == self.device.type:
            return super().to(dtype=dtype, memory_format=memory_format, copy=copied)
        with self.pretended.leaving():
            made: Tensor = torch.ops.aten._to_copy.default(
                self, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format
            )
        return made

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.to("cpu", memory_format=memory_format)

    def cuda(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self.to("cuda")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
            )
        return self.detach().cpu().numpy()

    def record_stream(self, stream: object) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.pretended.kind}, {tuple(self.shape)}, {self.dtype})"


def set_data(tensor: Tensor, new: Tensor) -> None:
    """`tensor.data = new`, from one device to another too."""
    if isinstance(new, PretendedTensor) == isinstance(tensor, PretendedTensor):
        OWN_DATA.__set__(tensor, new)
        if isinstance(new, PretendedTensor):
            vars(tensor)["held"] = new.held
        return
    other = torch.nn.Parameter(new.detach(), tensor.requires_grad)
    kinds: Any = (type(tensor), type(other))
    other.__class__, tensor.__class__ = kinds
    kept = {name: held for name, held in vars(tensor).items() if name not in _OF_A_PRETENDED}
    tensor.__dict__ = {**kept, **vars(other)}
    torch._C._swap_tensor_impl(tensor, other)


def to_device_of_other(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`tensor.to(other)`, which C++ would leave where it takes the other to be."""
    if args and isinstance(args[0], PretendedTensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    return OWN_TO(tensor, *args, **kwargs)


OWN_TO: Final[Callable[..., Tensor]] = Tensor.to
OWN_DATA: Final[Any] = Tensor.data
_OF_A_PRETENDED: Final = ("held", "pretended", "_is_param")


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, pretended: PretendedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pretended = pretended

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported at the first operation, in a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._pretended.run(func, args, kwargs or {})


@functools.cache
def _is_composite(function: Any) -> bool:
    return bool(function.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def values_of(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, PretendedTensor) else leaf


def leaves_of(tree: Any) -> list[Any]:
    """What lies in tuples, lists and dicts. PyTorch's own function was a fifth of the time of tests on a pretended device."""
    kind = type(tree)
    if kind is dict:
        tree = tree.values()
    elif kind is not tuple and kind is not list:
        return tree_leaves(tree) if isinstance(tree, tuple | list | dict) else [tree]
    return [leaf for part in tree for leaf in leaves_of(part)]


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Tuples, lists and dicts with each leaf changed."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(change, part) for part in tree])
    if kind is dict:
        return {key: mapped(change, part) for key, part in tree.items()}
    return tree_map(change, tree) if isinstance(tree, tuple | list | dict) else change(tree)


def _who_asks() -> tuple[str, bool]:
    """The innermost line that is neither PyTorch's nor the standard library's, and whether it is Sigmascope's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_ROOT):
            return f"{file[len(_ROOT) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}", True
        if not _asks_for_another(file):
            return f"{file.split('site-packages/')[-1]}:{frame.f_lineno} {frame.f_code.co_name}", False
        frame = frame.f_back
    return "unknown", False


def _asks_for_another(file: str) -> bool:
    if "/site-packages/" in file:
        return any(f"/site-packages/{name}/" in file for name in ("torch", "beartype", "jaxtyping"))
    return file in _HERE or file.startswith(("<", _STANDARD_LIBRARY))
