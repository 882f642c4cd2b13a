"""What differs between two checkpoints and no LoRA of Linear and Conv2d layers can hold."""

from collections.abc import Iterable

import torch

from sigmascope.checkpoints import tensor_fingerprint
from sigmascope.lora.layer_names import DENOISER
from sigmascope.lora.norms import root_sum_square
from sigmascope.lora.pairs import CheckpointPair
from sigmascope.lora.precision import is_real
from sigmascope.records.finding import Finding

_IGNORED = ("num_iterations",)  # a training counter: it differs between any two checkpoints
_CPU = torch.device("cpu")


def uncovered_changes(pair: CheckpointPair) -> dict[str, float]:
    """The denoiser's tensors outside its Linear and Conv2d weights (biases, norms) that differ.

    Returns:
        ‖Δ‖ by key, for the changed ones.

    Raises:
        NonFiniteError: NaN or Inf among them.
    """
    norms = {key: pair.change(key, _CPU).delta_norm for key in pair.others}
    return {key: norm for key, norm in norms.items() if norm > 0}


def pair_findings(
    pair: CheckpointPair, uncovered: dict[str, float], layer_norms: Iterable[float]
) -> list[Finding]:
    """What a user should know about two checkpoints before trusting a LoRA between them.

    Args:
        pair: The two checkpoints.
        uncovered: As given by `uncovered_changes`.
        layer_norms: ‖ΔW‖ of the Linear and Conv2d layers, to set the uncovered change beside.
    """
    findings = [_uncovered(uncovered, root_sum_square(list(layer_norms)))] if uncovered else []
    return [*findings, *_mixed_dtypes(pair), *_outside_denoiser(pair)]


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _uncovered(uncovered: dict[str, float], layers_norm: float) -> Finding:
    norm = root_sum_square(list(uncovered.values()))
    share = norm / root_sum_square([norm, layers_norm])
    return Finding(
        id="lora.biases_and_norms_changed",
        severity="info",
        message=f"Biases and norms changed too ({counted(len(uncovered), 'tensor')}); they carry "
        f"{100 * share:.2g} % of the change, and a LoRA of Linear and Conv2d layers does not hold them.",
        evidence={"tensors": len(uncovered), "delta_norm": norm, "share": share},
        advice="Expect base + LoRA to differ from the tuned model by at least this much.",
    )


def _mixed_dtypes(pair: CheckpointPair) -> list[Finding]:
    mixed = [
        layer
        for layer in pair.layers
        if pair.base.info(f"{layer}.weight").dtype != pair.tuned.info(f"{layer}.weight").dtype
    ]
    if not mixed:
        return []
    first = f"{mixed[0]}.weight"
    dtypes = [str(side.info(first).dtype).removeprefix("torch.") for side in (pair.base, pair.tuned)]
    return [
        Finding(
            id="lora.mixed_dtypes",
            severity="warning",
            message=f"The models store {counted(len(mixed), 'layer')} in different dtypes ({first}: {dtypes[0]} in "
            f"the base, {dtypes[1]} in the tuned model), so the change holds the rounding of the narrower one.",
            evidence={"layers": len(mixed), "key": first, "base_dtype": dtypes[0], "tuned_dtype": dtypes[1]},
            advice="Extract from two checkpoints of one dtype when you have them.",
        )
    ]


def _outside_denoiser(pair: CheckpointPair) -> list[Finding]:
    """Whether the VAE or anything else beside the denoiser differs, where both files hold it."""
    shared = [
        key
        for key in pair.base.keys()  # noqa: SIM118 - not a dict
        if key in pair.tuned and not key.startswith(DENOISER) and key not in _IGNORED
    ]
    changed = [key for key in shared if _differs(pair, key)]
    if not changed:
        return []
    return [
        Finding(
            id="lora.other_parts_changed",
            severity="warning",
            message=f"The models differ outside the denoiser too ({counted(len(changed), 'tensor')}, first "
            f"{changed[0]}); the LoRA is of the denoiser only.",
            evidence={"tensors": len(changed), "key": changed[0]},
            advice="Use the tuned model's VAE with the LoRA.",
        )
    ]


def _differs(pair: CheckpointPair, key: str) -> bool:
    if pair.base.info(key).shape != pair.tuned.info(key).shape:
        return True
    base, tuned = pair.base.tensor(key), pair.tuned.tensor(key)
    if base.dtype == tuned.dtype:
        return tensor_fingerprint(base) != tensor_fingerprint(tuned)
    if not all(_has_value(tensor.dtype) for tensor in (base, tuned)):
        return True  # complex or packed beside another dtype: nothing says that they are equal
    return bool((base.to(torch.float64) != tuned.to(torch.float64)).any())


def _has_value(dtype: torch.dtype) -> bool:
    """Whether each element is a real number that float64 can take."""
    return is_real(dtype) or not (dtype.is_floating_point or dtype.is_complex)
