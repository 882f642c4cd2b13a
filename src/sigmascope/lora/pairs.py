"""Two checkpoints of one architecture, layer by layer: what they share and how each layer differs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, TensorInfo, open_checkpoint
from sigmascope.errors import CheckpointError, ModelMismatchError, NonFiniteError
from sigmascope.lora.layer_names import DENOISER
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.paths import exists
from sigmascope.lora.precision import is_real

_WEIGHT = ".weight"
_LAYER_DIMENSIONS = (2, 4)  # Linear (out, in) and Conv2d (out, in, kh, kw)


@dataclass(frozen=True, slots=True)
class LayerChange:
    """How one weight differs: ΔW = tuned − base."""

    delta: Float[Tensor, "*shape"]
    delta_norm: float
    base_norm: float


@dataclass(frozen=True, slots=True)
class CheckpointPair:
    """A base and a tuned checkpoint whose denoisers have the same keys and shapes.

    Attributes:
        base: The model that the LoRA will be put on.
        tuned: The fine-tuned model.
        layers: Paths of the Linear and Conv2d layers (2-D and 4-D weights), without `.weight`,
            in the base file's order.
        others: Keys of the denoiser's remaining tensors: biases, norms, and weights of other dimensions.
        precision: The dtype in which ΔW is formed: float64 when either file holds float64, else float32.
    """

    base: Checkpoint
    tuned: Checkpoint
    layers: tuple[str, ...]
    others: tuple[str, ...]
    precision: torch.dtype

    def shape(self, layer: str) -> tuple[int, ...]:
        """The shape of a layer's weight."""
        return self.base.info(layer + _WEIGHT).shape

    def layer_change(self, layer: str, device: torch.device) -> LayerChange:
        """Read one layer from both files and subtract; see `change`."""
        return self.change(layer + _WEIGHT, device)

    def change(self, key: str, device: torch.device) -> LayerChange:
        """Read one tensor from both files and subtract.

        Args:
            key: The tensor's name.
            device: Where the difference is formed and stays.

        Raises:
            NonFiniteError: Either file holds NaN or Inf there.
            CheckpointError: The tensor cannot be read.
        """
        base = self.base.tensor(key).to(device, self.precision)
        tuned = self.tuned.tensor(key).to(device, self.precision)
        base_norm = frobenius_norm(base)
        delta = tuned - base
        norm = frobenius_norm(delta)  # NaN or Inf in either file reaches the norm: one pass serves both
        if not norm < float("inf"):
            _refuse_non_finite(self, key, base, tuned)
        return LayerChange(delta, norm, base_norm)


@contextmanager
def open_pair(base: str | PathLike[str], tuned: str | PathLike[str]) -> Iterator[CheckpointPair]:
    """Open two checkpoints and match their denoisers, reading headers only.

    Raises:
        ModelMismatchError: The same file twice, no denoiser, a key missing on one side, or other shapes.
        CheckpointError: A file that cannot be read, or weights that are not floating-point numbers.
    """
    paths = Path(base), Path(tuned)
    if all(exists(path) for path in paths) and paths[0].samefile(paths[1]):
        raise ModelMismatchError(
            f"{base} is given as base and as tuned model: nothing differs.",
            hint="Give the fine-tuned checkpoint as --tuned_model_path.",
        )
    with ExitStack() as stack:
        yield match(*(stack.enter_context(open_checkpoint(path)) for path in paths))


def match(base: Checkpoint, tuned: Checkpoint) -> CheckpointPair:
    """Pair the denoisers of two open checkpoints; see `open_pair` for what is raised."""
    keys = _denoiser_keys(base)
    _refuse_missing(base, tuned, keys, _denoiser_keys(tuned))
    layers: list[str] = []
    others: list[str] = []
    precision = torch.float32
    for key in keys:
        infos = _checked_info(base, key), _checked_info(tuned, key)
        if infos[0].shape != infos[1].shape:
            raise _shape_error(key, base, tuned)
        if torch.float64 in (infos[0].dtype, infos[1].dtype):
            precision = torch.float64
        is_layer = key.endswith(_WEIGHT) and len(infos[0].shape) in _LAYER_DIMENSIONS
        (layers if is_layer else others).append(key)
    names = tuple(key.removesuffix(_WEIGHT) for key in layers)
    return CheckpointPair(base, tuned, names, tuple(others), precision)


def _denoiser_keys(checkpoint: Checkpoint) -> list[str]:
    keys = [key for key in checkpoint.keys() if key.startswith(DENOISER)]  # noqa: SIM118 - not a dict
    if not keys:
        held = ", ".join(checkpoint.keys()[:3]) or "nothing"
        raise ModelMismatchError(
            f"{checkpoint.path} holds no weights named {DENOISER}* (it holds {held}, …).",
            hint="Give a whole LBM checkpoint in native naming, not a LoRA or a bare UNet.",
        )
    return keys


def _refuse_missing(base: Checkpoint, tuned: Checkpoint, base_keys: list[str], tuned_keys: list[str]) -> None:
    for lacking, having, extra in (
        (tuned, base, sorted(set(base_keys) - set(tuned_keys))),
        (base, tuned, sorted(set(tuned_keys) - set(base_keys))),
    ):
        if extra:
            named = ", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
            raise ModelMismatchError(
                f"{lacking.path} lacks {named}, which {having.path} has.",
                hint="Both must be complete checkpoints of the same architecture.",
            )


def _checked_info(checkpoint: Checkpoint, key: str) -> TensorInfo:
    info = checkpoint.info(key)
    if not is_real(info.dtype):
        raise CheckpointError(
            checkpoint.path,
            f"{key} is {str(info.dtype).removeprefix('torch.')}, not plain floating-point numbers.",
            hint="Dequantise the checkpoint first; a difference of quantised codes means nothing.",
        )
    return info


def _shape_error(key: str, base: Checkpoint, tuned: Checkpoint) -> ModelMismatchError:
    return ModelMismatchError(
        f"{key} is {base.info(key).shape} in {base.path} and {tuned.info(key).shape} in {tuned.path}.",
        hint="Both must have the same architecture; create the base from the tuned model's configuration.",
    )


def _refuse_non_finite(
    pair: CheckpointPair, key: str, base: Float[Tensor, "*shape"], tuned: Float[Tensor, "*shape"]
) -> None:
    for checkpoint, weight in ((pair.base, base), (pair.tuned, tuned)):
        nans, infs = int(weight.isnan().sum()), int(weight.isinf().sum())
        if nans or infs:
            raise NonFiniteError(
                f"{checkpoint.path}: {key} holds {nans} NaN and {infs} Inf in {weight.numel()} values.",
                hint="Use an earlier checkpoint of the training; this one is damaged.",
            )
    raise NonFiniteError(
        f"{key}: the difference between {pair.tuned.path} and {pair.base.path} overflows {pair.precision}.",
        hint="Check that both files hold weights of one model.",
    )
