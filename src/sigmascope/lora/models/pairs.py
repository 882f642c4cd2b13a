"""Two checkpoints of one architecture, layer by layer: what they share and how each layer differs."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.checkpoints.renamed import RenamedCheckpoint
from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.lora.models.layer_kinds import WEIGHT, is_layer
from sigmascope.lora.models.layout import ModelLayout
from sigmascope.lora.models.pair_findings import missing_keys, unread_keys
from sigmascope.lora.models.pair_layouts import Side, sides_of
from sigmascope.lora.models.pair_matching import refuse_missing, sort_tensors
from sigmascope.lora.models.pair_options import PairOptions
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.paths import exists
from sigmascope.lora.precision import at_least_float32
from sigmascope.records.finding import Finding

__all__ = ["CheckpointPair", "LayerChange", "PairOptions", "match", "open_pair"]


@dataclass(frozen=True, slots=True)
class LayerChange:
    """How one weight differs: ΔW = tuned − base."""

    delta: Float[Tensor, "*shape"]
    delta_norm: float
    base_norm: float


@dataclass(frozen=True, slots=True)
class CheckpointPair:
    """A base and a tuned checkpoint, with the tensors of the chosen parts matched.

    Attributes:
        base: The model that the LoRA will be put on.
        tuned: The fine-tuned model, under the base's names where its own prefixes are others.
        layers: Paths of the Linear and convolution layers (weights of two to five axes), without `.weight`, in
            the base file's order.
        others: Keys of the other tensors that are compared: biases, norms, embeddings, parameters.
        outside: Keys of the parts that are not compared, as far as both files have them.
        skipped: Why a tensor of the chosen parts is not compared, by key; all are in the findings too.
        layout: How the base names its weights.
        findings: What does not fit between the two, and what was quantised.
    """

    base: Checkpoint
    tuned: Checkpoint
    layers: tuple[str, ...]
    others: tuple[str, ...]
    outside: tuple[str, ...]
    skipped: Mapping[str, str]
    layout: ModelLayout
    findings: tuple[Finding, ...]

    def shape(self, layer: str) -> tuple[int, ...]:
        """The shape of a layer's weight."""
        return self.base.info(layer + WEIGHT).shape

    def precision_of(self, key: str) -> torch.dtype:
        """The dtype in which a tensor's change is formed: float64 when either file holds it in that, else float32."""
        return at_least_float32(self.base.info(key).dtype, self.tuned.info(key).dtype)

    def layer_change(self, layer: str, device: torch.device) -> LayerChange:
        """Read one layer from both files and subtract; see `change`."""
        return self.change(layer + WEIGHT, device)

    def change(self, key: str, device: torch.device) -> LayerChange:
        """Read one tensor from both files and subtract.

        Args:
            key: The tensor's name.
            device: Where the difference is formed and stays.

        Raises:
            NonFiniteError: Either file holds NaN or Inf there.
            CheckpointError: The tensor cannot be read.
        """
        precision = self.precision_of(key)
        # The narrow numbers travel to the device and are widened there.
        base = self.base.tensor(key).to(device).to(precision)
        tuned = self.tuned.tensor(key).to(device).to(precision)
        base_norm = frobenius_norm(base)
        delta = tuned - base
        norm = frobenius_norm(delta)  # NaN or Inf in either file reaches the norm: one pass serves both
        if not norm < float("inf"):
            _refuse_non_finite(self, key, base, tuned)
        return LayerChange(delta, norm, base_norm)


@contextmanager
def open_pair(
    base: str | PathLike[str], tuned: str | PathLike[str], options: PairOptions | None = None
) -> Iterator[CheckpointPair]:
    """Open two checkpoints and match their parts, reading headers only (and integer tensors, which are few).

    Args:
        base: A file, index, component folder or diffusers folder; see `open_checkpoint`.
        tuned: The fine-tuned model, in the same form as the base; only prefixes may differ.
        options: What is compared and what may be left out; the defaults compare whole denoisers.

    Raises:
        ModelMismatchError: The same file twice, a part that is not there, another naming, and unless they may be
            skipped a key missing on one side, or other shapes.
        CheckpointError: A file that cannot be read, or weights that are not floating-point numbers.
    """
    options = options or PairOptions()
    paths = Path(base), Path(tuned)
    if all(exists(path) for path in paths) and paths[0].samefile(paths[1]):
        raise ModelMismatchError(
            f"{base} is given as base and as tuned model: nothing differs.",
            hint="Give the fine-tuned checkpoint as --tuned_model_path.",
        )
    with ExitStack() as stack:
        opened = [stack.enter_context(open_checkpoint(path, variant=options.variant)) for path in paths]
        yield match(opened[0], opened[1], options)


def match(base: Checkpoint, tuned: Checkpoint, options: PairOptions | None = None) -> CheckpointPair:
    """Pair the parts of two open checkpoints; see `open_pair` for what is raised."""
    options = options or PairOptions()
    first, second = sides_of(base, tuned, options.parts)
    lost = [key for place, key in first.keys.items() if place not in second.keys]
    added = [key for place, key in second.keys.items() if place not in first.keys]
    if options.on_missing == "error":
        refuse_missing(tuned, base, sorted(lost))
        refuse_missing(base, tuned, sorted(added))
    tuned = _under_base_names(first, second)
    shared = [key for place, key in first.keys.items() if place in second.keys]
    tensors = sort_tensors(base, tuned, shared, options)
    findings = [missing_keys(tuned, base, lost)] if lost else []
    findings += [missing_keys(base, tuned, added)] if added else []
    findings += [*unread_keys(base), *unread_keys(tuned)]
    layers = [key for key in tensors.compared if is_layer(key, base.info(key).shape)]
    return CheckpointPair(
        base=base,
        tuned=tuned,
        layers=tuple(key.removesuffix(WEIGHT) for key in layers),
        others=tuple(key for key in tensors.compared if not is_layer(key, base.info(key).shape)),
        outside=tuple(key for place, key in first.outside.items() if place in second.outside),
        skipped=dict.fromkeys(lost, "the tuned model lacks it")
        | dict.fromkeys(added, "the base lacks it")
        | tensors.skipped(options),
        layout=first.layout,
        findings=(*findings, *tensors.findings(base, tuned, options)),
    )


def _under_base_names(base: Side, tuned: Side) -> Checkpoint:
    places = {**tuned.outside, **tuned.keys}
    wanted = {**base.outside, **base.keys}
    names = {key: wanted[place] for place, key in places.items() if place in wanted and wanted[place] != key}
    return RenamedCheckpoint(tuned.checkpoint, names) if names else tuned.checkpoint


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
        f"{key}: the difference between {pair.tuned.path} and {pair.base.path} overflows "
        f"{pair.precision_of(key)}.",
        hint="Check that both files hold weights of one model.",
    )
