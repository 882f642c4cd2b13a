"""Do two tensors, dumps or runs' dumps agree; where they do not, how far apart are they, and why."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from sigmascope.analysis.tensor_comparison import (
    ORDER,
    Options,
    TensorComparison,
    TensorLike,
    Verdict,
    compare_pair,
)
from sigmascope.errors import ConfigError
from sigmascope.progress import Progress, no_progress
from sigmascope.records.prompts import prompt_sha256

__all__ = [
    "DumpComparison",
    "NamedComparison",
    "Options",
    "RunComparison",
    "TensorComparison",
    "compare_dumps",
    "compare_runs",
    "compare_tensors",
]

TensorsByName = Mapping[str, TensorLike]


class _Matched(ABC):
    """Things of two sides that are matched by name: they agree if all have counterparts that agree."""

    __slots__ = ()
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @abstractmethod
    def _matched(self) -> "Sequence[TensorComparison | DumpComparison]":
        """The comparisons of those that both sides have."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all; `different` if one has no counterpart or none has."""
        matched = self._matched()
        if self.only_a or self.only_b or not matched:
            return "different"
        return max((comparison.verdict for comparison in matched), key=ORDER.index)

    @property
    def agrees(self) -> bool:
        """Whether all have counterparts and agree within their tolerances."""
        return self.verdict != "different"

    @property
    def same_layout(self) -> bool:
        """Whether all tensors were compared as they are."""
        return all(comparison.same_layout for comparison in self._matched())


@dataclass(frozen=True, slots=True)
class NamedComparison:
    """Two tensors of two dumps, with their names there."""

    name_a: str
    name_b: str
    comparison: TensorComparison


@dataclass(frozen=True, slots=True)
class DumpComparison(_Matched):
    """Two dumps.

    Attributes:
        pairs: The tensors that were compared, in A's order.
        only_a: Names of A that have no counterpart.
        only_b: Names of B that have none.
        context: What the headers say differently of encoder and prompts, as (A, B); a prompt by its hash.
    """

    pairs: tuple[NamedComparison, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    context: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def _matched(self) -> Sequence[TensorComparison]:
        return [pair.comparison for pair in self.pairs]

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "verdict": self.verdict,
            "agrees": self.agrees,
            "same_layout": self.same_layout,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "context": {name: list(values) for name, values in self.context.items()},
            "tensors": [
                {"name_a": pair.name_a, "name_b": pair.name_b, **pair.comparison.as_dict()}
                for pair in self.pairs
            ],
        }


@overload
def compare_tensors(
    a: TensorLike,
    b: TensorLike,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    token_axis: int | None = None,
) -> TensorComparison: ...
@overload
def compare_tensors(
    a: TensorsByName,
    b: TensorsByName,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    token_axis: int | None = None,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> DumpComparison: ...
def compare_tensors(
    a: TensorLike | TensorsByName,
    b: TensorLike | TensorsByName,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    token_axis: int | None = None,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> TensorComparison | DumpComparison:
    """Compare two tensors, or two dumps tensor by tensor.

    Sums are in float64, over pieces of the tensors, which are never copied whole. Neither tensor is changed. The dumps
    of two runs are compared by `compare_runs(TensorDumps(folder_a), TensorDumps(folder_b))`.

    Args:
        a: The reference: a tensor, an array, or a mapping of names to them such as `load_tensors` gives.
        b: The other, of the same kind.
        rtol: What an element may differ by, relative to the larger of the two values. Without `rtol` and `atol` the
            verdict rests on what rounding in the two dtypes explains.
        atol: What an element may differ by absolutely.
        token_axis: The axis whose slices are measured one by one. By default the second of three axes (batch, tokens,
            width) and the first of two.
        names: For dumps: compare these alone, A's name to B's.
        progress: For dumps: called with (pairs done, pairs in all, name).

    Returns:
        The comparison; `.verdict` and `.reason` are what it comes to, `.as_dict()` is all of it as JSON values.

    Raises:
        ConfigError: A tensor has no values to compare, a name is not there, or a tolerance is negative.
    """
    options = Options(rtol, atol, token_axis)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return compare_dumps(a, b, options, names=names, progress=progress)
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        raise ConfigError(
            "A tensor cannot be compared with a mapping of tensors.",
            hint="Pick the tensor out of the mapping.",
        )
    return compare_pair(a, b, options)


def compare_dumps(
    a: TensorsByName,
    b: TensorsByName,
    options: Options = Options(),  # noqa: B008 - it is frozen
    *,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> DumpComparison:
    """Compare tensors of the same name, with one pair in memory at a time if the dumps are read lazily.

    Args:
        a: Tensors by name: the reference; what `load_tensors` gives brings its metadata.
        b: The others.
        options: Tolerances and token axis.
        names: Compare these alone: A's name to B's. Without it tensors of the same name are compared, or those that
            are the only ones in their dumps.
        progress: Called with (pairs done, pairs in all, name).

    Raises:
        ConfigError: `names` names what is not there, or a tensor cannot be compared.
    """
    chosen = dict(names) if names else _same_names(a, b)
    for name_a, name_b in chosen.items():
        _check_name(name_a, a, "A")
        _check_name(name_b, b, "B")
    pairs = []
    for done, (name_a, name_b) in enumerate(chosen.items()):
        progress(done, len(chosen), name_a)
        devices = (_saved_device(a, name_a), _saved_device(b, name_b))
        pairs.append(NamedComparison(name_a, name_b, compare_pair(a[name_a], b[name_b], options, devices)))
    progress(len(chosen), len(chosen), "")
    taken = set(chosen.values())
    return DumpComparison(
        pairs=tuple(pairs),
        only_a=() if names else tuple(name for name in a if name not in chosen),
        only_b=() if names else tuple(name for name in b if name not in taken),
        context=_header_differences(a, b),
    )


def _same_names(a: TensorsByName, b: TensorsByName) -> dict[str, str]:
    chosen = {name: name for name in a if name in b}
    if not chosen and len(a) == len(b) == 1:
        return {next(iter(a)): next(iter(b))}
    return chosen


def _check_name(name: str, tensors: TensorsByName, side: str) -> None:
    if name not in tensors:
        near = difflib.get_close_matches(name, list(tensors), n=3, cutoff=0.4) or list(tensors)[:8]
        raise ConfigError(
            f"{side} has no tensor {name!r}.",
            hint=f"It has {', '.join(near)}." if near else "It has no tensors at all.",
        )


def _saved_device(tensors: TensorsByName, name: str) -> str | None:
    """Where a tensor lay when it was dumped, if its dump says so."""
    saved = getattr(getattr(tensors, "metadata", None), "tensors", {}).get(name)
    return getattr(saved, "device", None)


def _header_differences(a: TensorsByName, b: TensorsByName) -> dict[str, tuple[str, str]]:
    """What two headers say differently. What only one of them says is no difference."""
    metadata_a, metadata_b = getattr(a, "metadata", None), getattr(b, "metadata", None)
    encoders = (getattr(metadata_a, "encoder", None), getattr(metadata_b, "encoder", None))
    differences: dict[str, tuple[str, str]] = {}
    if None not in encoders and encoders[0] != encoders[1]:
        differences["encoder"] = (str(encoders[0]), str(encoders[1]))
    prompts_a, prompts_b = getattr(metadata_a, "prompts", {}), getattr(metadata_b, "prompts", {})
    for name in prompts_a:
        hashes = tuple(_prompt_hash(prompts[name]) for prompts in (prompts_a, prompts_b) if name in prompts)
        if len(hashes) == 2 and hashes[0] != hashes[1]:
            differences[name] = (f"sha256 {hashes[0][:12]}", f"sha256 {hashes[1][:12]}")
    return differences


def _prompt_hash(prompt: Any) -> str:
    return prompt_sha256(prompt.text) if prompt.text is not None else str(prompt.sha256)


@dataclass(frozen=True, slots=True)
class RunComparison(_Matched):
    """The dumps of two runs.

    Attributes:
        dumps: By name, those that both have, in A's order.
        only_a: Names of dumps that A alone has.
        only_b: Names of dumps that B alone has.
    """

    dumps: Mapping[str, DumpComparison]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    def _matched(self) -> Sequence[DumpComparison]:
        return list(self.dumps.values())

    @property
    def first_difference(self) -> str | None:
        """The first dump that does not agree, in the order in which A was saved; None if all do."""
        return next((name for name, dump in self.dumps.items() if not dump.agrees), None)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "verdict": self.verdict,
            "agrees": self.agrees,
            "same_layout": self.same_layout,
            "first_difference": self.first_difference,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "dumps": {name: dump.as_dict() for name, dump in self.dumps.items()},
        }


def compare_runs(
    a: Mapping[str, TensorsByName],
    b: Mapping[str, TensorsByName],
    options: Options = Options(),  # noqa: B008 - it is frozen
    *,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> RunComparison:
    """Compare the dumps of two runs by name, one at a time.

    Args:
        a: Dumps by name, such as `TensorDumps(folder)`: the reference.
        b: The others.
        options: Tolerances and token axis.
        names: As for `compare_dumps`, in the dumps that have them; others are passed over.
        progress: Called with (dumps done, dumps in all, name).

    Raises:
        ConfigError: As of `compare_dumps`; no dump of both has a tensor of `names`.
        CheckpointError: A dump cannot be read.
    """
    names_a, names_b = list(a), set(b)
    common = [name for name in names_a if name in names_b]
    compared = {}
    for done, name in enumerate(common):
        progress(done, len(common), name)
        dump_a, dump_b = a[name], b[name]
        wanted = {
            first: second for first, second in (names or {}).items() if first in dump_a and second in dump_b
        }
        if wanted or not names:
            compared[name] = compare_dumps(dump_a, dump_b, options, names=wanted)
    if names and not compared:
        raise ConfigError(
            f"No dump that both have holds {', '.join(f'{first}={second}' for first, second in names.items())}.",
            hint="Leave the names out to see what there is.",
        )
    progress(len(common), len(common), "")
    return RunComparison(
        compared,
        tuple(name for name in names_a if name not in names_b),
        tuple(name for name in b if name not in set(names_a)),
    )
