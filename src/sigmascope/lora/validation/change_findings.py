"""What differs between two checkpoints and no LoRA of Linear and Conv2d layers can hold."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.lora.models.pair_findings import counted
from sigmascope.lora.models.pairs import CheckpointPair
from sigmascope.lora.norms import root_sum_square
from sigmascope.lora.precision import is_real
from sigmascope.records.finding import Finding

_IGNORED = ("num_iterations",)  # a training counter: it differs between any two checkpoints
_CPU = torch.device("cpu")
_LOOKED_AT = 1 << 30  # bytes: a VAE whole, of text encoders of many GB a share

__all__ = ["counted", "pair_findings", "uncovered_changes"]


def uncovered_changes(pair: CheckpointPair) -> dict[str, float]:
    """The compared parts' tensors outside Linear and convolution weights (biases, norms) that differ.

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
    return [*findings, *pair.findings, *_outside(pair)]


def _uncovered(uncovered: dict[str, float], layers_norm: float) -> Finding:
    norm = root_sum_square(list(uncovered.values()))
    share = norm / root_sum_square([norm, layers_norm])
    return Finding(
        id="lora.biases_and_norms_changed",
        severity="info",
        message=f"Biases and norms changed too ({counted(len(uncovered), 'tensor')}); they carry "
        f"{100 * share:.2g} % of the change, and the LoRA does not hold them.",
        evidence={"tensors": len(uncovered), "delta_norm": norm, "share": share},
        advice="Expect base + LoRA to differ from the tuned model by at least this much.",
    )


def _outside(pair: CheckpointPair) -> list[Finding]:
    """Whether the VAE or anything else that is not compared differs, where both files hold it."""
    keys = [key for key in pair.outside if key not in _IGNORED]
    step = -(-sum(pair.base.info(key).nbytes for key in keys) // _LOOKED_AT) or 1
    looked_at = keys[::step]
    memory = _memory(pair.base, looked_at), _memory(pair.tuned, looked_at)
    changed = [key for key in looked_at if _differs(pair, key, memory)]
    if not changed:
        return []
    number = counted(len(changed), "tensor") + (f" of {len(looked_at)} looked at" if step > 1 else "")
    return [
        Finding(
            id="lora.other_parts_changed",
            severity="warning",
            message=f"The models differ in parts that are not compared ({number}, first {changed[0]}); "
            "the LoRA does not hold that.",
            evidence={"tensors": len(changed), "looked_at": len(looked_at), "key": changed[0]},
            advice="Use the tuned model's other parts (its VAE) with the LoRA, or compare them too with --parts.",
        )
    ]


def _differs(pair: CheckpointPair, key: str, memory: tuple[Tensor, Tensor]) -> bool:
    if pair.base.info(key).shape != pair.tuned.info(key).shape:
        return True
    base, tuned = pair.base.tensor_into(key, memory[0]), pair.tuned.tensor_into(key, memory[1])
    if base.dtype == tuned.dtype:
        return not torch.equal(_bytes(base), _bytes(tuned))
    if not all(_has_value(tensor.dtype) for tensor in (base, tuned)):
        return True  # complex or packed beside another dtype: nothing says that they are equal
    return bool((base.to(torch.float64) != tuned.to(torch.float64)).any())


def _memory(checkpoint: Checkpoint, keys: Sequence[str]) -> Tensor:
    """Room for the largest of some tensors, to read all of them into."""
    return torch.empty(max((checkpoint.info(key).nbytes for key in keys), default=0), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    """Bits decide: 0.0 and -0.0 differ, and a NaN is equal to itself."""
    return tensor.reshape(-1).view(torch.uint8)


def _has_value(dtype: torch.dtype) -> bool:
    """Whether each element is a real number that float64 can take."""
    return is_real(dtype) or not (dtype.is_floating_point or dtype.is_complex)
