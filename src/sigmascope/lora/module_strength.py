"""How strong one module of a LoRA is, in how many directions, and what its stored tensors look like.

Plain factors are measured from r×r matrices; other kinds of change are formed. Each stored tensor has its facts
(`TensorFacts`), which `sigmascope.lora.health` holds to those of its neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite, prod, sqrt
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.factors import LoraFactors, singular_values_together
from sigmascope.lora.file import LoraFile
from sigmascope.lora.kinds.base_change import norm_without_base
from sigmascope.lora.layer_names import block_of_module
from sigmascope.lora.linalg import (
    as_float64,
    effective_rank,
    frobenius_norm,
    max_rank,
    root_sum_square,
    stable_rank,
)

__all__ = ["ModuleStrength", "TensorFacts", "measured_module", "measured_modules", "stored_tensors"]

_MAX_SPECTRUM_RANK: Final = 512
_LARGEST_STACKED: Final = 64
"""Above this rank the singular values of one module cost more than the calls that find them."""
_LEAST_HOLE_BYTES: Final = 256
"""A shorter run of zeros may be chance, or rounding of small numbers."""
_LEAST_HOLE_ELEMENTS: Final = 64
_LARGEST_HOLE_IN_ROWS: Final = 1 / 8
"""A larger share of whole rows is a part of a fused matrix that was left out."""
_OTHER_ZEROS: Final = 0.01
"""With a larger share of zeros beside the run, zeros are common in the tensor."""
Problem = Literal["not_finite", "needs_base"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the stored numbers of one tensor look like.

    Attributes:
        part: Which of the module's tensors: `up`, `down`, `hada_w1_a`, `magnitude`, …
        largest: The largest absolute value.
        norm: The root of the sum of squares.
        hole: First element and length of a run of zeros that no row or column of zeros explains; None if there is none.
    """

    part: str
    largest: float
    norm: float
    hole: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ModuleStrength:
    """How strong one module of a LoRA is, and in how many directions.

    Attributes:
        name: Its name in the file.
        kind: `lora` for plain factors, else `loha`, `lokr`, `tucker`, `dora`, `diff` or `set`.
        shape: Of the changed weight.
        rank: Of its factors; None if it has none.
        parameters: Number of stored values.
        alpha: As stored; None unless the factors are plain.
        scale: The factor on up·down, alpha / rank; None unless the factors are plain.
        dtype: Of plain factors, such as `float16`.
        norm: ‖ΔW‖ at strength 1; None if there is a problem.
        singular_values: All min(rank, out, in) of ΔW, falling; empty unless the factors are plain and the spectrum
            was calculated.
        dead_columns: How many columns of up change nothing, because they or their rows of down are zero.
        problem: `not_finite`: it holds NaN or Inf. `needs_base`: what it changes depends on the base weight.
        tensors: What its stored numbers look like; empty if they are not finite.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    parameters: int
    alpha: float | None = None
    scale: float | None = None
    dtype: str | None = None
    norm: float | None = None
    singular_values: tuple[float, ...] = ()
    dead_columns: int = 0
    problem: Problem | None = None
    tensors: tuple[TensorFacts, ...] = ()

    @property
    def block(self) -> str:
        """The module's block, named the same in every format."""
        return block_of_module(self.name)

    @property
    def size(self) -> float | None:
        """The root mean square of ΔW's values, ‖ΔW‖ / √(out·in), comparable between layers of any shape."""
        return None if self.norm is None else self.norm / sqrt(max(prod(self.shape), 1))

    @property
    def largest(self) -> float | None:
        """σ₁, the most that the change can add to an input of length 1."""
        return self.singular_values[0] if self.singular_values else None

    @property
    def spike(self) -> float | None:
        """σ₁ / σ₂, how far one direction stands out; None if there are not two."""
        first, second = (*self.singular_values[:2], 0.0, 0.0)[:2]
        return first / second if second > 0.0 else None

    @property
    def stable_rank(self) -> float | None:
        """See `sigmascope.lora.linalg.stable_rank`."""
        return stable_rank(self._values) if self.singular_values else None

    @property
    def effective_rank(self) -> float | None:
        """See `sigmascope.lora.linalg.effective_rank`."""
        return effective_rank(self._values) if self.singular_values else None

    def as_dict(self, *, spectrum: bool = False) -> dict[str, Any]:
        """The module as JSON values.

        Args:
            spectrum: Also all singular values.
        """
        names = [field.name for field in fields(self) if field.name not in {"singular_values", "tensors"}]
        derived = ("block", "size", "largest", "spike", "stable_rank", "effective_rank")
        values = {name: getattr(self, name) for name in (*names, *derived)}
        return values | {"singular_values": list(self.singular_values)} if spectrum else values

    @property
    def _values(self) -> Float[Tensor, " k"]:
        return torch.tensor(self.singular_values, dtype=torch.float64)


_Grams = tuple[Tensor, Tensor]


def measured_modules(
    lora: LoraFile, names: Sequence[str], *, full_spectrum: bool = False
) -> list[ModuleStrength]:
    """Read and measure modules one by one, and find the spectra of small ranks together.

    Args:
        lora: The open file; that it refuses NaN and Inf when a module is read is not needed.
        names: Of the modules.
        full_spectrum: Also the singular values of a rank above 512.
    """
    waiting: dict[str, _Grams] = {}
    measured = {name: _measured(lora, name, full_spectrum, waiting) for name in names}
    by_rank: dict[int, list[str]] = {}
    for name, grams in waiting.items():
        by_rank.setdefault(len(grams[0]), []).append(name)
    for of_one_rank in by_rank.values():
        stacked = torch.stack([torch.stack(waiting[name]) for name in of_one_rank])
        lengths = stacked.diagonal(dim1=-2, dim2=-1)
        rows = zip(
            of_one_rank, singular_values_together(stacked), _dead(lengths), _norms(lengths), strict=True
        )
        for name, values, dead, norms in rows:
            if values is None:
                measured[name] = measured_module(lora, name, full_spectrum=full_spectrum)
            else:
                module = measured[name]
                scaled = (values * abs(module.scale or 0.0)).tolist()
                measured[name] = replace(
                    module,
                    norm=root_sum_square(scaled),
                    singular_values=tuple(scaled),
                    dead_columns=dead,
                    tensors=_with_norms(module.tensors, norms),
                )
    return [measured[name] for name in names]


def _dead(lengths: Float[Tensor, "*n 2 r"]) -> Any:
    """How many columns of up change nothing, by the squared lengths of its columns and of the rows of down."""
    return (lengths == 0.0).any(dim=-2).sum(dim=-1).tolist()


def _norms(lengths: Float[Tensor, "*n 2 r"]) -> Any:
    return lengths.sum(dim=-1).sqrt().tolist()


def _with_norms(tensors: Sequence[TensorFacts], norms: Sequence[float]) -> tuple[TensorFacts, ...]:
    return tuple(
        TensorFacts(one.part, one.largest, norm, one.hole) for one, norm in zip(tensors, norms, strict=True)
    )


def measured_module(lora: LoraFile, name: str, *, full_spectrum: bool = False) -> ModuleStrength:
    """Read and measure one module.

    Args:
        lora: The open file.
        name: Of the module.
        full_spectrum: Also the singular values of a rank above 512.
    """
    return _measured(lora, name, full_spectrum, None)


def _measured(
    lora: LoraFile, name: str, full_spectrum: bool, waiting: dict[str, _Grams] | None
) -> ModuleStrength:
    """As `measured_module`; the Gram matrices of a small rank go to `waiting` instead of a spectrum, if there is one."""
    facts = lora.facts[name]
    module = ModuleStrength(name, facts.kind, facts.weight_shape, facts.rank, facts.parameters)
    try:
        change = lora.change(name)
        if isinstance(change, LoraFactors):
            return _with_spectrum(module, change, full_spectrum, waiting)
        module = replace(module, tensors=_facts_of(stored_tensors(change)))
        norm = norm_without_base(change)
        return replace(module, norm=norm, problem="needs_base" if norm is None else None)
    except NonFiniteError:
        return replace(module, problem="not_finite")


def _with_spectrum(
    module: ModuleStrength, factors: LoraFactors, full: bool, waiting: dict[str, _Grams] | None
) -> ModuleStrength:
    """Measure plain factors from r×r matrices. Above rank 512 the spectrum is slow, and left out unless `full`."""
    module = replace(
        module,
        alpha=factors.alpha,
        scale=factors.scale,
        dtype=str(factors.up.dtype).removeprefix("torch."),
        tensors=tuple(_tensor_facts(part, tensor) for part, tensor in stored_tensors(factors).items()),
    )
    full = full or min(factors.rank, max_rank(factors.weight_shape)) <= _MAX_SPECTRUM_RANK
    is_wide = factors.rank > max_rank(factors.weight_shape)  # the change is smaller than its Gram matrices
    grams = None if is_wide else factors.grams()
    if full and waiting is not None and grams is not None and factors.rank <= _LARGEST_STACKED:
        waiting[module.name] = grams
        return module
    lengths = torch.stack(
        [as_float64(part).square().sum(dim=0) for part in (factors.up, factors.down.mT)]
        if grams is None
        else [gram.diagonal() for gram in grams]
    )
    values = factors.singular_values(grams).tolist() if full else []
    if full:
        norm = root_sum_square(values)
    elif grams is None:
        norm = float(torch.linalg.vector_norm(factors.delta(torch.float64)))
    else:
        norm = abs(factors.scale) * sqrt(max(float((grams[0] * grams[1]).sum()), 0.0))
    return replace(
        module,
        norm=norm,
        singular_values=tuple(values),
        dead_columns=_dead(lengths),
        tensors=_with_norms(module.tensors, _norms(lengths)),
    )


def stored_tensors(change: LoraFactors | WeightChange) -> Mapping[str, Tensor]:
    """The tensors of a change by what they are, alphas left out."""
    if isinstance(change, LoraFactors):
        return {"up": change.up, "down": change.down}
    if isinstance(change, DoraChange):
        return {**stored_tensors(change.direction), "magnitude": change.magnitude}
    return change.parts if isinstance(change, Adapter) else {}


def _facts_of(tensors: Mapping[str, Tensor]) -> tuple[TensorFacts, ...]:
    return _with_norms(
        [_tensor_facts(part, tensor) for part, tensor in tensors.items()],
        list(map(frobenius_norm, tensors.values())),
    )


def _tensor_facts(part: str, tensor: Tensor) -> TensorFacts:
    """The facts without the norm.

    Raises:
        NonFiniteError: It holds NaN or Inf.
    """
    if tensor.numel() == 0:
        return TensorFacts(part, 0.0, 0.0)
    low, high = (float(end) for end in tensor.aminmax())
    if not (isfinite(low) and isfinite(high)):
        raise NonFiniteError(f"{part} holds NaN or Inf.")
    zeros = tensor.numel() - _count_nonzero(tensor)
    largest = max(-low, high)
    hole = _hole(tensor) if _is_long(zeros, tensor) and largest > 0.0 else None
    return TensorFacts(part, largest, 0.0, hole)


def _count_nonzero(tensor: Tensor) -> int:
    """Of the stored bits, which NumPy counts in a tenth of PyTorch's time; -0.0 counts, which lost bytes never are."""
    as_stored = tensor if tensor.is_contiguous() else tensor.mT
    if tensor.device.type != "cpu" or not as_stored.is_contiguous():
        return int(torch.count_nonzero(tensor))
    return int(np.count_nonzero(as_stored.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.itemsize}")))


def _is_long(run: int, tensor: Tensor) -> bool:
    return run >= _LEAST_HOLE_ELEMENTS and run * tensor.dtype.itemsize >= _LEAST_HOLE_BYTES


def _hole(tensor: Tensor) -> tuple[int, int] | None:
    """The longest run of zeros in the order of the file, if only lost bytes explain it.

    Rows and columns that are zero as a whole are common: directions that were cut or never trained, and parts of a
    fused matrix that were left out.
    """
    stored = tensor if tensor.is_contiguous() else tensor.mT
    matrix = stored.reshape(stored.shape[0], -1) == 0
    rows, width = matrix.shape
    zeros = matrix & ~matrix.all(dim=0)
    marks = torch.nn.functional.pad(zeros.flatten().to(torch.int8), (1, 1)).diff()
    starts, ends = (marks == 1).nonzero().flatten(), (marks == -1).nonzero().flatten()
    if len(starts) == 0:
        return None
    longest = int((ends - starts).argmax())
    start, length = int(starts[longest]), int(ends[longest] - starts[longest])
    if not _is_long(length, tensor) or int(zeros.sum()) - length > _OTHER_ZEROS * zeros.numel():
        return None
    whole_rows = start % width == 0 and length % width == 0
    if whole_rows and (length // width <= 1 or length >= _LARGEST_HOLE_IN_ROWS * rows * width):
        return None
    return start, length
