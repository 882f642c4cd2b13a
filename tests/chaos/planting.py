"""Faults planted where our own code calls: in its functions, and in those of others that it uses.

A fault is raised only where the caller is of `sigmascope`: what the host calls itself is the host's to raise.
"""

import functools
import inspect
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import psutil
import torch

Make = Callable[[object], BaseException]
_OURS = "sigmascope."
_NAMES: dict[str, tuple[Any, str]] = {
    "os": (os, "open fsync replace rename stat fstat unlink access"),
    "Path": (
        Path,
        "open read_text read_bytes write_text write_bytes stat mkdir unlink rename replace exists is_file is_dir "
        "iterdir chmod resolve",
    ),
    "shutil": (shutil, "rmtree copyfile move disk_usage"),
    "psutil": (psutil, "virtual_memory swap_memory cpu_times cpu_count pid_exists"),
    "psutil.Process": (psutil.Process, "memory_info memory_full_info oneshot cpu_times"),
    "json": (json, "dumps loads load"),
    "threading.Thread": (threading.Thread, "start"),
    "torch": (
        torch,
        "empty zeros tensor stack cat from_numpy isfinite empty_like zeros_like get_rng_state save load frombuffer "
        "arange set_num_threads",
    ),
    "torch.Tensor": (
        torch.Tensor,
        "to float double clone cpu contiguous copy_ numpy item tolist new_empty sum mean std min max isfinite view "
        "reshape storage_offset data_ptr untyped_storage detach numel is_floating_point",
    ),
    "torch.nn.Module": (
        torch.nn.Module,
        "register_forward_pre_hook register_forward_hook modules named_modules parameters named_parameters buffers "
        "state_dict load_state_dict",
    ),
    "inspect": (inspect, "signature isfunction"),
}
FOREIGN: dict[str, tuple[Any, list[str]]] = {
    home: (owner, names.split()) for home, (owner, names) in _NAMES.items()
}
"""What we call of others, by the name under which a fault there is told of."""
_DUNDERS = ("__init__", "__enter__", "__call__", "__iter__", "__post_init__")


@dataclass(frozen=True)
class Point:
    """A function that can be made to raise.

    Attributes:
        home: The module of it, or a key of `FOREIGN`.
        name: Its qualified name there.
    """

    home: str
    name: str

    def __str__(self) -> str:
        return f"{self.home.removeprefix(_OURS)}.{self.name}"

    @property
    def is_foreign(self) -> bool:
        return self.home in FOREIGN

    def owner(self) -> tuple[Any, str]:
        """The module or class that holds it, and its name in it."""
        *path, last = self.name.split(".")
        owner = FOREIGN[self.home][0] if self.is_foreign else sys.modules[self.home]
        for part in path:
            owner = vars(owner)[part]
        return owner, last


def foreign_points() -> list[Point]:
    """All of `FOREIGN`."""
    return [
        Point(home, name)
        for home, (owner, names) in FOREIGN.items()
        for name in names
        if hasattr(owner, name)
    ]


def own_points(*packages: str) -> list[Point]:
    """Every function and method that modules of ours define, if they are loaded.

    Args:
        packages: Below `sigmascope`; a module, or a package with all in it.
    """
    starts = tuple(_OURS + package for package in packages)
    modules = {
        name: module
        for name, module in sorted(sys.modules.items())
        if any(name == start or name.startswith(f"{start}.") for start in starts)
    }
    return [Point(name, inner) for name, module in modules.items() for inner in _functions_of(module)]


def _functions_of(module: ModuleType) -> Iterator[str]:
    for name, held in sorted(vars(module).items()):
        if getattr(held, "__module__", None) != module.__name__:
            continue
        if _is_written_in(held, module):
            yield name
        elif inspect.isclass(held) and held.__qualname__ == name:
            for inner, method in vars(held).items():
                is_usual = not inner.startswith("__") or inner in _DUNDERS
                if is_usual and _is_written_in(getattr(method, "__func__", method), module):
                    yield f"{name}.{inner}"


def _is_written_in(held: object, module: ModuleType) -> bool:
    held = inspect.unwrap(held) if isinstance(held, FunctionType) else held
    return isinstance(held, FunctionType) and held.__code__.co_filename == module.__file__


@dataclass
class Fault:
    """What is planted at a point.

    Attributes:
        at: Which call raises, from 1; 0: none does, they are only counted.
        make: Makes what is raised, given the call's first argument.
        lasts: Whether all calls after that raise too.
        calls: By our own code, so far.
        raised: All that was raised.
    """

    point: Point
    at: int = 0
    make: Make = lambda _: RuntimeError()
    lasts: bool = False
    calls: int = 0
    raised: list[BaseException] = field(default_factory=list)

    def called(self, args: tuple[Any, ...], *, told_to_ignore: bool = False) -> bool:
        """Count a call, and raise if it is the one.

        Args:
            args: That the call is given.
            told_to_ignore: Whether the function does nothing where the system refuses, as `rmtree` can.

        Returns:
            Whether it is to do nothing.
        """
        self.calls += 1
        if self.at and (self.calls == self.at or (self.lasts and self.calls > self.at)):
            error = self.make(args[0] if args else None)
            if (
                isinstance(error, KeyboardInterrupt)
                and threading.current_thread() is not threading.main_thread()
            ):
                return False  # where Python never raises it
            self.raised.append(error)
            if not (told_to_ignore and isinstance(error, OSError)):
                raise error
            return True
        return False

    def __str__(self) -> str:
        kind = type(self.make(None)).__name__
        return f"{kind} in call {self.at}{' and after' if self.lasts else ''} of {self.point}"


@contextmanager
def planted(faults: Sequence[Fault]) -> Iterator[None]:
    """Let the faults happen inside the block."""
    with ExitStack() as undo:
        places, planted_for = _places(), dict[int, tuple[object, object]]()
        undo.callback(_put_back, planted_for)  # the last of all
        for fault in faults:
            _plant(fault, places, undo, planted_for)
        try:
            yield
        finally:
            for error in (error for fault in faults for error in fault.raised):
                error.__traceback__ = None  # which keeps alive whatever the functions had open


def _places() -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Where modules of ours hold each function under a name, imported ones too, by its `id`."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            for key, held in vars(module).items():
                if callable(held):
                    found.setdefault(id(held), []).append((vars(module), key))
    return found


def _plant(
    fault: Fault,
    places: dict[int, list[tuple[dict[str, Any], str]]],
    undo: ExitStack,
    planted_for: dict[int, tuple[object, object]],
) -> None:
    owner, name = fault.point.owner()
    is_own = name in vars(owner)
    before = vars(owner)[name] if is_own else getattr(owner, name)
    replaced = _replacement(before, fault)
    if isinstance(owner, type):
        setattr(owner, name, replaced)
        undo.callback(
            functools.partial(setattr, owner, name, before)
            if is_own
            else functools.partial(delattr, owner, name)
        )
        return
    planted_for[id(replaced)] = replaced, before
    for holder, key in [(vars(owner), name), *places.get(id(before), ())]:
        holder[key] = replaced
        undo.callback(holder.__setitem__, key, before)


def _put_back(planted_for: dict[int, tuple[object, object]]) -> None:
    """Where a module took what was planted by its name, because it was imported meanwhile."""
    for identity, holders in _places().items():
        if identity in planted_for:
            for holder, key in holders:
                holder[key] = planted_for[identity][1]


def _replacement(before: Any, fault: Fault) -> Any:
    if isinstance(before, classmethod | staticmethod):
        return type(before)(_replacement(before.__func__, fault))

    if inspect.iscoroutinefunction(before):  # frameworks ask for that, and await it themselves

        @functools.wraps(before)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            fault.called(args)
            return await before(*args, **kwargs)

        return awaited

    @functools.wraps(before)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        is_importing = caller.f_code.co_name == "<module>"  # what is made once, and with nobody's values
        is_ours = caller.f_globals.get("__name__", "").startswith(_OURS) and not is_importing
        if is_ours and fault.called(args, told_to_ignore=bool(kwargs.get("ignore_errors"))):
            return None
        return before(*args, **kwargs)

    return call


def counted(work: Callable[[], object], points: Iterable[Point]) -> dict[Point, int]:
    """How often our own code calls each point while the work is done; those that it never calls are left out."""
    faults = [Fault(point) for point in points]
    with planted(faults):
        work()
    return {fault.point: fault.calls for fault in faults if fault.calls}
