"""Facts about tensors, modules and errors, as plain values (no torch here)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

JsonScalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor. Statistics are over its finite elements; counts are of the others."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    nbytes: int
    num_elements: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One model or part of a model.

    `dtypes` and `devices` count elements; they and `nbytes` include buffers. `wrapper_class_name` is the
    class of what the module came in, such as ComfyUI's ModelPatcher.
    """

    class_name: str
    parameters: int | None = None
    trainable_parameters: int | None = None
    nbytes: int | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    training: bool | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    wrapper_class_name: str | None = None


@dataclass(frozen=True, slots=True)
class ExceptionDetails:
    """An exception of the watched code: its type, message and stack trace as text."""

    type: str
    message: str
    traceback: str
