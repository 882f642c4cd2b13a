"""Do two tensors, or two dumps of tensors, agree; where they do not, how far apart are they, and why."""

from collections.abc import Mapping
from typing import overload

from sigmascope.analysis.dump_results import DumpComparison, NamedComparison, RunComparison
from sigmascope.analysis.dumps import TensorsByName, compare_dumps, compare_runs
from sigmascope.analysis.tensor_comparison import Options, compare_pair
from sigmascope.analysis.tensor_results import TensorComparison
from sigmascope.analysis.tensor_values import TensorLike
from sigmascope.errors import ConfigError
from sigmascope.progress import Progress, no_progress

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
