"""Weight changes that are more than one product up·down: LoHa, LoKr, Tucker, DoRA, whole differences.

All have the interface of `WeightChange`, however they are stored:

    LoHa    the elementwise product of two low-rank matrices (FedPara, Hyeon-Woo et al., arXiv 2108.06098)
    LoKr    the Kronecker product of two smaller matrices (KronA, Edalati et al., arXiv 2212.10650; LyCORIS)
    Tucker  a convolution as three factors: a kernel between two 1×1 convolutions (LoCon with a Tucker core)
    DoRA    direction and magnitude of a weight apart (Liu et al., arXiv 2402.09353)
    diff    a whole difference that is added to the weight
    set     a whole tensor that takes the weight's place

DoRA makes W' = m · (W + δ) / ‖W + δ‖, with one magnitude and norm for each output, or in LyCORIS also for each
input. The norm is that of the changed weight, as the paper, PEFT and LyCORIS have it in training. ComfyUI divides by
the norm of the unchanged weight where magnitudes are per output, so it shows such files a little differently.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, isfinite, prod, sqrt
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.factors import NUMBER_FOR_ALPHA, LoraFactors
from sigmascope.lora.linalg import (
    as_float64,
    at_least_float32,
    frobenius_norm,
    gram_in_double,
    in_dtype,
    max_rank,
)
from sigmascope.lora.parallel import require_wanted
from sigmascope.units import format_size

__all__ = [
    "Adapter",
    "AdapterFacts",
    "DiffChange",
    "DoraChange",
    "LohaChange",
    "LokrChange",
    "SetChange",
    "TuckerChange",
    "WeightChange",
    "scale_of",
]

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a change's tensors by the end of their key."""

# The tensors of a LoKr change.
_W1, _W1_A, _W1_B = "lokr_w1", "lokr_w1_a", "lokr_w1_b"
_W2, _W2_A, _W2_B = "lokr_w2", "lokr_w2_a", "lokr_w2_b"
_CORE = "lokr_t2"

# Those of a Tucker change.
UP = "lora_up.weight"
DOWN = "lora_down.weight"
MID = "lora_mid.weight"

_UNCHECKED_BYTES = 1 << 28  # bytes that need not be asked for
_MORE_MEMORY = "Check the file: hardly any model has such a layer. Or use a machine with more memory."
_MAX_ORDER_COST_RATIO = (
    64  # times as much work in one order of the factors of a Tucker product as in the other
)
_PIECE_ELEMENTS = 1 << 21  # elements that are formed at a time
_MAX_GRAM_ROWS = 2048  # rows of a Gram matrix of pairs: 32 MiB


@runtime_checkable
class WeightChange(Protocol):
    """A change ΔW of one tensor of a model."""

    @property
    def kind(self) -> str:
        """`loha`, `lokr`, `tucker`, `dora`, `diff` or `set`."""
        ...

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the changed tensor, as far as the change knows it: see `Adapter.weight_shape`."""
        ...

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        ...

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW, in the base's shape if a base is given.

        Args:
            base: The weight that is changed. `dora` and `set` need it.
            dtype: Of the result. The calculation runs in float32 or wider.
        """
        ...

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64."""
        ...


def form_delta(name: str, change: "LoraFactors | WeightChange", base: Tensor | None = None) -> Tensor:
    """Form in float32 the ΔW of a file's module, if memory can hold it: small factors may declare a weight of terabytes.

    Args:
        name: The module's name, for the message.
        change: Its change.
        base: The weight that is changed, if there is one.

    Raises:
        LoraFormatError: The machine lacks the memory.
        NonFiniteError: The product overflows.
        SigmascopeError: As from `change.delta`.
    """
    size = require_memory(name, change.weight_shape, torch.float32)
    try:
        delta = change.delta() if isinstance(change, LoraFactors) else change.delta(base)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise LoraFormatError(
                f"{name}: there is not enough memory for {size}.", hint=_MORE_MEMORY
            ) from error
        raise
    require_wanted()
    if not bool(torch.isfinite(delta).all()):
        raise NonFiniteError(
            f"{name}: the product of its tensors is too large for float32.",
            hint="Make the LoRA again: no real change is that large.",
        )
    return delta


def require_memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Refuse a change that needs more memory than is free; otherwise return its size in words.

    Raises:
        LoraFormatError: With both sizes.
    """
    needed = 2 * prod(shape) * dtype.itemsize  # the product, and it scaled
    size = f"a weight {shape}, which takes {format_size(needed)} to form"
    if needed > _UNCHECKED_BYTES:
        from sigmascope.probes.host import system_memory

        free = system_memory().ram_available_bytes
        if free is not None and needed > free:
            message = f"{name}: its tensors declare {size}; {format_size(free)} are free."
            raise LoraFormatError(message, hint=_MORE_MEMORY)
    return size


class AdapterFacts(NamedTuple):
    """What the shapes of a change's tensors say about it.

    Attributes:
        weight_shape: As in `Adapter`.
        rank: The inner dimension that alpha is divided by; None if there is none, and then there is no scale.
    """

    weight_shape: tuple[int, ...]
    rank: int | None


@dataclass(frozen=True, eq=False)
class Adapter(ABC):
    """A weight change made of stored tensors.

    Attributes:
        parts: The tensors as they are in the file, by the end of their key: `hada_w1_a`, `lokr_w1`, `diff`, …
        scale: What the tensors' product is multiplied by: alpha / rank.
        weight_shape: Shape of the changed tensor; derived from the parts by default. If the kernel of a convolution
            (out, in, kh, kw) does not show in them, it is (out, in·kh·kw).

    Raises:
        LoraFormatError: The parts do not fit together.
        ModelMismatchError: They do not fit a tensor of `weight_shape`.
        NonFiniteError: The scale is NaN or infinite.
    """

    parts: Mapping[str, Tensor]
    scale: float = 1.0
    weight_shape: tuple[int, ...] = ()

    kind: ClassVar[str] = ""
    needs_base: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isfinite(self.scale):
            raise NonFiniteError(f"the scale alpha / rank is {self.scale}.", hint=NUMBER_FOR_ALPHA)
        own = self._own_facts().weight_shape
        given = tuple(self.weight_shape) or own
        if given[:1] != own[:1] or prod(given) != prod(own):
            raise ModelMismatchError(
                f"a {self.kind} change of a weight {own} does not fit a weight {given}.",
                hint="Use the LoRA with the model it was made for.",
            )
        object.__setattr__(self, "weight_shape", given)

    @classmethod
    @abstractmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """What parts of these shapes would change, without reading them.

        Raises:
            LoraFormatError: They do not fit together, or one is missing.
        """

    @abstractmethod
    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The change before its scale is applied, in any shape with the right number of values."""

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return sum(part.numel() for part in self.parts.values())

    @property
    def rank(self) -> int | None:
        """The inner dimension that alpha is divided by; None where there is none."""
        return self._own_facts().rank

    @property
    def most_values(self) -> int:
        """The most singular values above 0 that ΔW can have as a matrix (out, …)."""
        return max_rank(self.weight_shape)

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW; see `WeightChange.delta`.

        Raises:
            LoraFormatError: This kind depends on the base weight, and none is given.
            ModelMismatchError: The base is of another shape.
        """
        if base is None and self.needs_base:
            raise LoraFormatError(
                f"a change of kind {self.kind} depends on the weight that it changes.",
                hint="Give the base model too.",
            )
        if base is not None and tuple(base.shape) != self.weight_shape:
            return self.shaped(base.shape).delta(base, dtype)
        change = self.product(at_least_float32(dtype), base).mul(self.scale)
        return change.to(dtype).reshape(self.weight_shape)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64 and without forming ΔW where its kind allows; raises what `delta` does."""
        if base is not None and tuple(base.shape) != self.weight_shape:
            return self.shaped(base.shape).frobenius_norm(base)
        norm = self._norm_of_product()
        return frobenius_norm(self.delta(base)) if norm is None else abs(self.scale) * norm

    def _norm_of_product(self) -> float | None:
        """The norm before the scale, if it can be had without forming the product."""
        return None

    def shaped(self, weight_shape: Sequence[int]) -> "Adapter":
        """The same change of a weight whose shape is known.

        Raises:
            ModelMismatchError: The change is none of such a weight.
        """
        return replace(self, weight_shape=tuple(weight_shape))

    def part(self, name: str, compute: torch.dtype) -> Tensor:
        """One stored tensor in the dtype to calculate in."""
        return in_dtype(self.parts[name].detach(), compute)

    def _own_facts(self) -> AdapterFacts:
        return self.facts({name: tuple(part.shape) for name, part in self.parts.items()})


class LohaChange(Adapter):
    """ΔW = scale · (w1_a·w1_b) ⊙ (w2_a·w2_b), parts `hada_w1_a` … `hada_w2_b`.

    With cores `hada_t1` and `hada_t2` (r, r, kh, kw) either side is a Tucker product, and the `_a` factors are
    (r, out) instead of (out, r).
    """

    kind = "loha"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """The shape of either side, and the rows of `hada_w1_b`."""
        names = [f"hada_w{side}_{end}" for side in (1, 2) for end in "ab"]
        require_parts(shapes, *names)
        cores = [name for name in ("hada_t1", "hada_t2") if name in shapes]
        if cores:
            require_parts(shapes, "hada_t1", "hada_t2")
            factor_shapes = [_tucker_shape(shapes, f"hada_t{side}", f"hada_w{side}") for side in (1, 2)]
        else:
            for side in (1, 2):
                inner_size(shapes, f"hada_w{side}_a", f"hada_w{side}_b")
            factor_shapes = [(shapes[f"hada_w{side}_a"][0], shapes[f"hada_w{side}_b"][1]) for side in (1, 2)]
        if factor_shapes[0] != factor_shapes[1]:
            raise shapes_error(shapes, *names)
        return AdapterFacts(factor_shapes[0], shapes["hada_w1_b"][0])

    @property
    def most_values(self) -> int:
        """As many as the ranks of the two sides multiplied."""
        inner = 0 if "hada_t1" in self.parts else 1
        one, two = (self.parts[f"hada_w{side}_a"].shape[inner] for side in (1, 2))
        return min(one * two, max_rank(self.weight_shape))

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The elementwise product of the two sides."""
        return self._side(1, compute) * self._side(2, compute)

    def _norm_of_product(self) -> float:
        """Of an elementwise product of two products.

        The elementwise product of two matrices of ranks r and s is one of rank r·s, whose factors are the products
        of all pairs of columns (Slyusar's face-splitting product). Its Gram matrices are formed in float64 where
        they are quicker than the rows of the product, a few at a time. The cores of a kernel lie between the same
        factors at each of its places, so that two Gram matrices serve all of them.
        """
        return sqrt(max(_energy_of_product(self._factors(1), self._factors(2)), 0.0))

    def _side(self, side: int, compute: torch.dtype) -> Tensor:
        left, right = (self.part(f"hada_w{side}_{end}", compute) for end in "ab")
        if f"hada_t{side}" in self.parts:
            return tucker_product(self.part(f"hada_t{side}", compute), left, right)
        return left @ right

    def _factors(self, side: int) -> "_Factors":
        """One side's factors in float64."""
        left, right = (self.part(f"hada_w{side}_{end}", torch.float64) for end in "ab")
        if f"hada_t{side}" not in self.parts:
            return _Factors(left, None, right)
        return _Factors(left.mT, self.part(f"hada_t{side}", torch.float64).flatten(2).movedim(2, 0), right)


class _Factors(NamedTuple):
    """up (out, m) · coreₖ (m, n) · down (n, in), at each place k of a kernel; without cores, up · down."""

    up: Tensor
    cores: Tensor | None
    down: Tensor


def _energy_of_product(one: _Factors, two: _Factors) -> float:
    """‖one ⊙ two‖², over all places of the kernel."""
    out, inner = one.up.shape[0], one.down.shape[1]
    up_pairs, down_pairs = one.up.shape[1] * two.up.shape[1], one.down.shape[0] * two.down.shape[0]
    ranks = one.down.shape[0] + two.down.shape[0]
    places = 1 if one.cores is None else one.cores.shape[0]
    by_grams = out * up_pairs**2 + inner * down_pairs**2
    if one.cores is not None:
        by_grams += 2 * places * up_pairs * down_pairs * (one.up.shape[1] + two.up.shape[1] + ranks)
    if max(up_pairs, down_pairs) <= _MAX_GRAM_ROWS and by_grams < 2 * places * out * inner * ranks:
        ups = (one.up[:, :, None] * two.up[:, None, :]).flatten(1)
        downs = (one.down[:, None, :] * two.down[None, :, :]).flatten(0, 1)
        return _energy_between(ups.mT @ ups, downs @ downs.mT, one.cores, two.cores)
    if one.cores is None or two.cores is None:
        return _energy_by_rows(one.up, one.down, two.up, two.down)
    return fsum(
        _energy_by_rows(one.up, first @ one.down, two.up, second @ two.down)
        for first, second in zip(one.cores, two.cores, strict=True)
    )


def _energy_between(ups: Tensor, downs: Tensor, one: Tensor | None, two: Tensor | None) -> float:
    """Σₖ tr(Cₖᵀ·ups·Cₖ·downs) with Cₖ = oneₖ ⊗ twoₖ, or ⟨ups, downs⟩ without cores.

    Args:
        ups: (a·b, a·b), symmetric.
        downs: (c·d, c·d), symmetric.
        one: (k, a, c).
        two: (k, b, d).
    """
    if one is None or two is None:
        return float((ups * downs).sum())
    (_, a, c), (_, b, d) = one.shape, two.shape
    ups, downs = ups.view(a, b, a, b), downs.view(c, d, c, d)
    between = min(c * b, a * d) * max(a * b, c * d)
    at_once = max(_PIECE_ELEMENTS // max(a * b * c * d, between), 1)
    energies = []
    for at in range(0, one.shape[0], at_once):
        first, second = one[at : at + at_once], two[at : at + at_once]
        left = _times_kronecker(ups, first, second)
        right = _times_kronecker(downs, first.mT, second.mT).permute(0, 3, 4, 1, 2)
        energies.append(float((left * right).sum()))
    return fsum(energies)


def _times_kronecker(gram: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """gram·(firstₖ ⊗ secondₖ), one factor at a time.

    The factor that leaves less comes first. So what is formed between has at most √(rows³·columns) values of the whole
    product's rows and columns, where the other order could have rows·columns² of them.

    Args:
        gram: (a, b, a, b).
        first: (k, a, c).
        second: (k, b, d).

    Returns:
        (k, a, b, c, d).
    """
    (a, b), c, d = gram.shape[:2], first.shape[2], second.shape[2]
    if c * b < a * d:
        between = torch.einsum("abef,kec->kabcf", gram, first)
        return torch.einsum("kabcf,kfd->kabcd", between, second)
    between = torch.einsum("abef,kfd->kabed", gram, second)
    return torch.einsum("kabed,kec->kabcd", between, first)


def _energy_by_rows(one_up: Tensor, one_down: Tensor, two_up: Tensor, two_down: Tensor) -> float:
    """‖(one_up·one_down) ⊙ (two_up·two_down)‖², a few rows at a time."""
    out, inner = one_up.shape[0], one_down.shape[1]
    rows = max(_PIECE_ELEMENTS // inner, 1)
    return fsum(
        frobenius_norm((one_up[at : at + rows] @ one_down) * (two_up[at : at + rows] @ two_down)) ** 2
        for at in range(0, out, rows)
    )


def _tucker_shape(shapes: Shapes, core: str, factors: str) -> tuple[int, ...]:
    left, right = f"{factors}_a", f"{factors}_b"
    sizes = shapes[core], shapes[left], shapes[right]
    if len(sizes[0]) < 3 or len(sizes[1]) != 2 or len(sizes[2]) != 2 or min(map(min, sizes)) < 1:
        raise shapes_error(shapes, core, left, right)
    if sizes[0][:2] != (sizes[1][0], sizes[2][0]):
        raise shapes_error(shapes, core, left, right)
    return (sizes[1][1], sizes[2][1], *sizes[0][2:])


class LokrChange(Adapter):
    """ΔW = scale · w1 ⊗ w2.

    w1 (a, b) is `lokr_w1`, or `lokr_w1_a`·`lokr_w1_b`. w2 (c, d[, kh, kw]) is `lokr_w2`, or
    `lokr_w2_a`·`lokr_w2_b` (c, d·kh·kw), or with a core `lokr_t2` (r, r, kh, kw) the Tucker product of factors
    (r, c) and (r, d). The rank is that of w2 where it is decomposed, else that of w1; with both whole there is
    none, and an alpha means nothing.
    """

    kind = "lokr"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """(a·c, b·d[, kh, kw]), and the inner dimension of w2 or w1."""
        first, first_rank = _left(shapes)
        second, second_rank = _right(shapes)
        shape = (first[0] * second[0], first[1] * second[1], *second[2:])
        return AdapterFacts(shape, first_rank if second_rank is None else second_rank)

    @property
    def most_values(self) -> int:
        """As many as the ranks of w1 and w2 multiplied."""
        shapes = {name: tuple(part.shape) for name, part in self.parts.items()}
        (first, first_rank), (second, second_rank) = _left(shapes), _right(shapes)
        if _CORE in shapes:
            second_rank = shapes[_W2_A][0]  # that of w2_b is before a kernel
        one, two = first_rank or max_rank(first), second_rank or max_rank(second)
        return min(one * two, max_rank(self.weight_shape))

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The Kronecker product; a kernel's axes belong to w2."""
        first, second = self._first(compute), self._second(compute)
        return torch.kron(first.reshape(*first.shape, *(1 for _ in second.shape[2:])), second)

    def _norm_of_product(self) -> float:
        """‖w1 ⊗ w2‖ = ‖w1‖·‖w2‖."""
        return self._first_norm() * self._second_norm()

    def _first_norm(self) -> float:
        if _W1 in self.parts:
            return frobenius_norm(self.parts[_W1])
        return _norm_of_product(self.parts[_W1_A], self.parts[_W1_B])

    def _second_norm(self) -> float:
        if _W2 in self.parts:
            return frobenius_norm(self.parts[_W2])
        left, right = self.parts[_W2_A], self.parts[_W2_B]
        if _CORE in self.parts:
            return _tucker_norm(self.parts[_CORE], left.mT, right)
        return _norm_of_product(left, right)

    def _first(self, compute: torch.dtype) -> Tensor:
        if _W1 in self.parts:
            return self.part(_W1, compute)
        return self.part(_W1_A, compute) @ self.part(_W1_B, compute)

    def _second(self, compute: torch.dtype) -> Tensor:
        if _W2 in self.parts:
            return self.part(_W2, compute)
        left, right = self.part(_W2_A, compute), self.part(_W2_B, compute)
        if _CORE in self.parts:
            return tucker_product(self.part(_CORE, compute), left, right)
        return left @ right


def _left(shapes: Shapes) -> tuple[tuple[int, ...], int | None]:
    if _W1 in shapes:
        if len(shapes[_W1]) != 2 or min(shapes[_W1]) < 1:
            raise shapes_error(shapes, _W1)
        return shapes[_W1], None
    rank = inner_size(shapes, _W1_A, _W1_B)
    return (shapes[_W1_A][0], shapes[_W1_B][1]), rank


def _right(shapes: Shapes) -> tuple[tuple[int, ...], int | None]:
    if _W2 in shapes:
        if len(shapes[_W2]) < 2 or min(shapes[_W2]) < 1:
            raise shapes_error(shapes, _W2)
        return shapes[_W2], None
    if _CORE not in shapes:
        rank = inner_size(shapes, _W2_A, _W2_B)
        return (shapes[_W2_A][0], shapes[_W2_B][1]), rank
    require_parts(shapes, _W2_A, _W2_B)
    return _tucker_shape(shapes, _CORE, "lokr_w2"), shapes[_W2_B][0]


class TuckerChange(Adapter):
    """up (out, r) · lora_mid (r, r, kh, kw) · down (r, in); up and down may have axes of length 1 behind."""

    kind = "tucker"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """The kernel's shape, and the rows of `lora_down`."""
        require_parts(shapes, UP, DOWN, MID)
        up, down, mid = shapes[UP], shapes[DOWN], shapes[MID]
        flat = all(len(shape) >= 2 and set(shape[2:]) <= {1} for shape in (up, down))
        if not flat or len(mid) < 3 or mid[:2] != (up[1], down[0]) or min(*up, *down, *mid) < 1:
            raise shapes_error(shapes, UP, MID, DOWN)
        return AdapterFacts((up[0], down[1], *mid[2:]), down[0])

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The kernel (out, in, kh, kw)."""
        up, down = self.part(UP, compute).flatten(1), self.part(DOWN, compute).flatten(1)
        return tucker_product(self.part(MID, compute), up.mT, down)

    def factors(self) -> LoraFactors:
        """The same ΔW as plain factors, in float32 or wider: the core is multiplied into the down factor."""
        compute = at_least_float32(*(part.dtype for part in self.parts.values()))
        up, down = self.part(UP, compute).flatten(1), self.part(DOWN, compute).flatten(1)
        spread = torch.tensordot(self.part(MID, compute), down, dims=([1], [0])).movedim(-1, 1)
        return LoraFactors(up, spread.flatten(1), self.scale * up.shape[1], self.weight_shape)

    def _norm_of_product(self) -> float:
        return _tucker_norm(self.parts[MID], self.parts[UP].flatten(1), self.parts[DOWN].flatten(1))


def _tucker_norm(core: Tensor, up: Tensor, down: Tensor) -> float:
    """‖up·coreₖ·down‖ over all places k of the kernel, from Gram matrices in float64.

    Args:
        core: (m, n, kh, kw).
        up: (out, m).
        down: (n, in).
    """
    slices = as_float64(core).flatten(2).movedim(2, 0)
    if (
        up.shape[1] > up.shape[0]
    ):  # the Gram matrix of a rank above the weight's own size could be of any size
        slices, up = as_float64(up) @ slices, torch.eye(up.shape[0], device=up.device)
    if down.shape[0] > down.shape[1]:
        slices, down = slices @ as_float64(down), torch.eye(down.shape[1], device=down.device)
    inside = gram_in_double(up) @ slices @ gram_in_double(down.mT)
    return sqrt(max(float((inside * slices).sum()), 0.0))


def _norm_of_product(left: Tensor, right: Tensor) -> float:
    """‖left·right‖ of thin factors from their Gram matrices, in float64."""
    return LoraFactors(left, right, float(right.shape[0]), (left.shape[0], right.shape[1])).frobenius_norm()


def tucker_product(core: Tensor, out_factor: Tensor, in_factor: Tensor) -> Tensor:
    """Σₘₙ core[m, n, …]·out_factor[m, o]·in_factor[n, i], a kernel (out, in, …).

    What is formed between has no more values than the kernel and the factors, however a file shapes these.

    Args:
        core: (m, n, kh, kw).
        out_factor: (m, out).
        in_factor: (n, in).
    """
    if core.shape[0] * in_factor.shape[1] > _MAX_ORDER_COST_RATIO * core.shape[1] * out_factor.shape[1]:
        inner = torch.tensordot(out_factor, core, dims=([0], [0]))  # (out, n, kh, kw)
        kernel: Tensor = torch.tensordot(inner, in_factor, dims=([1], [0]))
        return kernel.movedim(-1, 1).contiguous()
    inner = torch.tensordot(core, in_factor, dims=([1], [0]))  # (m, kh, kw, in)
    whole: Tensor = torch.tensordot(out_factor, inner, dims=([0], [0]))  # (out, kh, kw, in)
    return whole.movedim(-1, 1).contiguous()


@dataclass(frozen=True, eq=False)
class DoraChange:
    """A change δ of the direction, and new magnitudes.

    Attributes:
        direction: δ.
        magnitude: m, one value for each output or each input, in any shape.
        per_output: Which of the two.
        weight_shape: Of the changed tensor; that of δ when left out.

    Raises:
        LoraFormatError: There are not as many magnitudes as outputs or inputs.
    """

    direction: LoraFactors | Adapter
    magnitude: Tensor
    per_output: bool = True
    weight_shape: tuple[int, ...] = ()

    kind: ClassVar[str] = "dora"
    needs_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape = tuple(self.weight_shape) or self.direction.weight_shape
        object.__setattr__(self, "weight_shape", shape)
        require_magnitudes(self.magnitude.numel(), shape, per_output=self.per_output)

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return self.direction.parameters + self.magnitude.numel()

    @property
    def rank(self) -> int | None:
        """That of the direction."""
        return self.direction.rank

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW = W' − W; see `WeightChange.delta`.

        Raises:
            LoraFormatError: No base is given.
            ModelMismatchError: The base is of another shape.
        """
        if base is None:
            raise LoraFormatError(
                "a change of kind dora depends on the weight that it changes.",
                hint="Give the base model too.",
            )
        compute = at_least_float32(dtype)
        weight = base.detach().to(self.magnitude.device, compute)
        changed = weight + self.shaped(base.shape)._direction(compute)
        axis = 0 if self.per_output else 1
        kept = [size if number == axis else 1 for number, size in enumerate(changed.shape)]
        others = [number for number in range(changed.ndim) if number != axis]
        norm: Tensor = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
        # A weight of zeros has no direction: it stays zero where 0 / 0 would be NaN.
        norm = norm.clamp_min(torch.finfo(compute).tiny)
        return (changed * (self.magnitude.detach().to(compute).reshape(kept) / norm) - weight).to(dtype)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64; raises what `delta` does."""
        return frobenius_norm(self.delta(base))

    def shaped(self, weight_shape: Sequence[int]) -> "DoraChange":
        """The same change of a weight whose shape is known.

        Raises:
            ModelMismatchError: The change is none of such a weight.
        """
        shape = tuple(weight_shape)
        if isinstance(self.direction, Adapter):
            return replace(self, direction=self.direction.shaped(shape), weight_shape=shape)
        own = self.direction.weight_shape
        if shape[:1] != own[:1] or torch.Size(shape).numel() != torch.Size(own).numel():
            raise ModelMismatchError(
                f"a dora change of a weight {own} does not fit a weight {shape}.",
                hint="Use the LoRA with the model it was made for.",
            )
        return replace(self, weight_shape=shape)

    def _direction(self, compute: torch.dtype) -> Tensor:
        return self.direction.delta(dtype=compute).reshape(self.weight_shape)


def magnitudes_per_output(shape: Sequence[int], weight_shape: Sequence[int]) -> bool:
    """Whether LyCORIS' `dora_scale` of this shape is per output (out, 1, …), and not per input (1, in, …)."""
    return shape[0] == weight_shape[0] if len(shape) else False


def require_magnitudes(count: int, weight_shape: Sequence[int], *, per_output: bool) -> None:
    """Refuse magnitudes of another number than the weight has outputs or inputs.

    Raises:
        LoraFormatError: With both numbers.
    """
    axis = 0 if per_output else 1
    if count != weight_shape[axis]:
        raise LoraFormatError(
            f"DoRA: {count} magnitudes for a weight {tuple(weight_shape)}, expected {weight_shape[axis]}.",
            hint="The file is damaged, or of an unknown kind.",
        )


class _WholeChange(Adapter):
    """One tensor of the weight's own shape."""

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """The shape of the one tensor. There is no rank.

        Raises:
            LoraFormatError: There are several tensors.
        """
        if len(shapes) != 1:
            raise LoraFormatError(
                f"{' and '.join(shapes)} change the same weight.",
                hint="Only one of them can be meant: make the file again.",
            )
        return AdapterFacts(next(iter(shapes.values())), None)

    @property
    def values(self) -> Tensor:
        """The tensor as stored."""
        (values,) = self.parts.values()
        return values


class DiffChange(_WholeChange):
    """ΔW itself: `diff` of a weight, `diff_b` of a bias, `w_norm` and `b_norm` of a norm."""

    kind = "diff"

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The stored difference."""
        return self.values.detach().to(compute)

    def _norm_of_product(self) -> float:
        return frobenius_norm(self.values)


class SetChange(_WholeChange):
    """`set_weight`: the weight becomes the stored tensor, so ΔW = tensor − base."""

    kind = "set"
    needs_base = True

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The stored tensor less the base weight."""
        assert base is not None  # `delta` has refused it
        return self.values.detach().to(compute) - base.detach().to(self.values.device, compute)


def scale_of(alpha: float | None, rank: int, *, rank_stabilised: bool = False) -> float:
    """The scale alpha / rank; 1 without an alpha.

    Args:
        alpha: As stored.
        rank: At least 1.
        rank_stabilised: rsLoRA (Kalajdzievski, arXiv 2312.03732): alpha / √rank.
    """
    if alpha is None:
        return 1.0
    return alpha / sqrt(rank) if rank_stabilised else alpha / rank


def require_parts(shapes: Shapes, *names: str) -> None:
    """Refuse a change that lacks a part.

    Raises:
        LoraFormatError: With the part's name.
    """
    missing = [name for name in names if name not in shapes]
    if missing:
        raise LoraFormatError(
            f"there is {', '.join(shapes)} but no {', '.join(missing)}.",
            hint="The file is incomplete: make it again, or take the whole module out.",
        )


def inner_size(shapes: Shapes, left: str, right: str) -> int:
    """The inner dimension of the product of two matrices.

    Raises:
        LoraFormatError: One is missing, or they cannot be multiplied.
    """
    require_parts(shapes, left, right)
    first, second = shapes[left], shapes[right]
    if len(first) != 2 or len(second) != 2 or first[1] != second[0] or min(*first, *second) < 1:
        raise shapes_error(shapes, left, right)
    return second[0]


def shapes_error(shapes: Shapes, *names: str) -> LoraFormatError:
    """The error for parts that do not fit together."""
    named = ", ".join(f"{name} {shapes[name]}" for name in names)
    return LoraFormatError(
        f"{named} do not fit together.", hint="The file is damaged, or of an unknown kind."
    )
