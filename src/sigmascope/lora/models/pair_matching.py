"""Every tensor of two checkpoints put where it belongs: compared, left out by choice, or refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sigmascope.checkpoints import Checkpoint, TensorInfo
from sigmascope.errors import CheckpointError, ModelMismatchError
from sigmascope.lora.models import pair_findings
from sigmascope.lora.models.layer_kinds import is_layer
from sigmascope.lora.models.pair_findings import named
from sigmascope.lora.models.pair_options import PairOptions
from sigmascope.lora.precision import is_real
from sigmascope.records.finding import Finding

_ONE_ARCHITECTURE = "Both must be complete checkpoints of the same architecture"


@dataclass
class Sorted:
    """The shared tensors of two checkpoints, by what is done with them.

    Attributes:
        compared: Keys whose change has a meaning, in the base's order.
        reshaped: Keys whose shapes differ.
        integers: Keys of integers and booleans that are equal on both sides.
        changed_integers: Those that differ.
        mixed: Keys stored in two dtypes.
    """

    compared: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    integers: list[str] = field(default_factory=list)
    changed_integers: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)

    def skipped(self, options: PairOptions) -> dict[str, str]:
        """Reason by key, of the shared tensors that are not compared."""
        reasons = dict.fromkeys(self.reshaped, "its shape differs")
        reasons |= dict.fromkeys(self.integers, "it holds integers, equal in both")
        reasons |= dict.fromkeys(self.changed_integers, "it holds integers")
        if options.on_mixed_dtypes == "skip":
            reasons |= dict.fromkeys(self.mixed, "it is stored in two dtypes")
        return reasons

    def findings(self, base: Checkpoint, tuned: Checkpoint, options: PairOptions) -> list[Finding]:
        """What a user should know of the tensors that are not simply compared."""
        found: list[Finding] = []
        if self.reshaped:
            found.append(pair_findings.changed_shapes(base, tuned, self.reshaped))
        found += pair_findings.integers(self.integers, self.changed_integers)
        if self.mixed:
            skipped = options.on_mixed_dtypes == "skip"
            found.append(pair_findings.mixed_dtypes(base, tuned, self.mixed, skipped=skipped))
        for side, role in ((base, "base"), (tuned, "tuned model")):
            keys = [key for key in self.compared if key in side.dequantised]
            if keys:
                found.append(pair_findings.dequantised(side, role, keys))
        return found


def sort_tensors(base: Checkpoint, tuned: Checkpoint, keys: Sequence[str], options: PairOptions) -> Sorted:
    """Look at each shared tensor's shape and dtype; integers, which are few and small, are read.

    Args:
        base: The one model.
        tuned: The other, under the base's names.
        keys: The shared ones.
        options: What is refused.

    Raises:
        ModelMismatchError: Shapes, integers or dtypes that differ, unless they may be skipped.
        CheckpointError: Weights that are not floating-point numbers.
    """
    result = Sorted()
    for key in keys:
        infos = base.info(key), tuned.info(key)
        if infos[0].shape != infos[1].shape:
            result.reshaped.append(key)
        elif any(_is_integer(info.dtype) for info in infos):
            same = _sorted_integer(base, tuned, key, options)
            (result.integers if same else result.changed_integers).append(key)
        else:
            _sort_real(base, tuned, infos, result, options)
    if result.reshaped and options.on_shape_change == "error":
        raise _shape_error(result.reshaped[0], base, tuned)
    if result.mixed and options.on_mixed_dtypes == "error":
        finding = pair_findings.mixed_dtypes(base, tuned, result.mixed, skipped=True)
        raise ModelMismatchError(
            finding.message.replace("left out", "namely"), hint="Use --on_mixed_dtypes compare or skip."
        )
    return result


def _sort_real(
    base: Checkpoint,
    tuned: Checkpoint,
    infos: tuple[TensorInfo, TensorInfo],
    result: Sorted,
    options: PairOptions,
) -> None:
    for side, info in zip((base, tuned), infos, strict=True):
        if not is_real(info.dtype):
            raise _not_numbers(side, info)
    key = infos[0].name
    if infos[0].dtype != infos[1].dtype:
        result.mixed.append(key)
        if options.on_mixed_dtypes == "skip":
            return
    result.compared.append(key)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _sorted_integer(base: Checkpoint, tuned: Checkpoint, key: str, options: PairOptions) -> bool:
    """Whether an integer tensor is equal on both sides; refuses it if it is not and may not be skipped."""
    infos = base.info(key), tuned.info(key)
    if is_layer(key, infos[0].shape):
        if options.on_integer == "error":
            side = 0 if _is_integer(infos[0].dtype) else 1
            raise _not_numbers((base, tuned)[side], infos[side])
        return False
    same = infos[0].dtype == infos[1].dtype and torch.equal(base.tensor(key), tuned.tensor(key))
    if not same and options.on_integer == "error":
        raise ModelMismatchError(
            f"{key} holds integers, and other ones in {tuned.path} than in {base.path}.",
            hint="A LoRA cannot hold their change: use --on_integer skip to leave them out.",
        )
    return same


def _not_numbers(checkpoint: Checkpoint, info: TensorInfo) -> CheckpointError:
    hint = "Dequantise the checkpoint first; a difference of quantised codes means nothing."
    if info.dtype.is_complex:
        hint = "Take it out of both checkpoints: a LoRA holds no complex numbers."
    return CheckpointError(
        checkpoint.path,
        f"{info.name} is {str(info.dtype).removeprefix('torch.')}, not plain floating-point numbers.",
        hint=hint,
    )


def _shape_error(key: str, base: Checkpoint, tuned: Checkpoint) -> ModelMismatchError:
    return ModelMismatchError(
        f"{key} is {base.info(key).shape} in {base.path} and {tuned.info(key).shape} in {tuned.path}.",
        hint="Both must have the same architecture: create the base from the tuned model's configuration, or "
        "leave such tensors out with --on_shape_change skip.",
    )


def refuse_missing(lacking: Checkpoint, having: Checkpoint, keys: Sequence[str]) -> None:
    """Refuse keys that one side lacks, if there are any.

    Raises:
        ModelMismatchError: With the first of them and both files.
    """
    if keys:
        raise ModelMismatchError(
            f"{lacking.path} lacks {named(keys)}, which {having.path} has.",
            hint=f"{_ONE_ARCHITECTURE}; --on_missing skip compares what both have.",
        )
