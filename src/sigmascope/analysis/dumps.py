"""Two dumps against each other, and the dumps of two runs."""

import difflib
from collections.abc import Mapping
from typing import Any

from sigmascope.analysis.dump_results import DumpComparison, NamedComparison, RunComparison
from sigmascope.analysis.tensor_comparison import Options, compare_pair
from sigmascope.analysis.tensor_values import TensorLike
from sigmascope.errors import ConfigError
from sigmascope.progress import Progress, no_progress
from sigmascope.records.prompts import prompt_sha256

TensorsByName = Mapping[str, TensorLike]


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
        context=_context(a, b),
    )


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


def _context(a: TensorsByName, b: TensorsByName) -> dict[str, tuple[str, str]]:
    """What two headers say differently. What only one of them says is no difference."""
    left, right = getattr(a, "metadata", None), getattr(b, "metadata", None)
    encoders = (getattr(left, "encoder", None), getattr(right, "encoder", None))
    found: dict[str, tuple[str, str]] = {}
    if None not in encoders and encoders[0] != encoders[1]:
        found["encoder"] = (str(encoders[0]), str(encoders[1]))
    prompts_a, prompts_b = getattr(left, "prompts", {}), getattr(right, "prompts", {})
    for name in prompts_a:
        hashes = tuple(_hash(prompts[name]) for prompts in (prompts_a, prompts_b) if name in prompts)
        if len(hashes) == 2 and hashes[0] != hashes[1]:
            found[name] = (f"sha256 {hashes[0][:12]}", f"sha256 {hashes[1][:12]}")
    return found


def _hash(prompt: Any) -> str:
    return prompt_sha256(prompt.text) if prompt.text is not None else str(prompt.sha256)
