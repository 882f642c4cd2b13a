"""Two checkpoints of one architecture, tensor by tensor: matched, compared, and what does not fit.

One tensor has one place in both, a part of the model and the key inside it, whatever stands before their names.
Every tensor is compared, left out by choice, or refused. The findings name whatever is left out, and what differs
that no LoRA of Linear and convolution layers can hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Final, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, TensorInfo, open_checkpoint
from sigmascope.checkpoints.checkpoint import LEFT_OUT_REASON, RenamedCheckpoint, is_same_file
from sigmascope.errors import CheckpointError, ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora.families import ModelLayout, Part, layout_of
from sigmascope.lora.layer_names import WEIGHT, is_layer
from sigmascope.lora.linalg import at_least_float32, frobenius_norm, is_real, root_sum_square
from sigmascope.records.run import Finding, JsonScalar

__all__ = [
    "CheckpointPair",
    "LayerChange",
    "PairOptions",
    "counted",
    "match",
    "open_pair",
    "pair_findings",
    "uncovered_changes",
]

Decision = Literal["error", "skip"]
DtypeDecision = Literal["compare", "error", "skip"]

Place = tuple[Part, str]
"""A part and the key inside it: the same for one tensor in any naming with the same inner keys."""
PARTS: Final[tuple[Part, ...]] = get_args(Part)
"""Every part of a model, in the order in which they are written about."""

_MIN_COMMON_SHARE = 0.5  # of the smaller side's keys: far below any two of one architecture, far above chance
_LORA_KEY_PARTS = (".lora_up.", ".lora_down.", ".lora_A.", ".lora_B.", ".lora.up.", ".lora.down.")
_ONE_ARCHITECTURE = "Both must be complete checkpoints of the same architecture"

_IGNORED_KEYS = ("num_iterations",)  # a training counter: it differs between any two checkpoints
_CPU = torch.device("cpu")
_SAMPLED_BYTES = 1 << 30  # bytes: a VAE whole, of text encoders of many GB a share

_NAMED = 3  # names in a message


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The choices of `open_pair`. Whatever is skipped is named in the pair's findings.

    Attributes:
        parts: Which parts of the models are compared.
        on_missing: Keys that one side lacks: `error`, or `skip` to compare the others.
        on_shape_change: Tensors whose shapes differ: `error`, or `skip` to compare the others.
        on_integer: Integer and boolean tensors that differ, and weights that are integers: `error` or `skip`.
            Those that are equal on both sides are no obstacle to anything.
        on_mixed_dtypes: Tensors stored in two dtypes: `compare` in the wider precision, `error` or `skip`.
        variant: Which files of a diffusers folder are read where it has several: `fp16` for `*.fp16.safetensors`.

    Raises:
        ConfigError: A value is not known; the message names the flag.
    """

    parts: tuple[Part, ...] = ("denoiser",)
    on_missing: Decision = "error"
    on_shape_change: Decision = "error"
    on_integer: Decision = "error"
    on_mixed_dtypes: DtypeDecision = "compare"
    variant: str | None = None

    def __post_init__(self) -> None:
        parts_of(",".join(self.parts))
        require_one_of("--on_missing", self.on_missing, get_args(Decision))
        require_one_of("--on_shape_change", self.on_shape_change, get_args(Decision))
        require_one_of("--on_integer", self.on_integer, get_args(Decision))
        require_one_of("--on_mixed_dtypes", self.on_mixed_dtypes, get_args(DtypeDecision))


def require_one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is not known.

    Raises:
        ConfigError: With the flag and the known values.
    """
    if value not in known:
        raise ConfigError(f"{flag} {value} is not known.", hint=f"Use one of: {', '.join(known)}.")


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
    if is_same_file(Path(base), Path(tuned)):
        raise ModelMismatchError(
            f"{base} is given as base and as tuned model: nothing differs.",
            hint="Give the fine-tuned checkpoint as --tuned_model_path.",
        )
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_checkpoint(path, variant=options.variant)) for path in (base, tuned)
        ]
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
    wanted = {**first.outside, **first.keys}
    names = {
        key: wanted[place]
        for place, key in (*second.outside.items(), *second.keys.items())
        if wanted.get(place, key) != key
    }
    if names:
        tuned = RenamedCheckpoint(tuned, names)
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


@dataclass(frozen=True, slots=True)
class PairSide:
    """One checkpoint: how it is laid out, and where each place's tensor is.

    Attributes:
        checkpoint: The opened file.
        layout: How it names its weights.
        keys: Key by place, of the parts that are compared.
        outside: Key by place, of the other parts.
    """

    checkpoint: Checkpoint
    layout: ModelLayout
    keys: Mapping[Place, str]
    outside: Mapping[Place, str]

    def __str__(self) -> str:
        return f"{self.checkpoint.path} ({described(self.layout)})"


def parts_of(text: str) -> tuple[Part, ...]:
    """Read names of parts with commas between them, such as `denoiser, vae`.

    Raises:
        ConfigError: There is none, or one that is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--parts names nothing to compare.", hint=f"Name some of {', '.join(PARTS)}.")
    for name in names:
        require_one_of("--parts", name, PARTS)
    return tuple(part for part in PARTS if part in names)


def sides_of(base: Checkpoint, tuned: Checkpoint, parts: tuple[Part, ...]) -> tuple[PairSide, PairSide]:
    """Lay out two checkpoints such that one tensor has one place in both.

    Args:
        base: The one model.
        tuned: The other.
        parts: What is compared. Where both are a VAE or text encoder alone, the denoiser means that.

    Raises:
        ModelMismatchError: A side is a LoRA, lacks a part, or names its weights unlike the other.
    """
    layouts = _common_layouts(base, tuned)
    alone = all("denoiser" not in side.prefixes and [*side.prefixes.values()] == [""] for side in layouts)
    if alone and parts == ("denoiser",):
        parts = tuple(layouts[0].prefixes)
    sides = _side(base, layouts[0], parts), _side(tuned, layouts[1], parts)
    _refuse_other_naming(*sides)
    return sides


def _common_layouts(base: Checkpoint, tuned: Checkpoint) -> tuple[ModelLayout, ModelLayout]:
    first, second = (layout_of({key: side.info(key).shape for key in side}) for side in (base, tuned))
    same = (first.family, first.naming) == (second.family, second.naming)
    if not same and _common_share(set(base), set(tuned)) >= _MIN_COMMON_SHARE:
        # The same names mean the same things: a file of a few layers is read as the whole model's names are.
        known = second if first.family == "unknown" else first
        return known, known
    return first, second


def _common_share(first: set[Place] | set[str], second: set[Place] | set[str]) -> float:
    smaller = min(len(first), len(second))
    return len(first & second) / smaller if smaller else 0.0


def _side(checkpoint: Checkpoint, layout: ModelLayout, parts: tuple[Part, ...]) -> PairSide:
    if any(mark in key for key in checkpoint for mark in _LORA_KEY_PARTS):
        raise ModelMismatchError(
            f"{checkpoint.path} is a LoRA, not a model.",
            hint="Give a whole checkpoint, or merge the LoRA first.",
        )
    keys: dict[Place, str] = {}
    outside: dict[Place, str] = {}
    for key in checkpoint:
        place = layout.split(key)
        (keys if place[0] in parts else outside)[place] = key
    for part in parts:
        if not any(place[0] == part for place in keys):
            raise _no_such_part(checkpoint, layout, part)
    return PairSide(checkpoint, layout, keys, outside)


def _no_such_part(checkpoint: Checkpoint, layout: ModelLayout, part: Part) -> ModelMismatchError:
    prefix = " named denoiser.*" if layout.naming == "lbm" and part == "denoiser" else ""
    held = ", ".join(checkpoint.keys()[:3]) or "nothing"
    there = sorted({layout.split(key)[0] for key in checkpoint})
    return ModelMismatchError(
        f"{checkpoint.path} holds no weights{prefix} of the part {part} ({described(layout)}: {held}, …).",
        hint=f"It has the parts {', '.join(there) or 'none'}: choose with --parts, or give a whole checkpoint.",
    )


def described(layout: ModelLayout) -> str:
    """Such as `sdxl in diffusers naming`."""
    family = "an unknown model" if layout.family == "unknown" else layout.family
    return family if layout.naming in {"unknown", layout.family} else f"{family} in {layout.naming} naming"


def _refuse_other_naming(base: PairSide, tuned: PairSide) -> None:
    same = (base.layout.family, base.layout.naming) == (tuned.layout.family, tuned.layout.naming)
    common = _common_share(set(base.keys), set(tuned.keys))
    if common == 0 or (not same and common < _MIN_COMMON_SHARE):
        raise ModelMismatchError(
            f"{base} and {tuned} name their weights differently, so no layer of one is found in the other.",
            hint="Give both in one form: two diffusers folders, or two single files of the same family.",
        )


@dataclass
class MatchedTensors:
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
        findings: list[Finding] = []
        if self.reshaped:
            findings.append(changed_shapes(base, tuned, self.reshaped))
        if self.integers:
            message = (
                f"{counted(len(self.integers), 'integer tensor')} equal in both: {named(self.integers)}."
            )
            evidence: dict[str, JsonScalar] = {
                "tensors": len(self.integers),
                "keys": " ".join(self.integers),
            }
            findings.append(Finding("lora.integer_tensors", "info", message, evidence))
        if self.changed_integers:
            number = counted(len(self.changed_integers), "integer tensor")
            findings.append(
                _finding(
                    "lora.integer_tensors_changed",
                    f"{number} changed; left out: {named(self.changed_integers)}.",
                    self.changed_integers,
                    "A LoRA holds no integers: take these tensors from the tuned model.",
                )
            )
        if self.mixed:
            skipped = options.on_mixed_dtypes == "skip"
            findings.append(mixed_dtypes(base, tuned, self.mixed, skipped=skipped))
        for side, role in ((base, "base"), (tuned, "tuned model")):
            keys = [key for key in self.compared if key in side.dequantised]
            if keys:
                findings.append(dequantised(side, role, keys))
        return findings


def sort_tensors(
    base: Checkpoint, tuned: Checkpoint, keys: Sequence[str], options: PairOptions
) -> MatchedTensors:
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
    result = MatchedTensors()
    for key in keys:
        infos = base.info(key), tuned.info(key)
        if infos[0].shape != infos[1].shape:
            result.reshaped.append(key)
        elif any(_is_integer(info.dtype) for info in infos):
            same = _is_equal_integer(base, tuned, key, options)
            (result.integers if same else result.changed_integers).append(key)
        else:
            _sort_real(base, tuned, infos, result, options)
    if result.reshaped and options.on_shape_change == "error":
        raise _shape_error(result.reshaped[0], base, tuned)
    if result.mixed and options.on_mixed_dtypes == "error":
        finding = mixed_dtypes(base, tuned, result.mixed, skipped=True)
        raise ModelMismatchError(
            finding.message.replace("left out", "namely"), hint="Use --on_mixed_dtypes compare or skip."
        )
    return result


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_equal_integer(base: Checkpoint, tuned: Checkpoint, key: str, options: PairOptions) -> bool:
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


def _sort_real(
    base: Checkpoint,
    tuned: Checkpoint,
    infos: tuple[TensorInfo, TensorInfo],
    result: MatchedTensors,
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


def pair_findings(
    pair: CheckpointPair, uncovered: dict[str, float], layer_norms: Iterable[float]
) -> list[Finding]:
    """What a user should know about two checkpoints before trusting a LoRA between them.

    Args:
        pair: The two checkpoints.
        uncovered: As given by `uncovered_changes`.
        layer_norms: ‖ΔW‖ of the Linear and Conv2d layers, to set the uncovered change beside.
    """
    findings = [_uncovered_finding(uncovered, root_sum_square(list(layer_norms)))] if uncovered else []
    return [*findings, *pair.findings, *_outside_findings(pair)]


def _uncovered_finding(uncovered: dict[str, float], layers_norm: float) -> Finding:
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


def _outside_findings(pair: CheckpointPair) -> list[Finding]:
    """Whether the VAE or anything else that is not compared differs, where both files hold it."""
    keys = [key for key in pair.outside if key not in _IGNORED_KEYS]
    step = -(-sum(pair.base.info(key).nbytes for key in keys) // _SAMPLED_BYTES) or 1
    looked_at = keys[::step]
    memory: list[Tensor] = []  # room for the largest tensor of either side, to read all of them into
    for side in (pair.base, pair.tuned):
        size = max((side.info(key).nbytes for key in looked_at), default=0)
        memory.append(torch.empty(size, dtype=torch.uint8))
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


def _differs(pair: CheckpointPair, key: str, memory: Sequence[Tensor]) -> bool:
    if pair.base.info(key).shape != pair.tuned.info(key).shape:
        return True
    base, tuned = pair.base.tensor_into(key, memory[0]), pair.tuned.tensor_into(key, memory[1])
    if base.dtype == tuned.dtype:  # bits decide: 0.0 and -0.0 differ, and a NaN is equal to itself
        return not torch.equal(base.reshape(-1).view(torch.uint8), tuned.reshape(-1).view(torch.uint8))
    if not all(is_real(tensor.dtype) or _is_integer(tensor.dtype) for tensor in (base, tuned)):
        return True  # complex or packed beside another dtype: nothing says that they are equal
    return bool((base.to(torch.float64) != tuned.to(torch.float64)).any())


def uncovered_changes(pair: CheckpointPair) -> dict[str, float]:
    """The compared parts' tensors outside Linear and convolution weights (biases, norms) that differ.

    Returns:
        ‖Δ‖ by key, for the changed ones.

    Raises:
        NonFiniteError: NaN or Inf among them.
    """
    norms = {key: pair.change(key, _CPU).delta_norm for key in pair.others}
    return {key: norm for key, norm in norms.items() if norm > 0}


def missing_keys(lacking: Checkpoint, having: Checkpoint, keys: Sequence[str]) -> Finding:
    """Keys of one side that the other lacks, left out."""
    return _finding(
        "lora.missing_keys",
        f"{lacking.path} lacks {counted(len(keys), 'tensor')} that {having.path} has; left out: {named(keys)}.",
        keys,
        "Check that both are complete checkpoints of the same architecture.",
        lacking=str(lacking.path),
    )


def unread_keys(checkpoint: Checkpoint) -> list[Finding]:
    """Keys that a file holds and that cannot be compared: types that PyTorch lacks, keys that no index names."""
    keys = [key for key, reason in checkpoint.skipped.items() if reason != LEFT_OUT_REASON]
    if not keys:
        return []
    return [
        _finding(
            "lora.unread_keys",
            f"{checkpoint.path} holds {counted(len(keys), 'tensor')} that are not compared: {named(keys)} "
            f"({checkpoint.skipped[keys[0]]}).",
            keys,
            "Convert them to a common type, or repair the index, if they belong to the model.",
            file=str(checkpoint.path),
        )
    ]


def changed_shapes(base: Checkpoint, tuned: Checkpoint, keys: Sequence[str]) -> Finding:
    """Tensors whose shapes differ, left out."""
    first = f"{keys[0]} is {base.info(keys[0]).shape} in the base and {tuned.info(keys[0]).shape} in the tuned model"
    return _finding(
        "lora.shapes_changed",
        f"{counted(len(keys), 'tensor')} changed shape ({first}); left out: {named(keys)}.",
        keys,
        "A LoRA cannot change a shape: take these tensors from the tuned model.",
    )


def mixed_dtypes(base: Checkpoint, tuned: Checkpoint, keys: Sequence[str], *, skipped: bool) -> Finding:
    """Tensors that the two store in different dtypes."""
    first = keys[0]
    dtypes = [str(side.info(first).dtype).removeprefix("torch.") for side in (base, tuned)]
    effect = f"left out: {named(keys)}" if skipped else "the change holds the rounding of the narrower one"
    return _finding(
        "lora.mixed_dtypes",
        f"The models store {counted(len(keys), 'tensor')} in different dtypes ({first}: {dtypes[0]} in "
        f"the base, {dtypes[1]} in the tuned model): {effect}.",
        keys,
        "Extract from two checkpoints of one dtype when you have them.",
        key=first,
        base_dtype=dtypes[0],
        tuned_dtype=dtypes[1],
    )


def dequantised(side: Checkpoint, role: str, keys: Sequence[str]) -> Finding:
    """Tensors that were quantised in the file and are compared as the numbers that they stand for."""
    how = ", ".join(dict.fromkeys(side.dequantised[key] for key in keys))
    return _finding(
        "lora.dequantised",
        f"{counted(len(keys), 'tensor')} of the {role} {'is' if len(keys) == 1 else 'are'} quantised "
        f"({how}) and dequantised here, so the change holds the quantisation's rounding.",
        keys,
        "Use the checkpoint that it was quantised from when you have it.",
        side=role,
        how=how,
    )


def _finding(id: str, message: str, keys: Sequence[str], advice: str, **evidence: str) -> Finding:
    """A warning about some tensors."""
    return Finding(id, "warning", message, {"tensors": len(keys), **evidence, "keys": " ".join(keys)}, advice)


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def named(keys: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(keys[:_NAMED]) + more
