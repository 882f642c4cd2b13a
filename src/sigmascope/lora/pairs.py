"""Open a base and a tuned checkpoint as one pair (`open_pair`), with their tensors matched.

Tensors are matched by part of the model and key inside it; prefixes do not matter, and of two namings of one family the
tuned model's is translated to the base's (`lora.translation`). Every tensor is compared, skipped by
choice, or refused. The findings name what is skipped, and changes that a LoRA of Linear and convolution layers cannot
hold.
"""

from collections import Counter
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
from sigmascope.lora.file import require_model
from sigmascope.lora.layer_names import WEIGHT, is_layer
from sigmascope.lora.linalg import at_least_float32, frobenius_norm, is_real, root_sum_square
from sigmascope.lora.storage_noise import storage_noise
from sigmascope.lora.translation import Place, translated
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import counted, first_few, rough_percent

__all__ = [
    "CheckpointPair",
    "LayerChange",
    "PairOptions",
    "match",
    "open_pair",
    "pair_findings",
    "uncovered_changes",
]

Decision = Literal["error", "skip"]
DtypeDecision = Literal["compare", "error", "skip"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)
"""Every part of a model, in the order in which messages name them."""

_MIN_COMMON_SHARE = (
    0.5  # of the smaller side's keys; files of one architecture share far more, others far less
)
_ONE_ARCHITECTURE = "Both must be complete checkpoints of the same architecture"

_IGNORED_KEYS = ("num_iterations",)  # a training counter, which differs in any two checkpoints
_CPU = torch.device("cpu")
_SAMPLED_BYTES = 1 << 30  # holds a whole VAE; of larger text encoders, a sample of the tensors is compared

_MAX_NAMED = 3
_MUCH_NOISE = 0.05
"""Share of the change from which on the noise of a coarse storage is a warning."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Options of `open_pair`. The pair's findings name everything that is skipped.

    Attributes:
        parts: Which parts of the models are compared.
        on_missing: For keys that one side lacks: `error`, or `skip` to compare the others.
        on_shape_change: For tensors whose shapes differ: `error`, or `skip` to compare the others.
        on_integer: For integer and boolean tensors that differ, and for integer weights: `error` or `skip`. Equal
            integer tensors are always accepted.
        on_mixed_dtypes: For tensors stored in two dtypes: `compare` in the wider precision, `error` or `skip`.
        variant: Which files of a diffusers folder are read if it has several: `fp16` for `*.fp16.safetensors`.

    Raises:
        ConfigError: An unknown value; the message names the flag.
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
    """Refuse an unknown value.

    Raises:
        ConfigError: Names the flag and the known values.
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
        base: The model that the LoRA will be applied to.
        tuned: The fine-tuned model, under the base's names.
        layers: Paths of the Linear and convolution layers (weights of two to five axes), without `.weight`, in
            the base file's order.
        others: Keys of the other compared tensors: biases, norms, embeddings, parameters.
        outside: Keys that both files have in parts that are not compared.
        skipped: Why a tensor of the chosen parts is not compared, by key. The findings name all of them.
        layout: How the base names its weights.
        findings: What does not match between the two, and what was quantised.
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
        """The dtype in which a tensor's change is formed: float64 if either file stores float64, else float32."""
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
        # Widened on the device, so that fewer bytes travel.
        base = self.base.tensor(key).to(device).to(precision)
        tuned = self.tuned.tensor(key).to(device).to(precision)
        base_norm = frobenius_norm(base)
        delta = tuned - base
        norm = frobenius_norm(delta)  # NaN or Inf in either file shows in the norm
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
                hint="This checkpoint is damaged: use an earlier one of the training.",
            )
    raise NonFiniteError(
        f"{key}: the difference between {pair.tuned.path} and {pair.base.path} overflows "
        f"{pair.precision_of(key)}.",
        hint="Check that both files hold weights of the same model.",
    )


@contextmanager
def open_pair(
    base: str | PathLike[str], tuned: str | PathLike[str], options: PairOptions | None = None
) -> Iterator[CheckpointPair]:
    """Open two checkpoints and match their parts. Only headers are read, and the few integer tensors.

    Args:
        base: A file, index, component folder or diffusers folder; see `open_checkpoint`.
        tuned: The fine-tuned model. Its form may be another one: a folder and an original single file of one family are
            matched by the family's names (`lora.translation`).
        options: What is compared and what may be skipped; the defaults compare whole denoisers.

    Raises:
        ModelMismatchError: Both are the same file, a part is missing, or the namings differ; also a key missing on one
            side or a changed shape, unless `options` skips it.
        CheckpointError: A file cannot be read, or its weights are not floating-point numbers.
    """
    options = options or PairOptions()
    if is_same_file(Path(base), Path(tuned)):
        raise ModelMismatchError(
            f"{base} was given as both the base and the tuned model: nothing differs.",
            hint="Give the fine-tuned checkpoint as --tuned_model_path.",
        )
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_checkpoint(path, variant=options.variant)) for path in (base, tuned)
        ]
        yield match(opened[0], opened[1], options)


def match(base: Checkpoint, tuned: Checkpoint, options: PairOptions | None = None) -> CheckpointPair:
    """Pair the parts of two open checkpoints; raises what `open_pair` does."""
    options = options or PairOptions()
    first, second = sides_of(base, tuned, options.parts)
    is_mixed = second.checkpoint is not tuned
    tuned = second.checkpoint
    lost = [key for place, key in first.keys.items() if place not in second.keys]
    added = [key for place, key in second.keys.items() if place not in first.keys]
    if options.on_missing == "error":
        # In mixed forms, a norm may have a name that the family's record lacks: that is no sign of another model.
        refuse_missing(tuned, base, sorted(_layers_of(base, lost) if is_mixed else lost))
        refuse_missing(base, tuned, sorted(_layers_of(tuned, added) if is_mixed else added))
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
        findings=(
            *findings,
            *tensors.findings(base, tuned, options),
            *_left_outside(first, second),
        ),
    )


def _layers_of(checkpoint: Checkpoint, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if is_layer(key, checkpoint.info(key).shape)]


@dataclass(frozen=True, slots=True)
class PairSide:
    """One checkpoint of a pair, with its keys by place.

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


def _left_outside(first: PairSide, second: PairSide) -> Iterator[Finding]:
    """What of the parts outside of the comparison only one model has, or has under a name that the other lacks."""
    sides = (first, second)
    counts = [Counter(place[0] for place in side.outside) for side in sides]
    alone = [
        Counter(
            place[0]
            for place, key in side.outside.items()
            if place not in other.outside and key not in _IGNORED_KEYS
        )
        for side, other in (sides, sides[::-1])
    ]
    for part in PARTS:
        if part != "other" and counts[0][part] and counts[1][part] and (alone[0][part] or alone[1][part]):
            yield Finding(
                "lora.other_parts_not_compared",
                "info",
                f"Both models have {_in_words(part)}, but the names of {alone[0][part]} of its {counts[0][part]} tensors in the "
                f"base and of {alone[1][part]} of {counts[1][part]} in the tuned model are not in the other: whether these differ "
                "is not known.",
                {"part": part, "base_tensors": alone[0][part], "tuned_tensors": alone[1][part]},
                "Compare two single files or two folders to know whether it changed too.",
            )
    for side, own, others in ((0, alone[0], counts[1]), (1, alone[1], counts[0])):
        role = ("base", "tuned model")[side]
        lone = [part for part in PARTS if own[part] and (part == "other" or not others[part])]
        if lone:
            number = sum(own[part] for part in lone)
            key = next(
                key
                for place, key in sides[side].outside.items()
                if place[0] in lone and place not in sides[1 - side].outside and key not in _IGNORED_KEYS
            )
            yield Finding(
                "lora.other_parts_not_compared",
                "info",
                f"Only the {role} has {' and '.join(map(_in_words, lone))} ({counted(number, 'tensor')}, first {key}): nothing to "
                "compare with, and not in the LoRA.",
                {"side": role, "parts": " ".join(lone), "tensors": number, "key": key},
            )


def _in_words(part: Part) -> str:
    words = part.replace("_", " ").replace("vae", "VAE")
    return "tensors of no known part" if part == "other" else f"a {words}"


def parts_of(text: str) -> tuple[Part, ...]:
    """Read names of parts separated by commas, such as `denoiser, vae`.

    Raises:
        ConfigError: There is none, or an unknown one.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--parts names no part.", hint=f"Name one or more of {', '.join(PARTS)}.")
    for name in names:
        require_one_of("--parts", name, PARTS)
    return tuple(part for part in PARTS if part in names)


def sides_of(base: Checkpoint, tuned: Checkpoint, parts: tuple[Part, ...]) -> tuple[PairSide, PairSide]:
    """Find each tensor's place in two checkpoints.

    Args:
        base: The base model.
        tuned: The tuned model.
        parts: What is compared. If both files are only a VAE or text encoder, "denoiser" means that part.

    Raises:
        ModelMismatchError: A side is a LoRA, lacks a part, or names its weights differently.
    """
    layouts = _common_layouts(base, tuned)
    alone = all("denoiser" not in side.prefixes and [*side.prefixes.values()] == [""] for side in layouts)
    if alone and parts == ("denoiser",):
        parts = tuple(layouts[0].prefixes)
    sides = _side(base, layouts[0], parts), _side(tuned, layouts[1], parts)
    other_names = layouts[0].naming != layouts[1].naming or not _share_names(*sides)
    if other_names and layouts[0].family == layouts[1].family != "unknown":
        sides = sides[0], _translated_side(*sides, parts)
    if not _share_names(*sides):
        raise _other_names(*sides)
    return sides


def _translated_side(base: PairSide, tuned: PairSide, parts: tuple[Part, ...]) -> PairSide:
    """The tuned side under the base's names; a tensor that the base lacks keeps its name and its place."""
    made = translated(base.checkpoint, tuned.checkpoint, base.layout, tuned.layout)
    places = {key: (base if key in base.checkpoint else tuned).layout.split(key) for key in made}
    return PairSide(made, base.layout, *_by_part(places, parts))


def _by_part(
    places: Mapping[str, Place], parts: tuple[Part, ...]
) -> tuple[dict[Place, str], dict[Place, str]]:
    """Keys by place: of some parts, and of the others."""
    keys: dict[Place, str] = {}
    outside: dict[Place, str] = {}
    for key, place in places.items():
        (keys if place[0] in parts else outside)[place] = key
    return keys, outside


def _common_layouts(base: Checkpoint, tuned: Checkpoint) -> tuple[ModelLayout, ModelLayout]:
    first, second = (layout_of({key: side.info(key).shape for key in side}) for side in (base, tuned))
    if first.family != second.family and _common_share(set(base), set(tuned)) >= _MIN_COMMON_SHARE:
        # Equal names mean equal layers, so a file of a few layers gets the whole model's layout.
        known = second if first.family == "unknown" else first
        return known, known
    return first, second


def _common_share(first: set[Place] | set[str], second: set[Place] | set[str]) -> float:
    smaller = min(len(first), len(second))
    return len(first & second) / smaller if smaller else 0.0


def _side(checkpoint: Checkpoint, layout: ModelLayout, parts: tuple[Part, ...]) -> PairSide:
    require_model(checkpoint)
    keys, outside = _by_part({key: layout.split(key) for key in checkpoint}, parts)
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
        hint=f"It has the parts {', '.join(there) or 'none'}: choose with --parts, or give a complete checkpoint.",
    )


def described(layout: ModelLayout) -> str:
    """Such as `sdxl in diffusers naming`."""
    family = "an unknown model" if layout.family == "unknown" else layout.family
    return family if layout.naming in {"unknown", layout.family} else f"{family} in {layout.naming} naming"


def _share_names(base: PairSide, tuned: PairSide) -> bool:
    """Whether the same names mean the same layers in both, and most are the same."""
    same = (base.layout.family, base.layout.naming) == (tuned.layout.family, tuned.layout.naming)
    common = _common_share(set(base.keys), set(tuned.keys))
    return common >= _MIN_COMMON_SHARE or (same and common > 0)


def _other_names(base: PairSide, tuned: PairSide) -> ModelMismatchError:
    families = {base.layout.family, tuned.layout.family}
    if "unknown" in families:
        hint = "Give both in the same form: names are only translated inside a known family."
    else:
        hint = f"{_ONE_ARCHITECTURE}."
    return ModelMismatchError(
        f"{base} and {tuned} name their weights differently, so their layers cannot be matched.", hint=hint
    )


@dataclass
class MatchedTensors:
    """Keys that both checkpoints have, sorted by what happens to them.

    Attributes:
        compared: Keys that are compared, in the base's order.
        reshaped: Keys whose shapes differ.
        integers: Integer and boolean tensors that are equal on both sides.
        changed_integers: Integer and boolean tensors that differ.
        mixed: Keys stored in two dtypes.
    """

    compared: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    integers: list[str] = field(default_factory=list)
    changed_integers: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)

    def skipped(self, options: PairOptions) -> dict[str, str]:
        """Why shared tensors are not compared, by key."""
        reasons = dict.fromkeys(self.reshaped, "its shape differs")
        reasons |= dict.fromkeys(self.integers, "it holds integers, equal in both")
        reasons |= dict.fromkeys(self.changed_integers, "it holds integers")
        if options.on_mixed_dtypes == "skip":
            reasons |= dict.fromkeys(self.mixed, "it is stored in two dtypes")
        return reasons

    def findings(self, base: Checkpoint, tuned: Checkpoint, options: PairOptions) -> list[Finding]:
        """Findings for tensors that are skipped, mixed in dtype or dequantised."""
        findings: list[Finding] = []
        if self.reshaped:
            findings.append(changed_shapes(base, tuned, self.reshaped))
        if self.integers:
            message = f"{counted(len(self.integers), 'integer tensor')} equal in both: {first_few(self.integers, _MAX_NAMED)}."
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
                    f"{number} changed; left out: {first_few(self.changed_integers, _MAX_NAMED)}.",
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
    """Sort shared tensors by shape and dtype; integer tensors, few and small, are read.

    Args:
        base: The base model.
        tuned: The tuned model, under the base's names.
        keys: The shared keys.
        options: What is refused and what is skipped.

    Raises:
        ModelMismatchError: Shapes, integers or dtypes differ, and `options` does not skip them.
        CheckpointError: Weights are not floating-point numbers.
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
    """Whether an integer tensor is equal on both sides; if not, it is refused unless `options` skips it."""
    infos = base.info(key), tuned.info(key)
    if is_layer(key, infos[0].shape):
        if options.on_integer == "error":
            side = 0 if _is_integer(infos[0].dtype) else 1
            raise _not_numbers((base, tuned)[side], infos[side])
        return False
    same = infos[0].dtype == infos[1].dtype and torch.equal(base.tensor(key), tuned.tensor(key))
    if not same and options.on_integer == "error":
        raise ModelMismatchError(
            f"{key} holds integers that differ between {base.path} and {tuned.path}.",
            hint="A LoRA cannot hold their change: use --on_integer skip to leave them out.",
        )
    return same


def _not_numbers(checkpoint: Checkpoint, info: TensorInfo) -> CheckpointError:
    hint = "Dequantise the checkpoint first: a difference of quantised codes means nothing."
    if info.dtype.is_complex:
        hint = "Remove it from both checkpoints: a LoRA cannot hold complex numbers."
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
        hint="Both must have the same architecture. Create the base from the tuned model's configuration, or leave such "
        "tensors out with --on_shape_change skip.",
    )


def refuse_missing(lacking: Checkpoint, having: Checkpoint, keys: Sequence[str]) -> None:
    """Refuse keys that one side lacks.

    Raises:
        ModelMismatchError: Names the first few and both files.
    """
    if keys:
        raise ModelMismatchError(
            f"{lacking.path} lacks {first_few(keys, _MAX_NAMED)}, which {having.path} has.",
            hint=f"{_ONE_ARCHITECTURE}; --on_missing skip compares what both have.",
        )


def pair_findings(
    pair: CheckpointPair, uncovered: dict[str, float], layer_norms: Iterable[float]
) -> list[Finding]:
    """What to know about two checkpoints before trusting a LoRA made from them.

    Args:
        pair: The two checkpoints.
        uncovered: From `uncovered_changes`.
        layer_norms: ‖ΔW‖ of the Linear and convolution layers, to compare the uncovered change with.
    """
    findings = [_uncovered_finding(uncovered, root_sum_square(list(layer_norms)))] if uncovered else []
    return [*findings, *pair.findings, *_noise_findings(pair), *_outside_findings(pair)]


def _noise_findings(pair: CheckpointPair) -> Iterator[Finding]:
    """How much of the change is only the rounding of a side that is stored coarsely."""
    keys = [layer + WEIGHT for layer in pair.layers]
    for side, other, role in ((pair.base, pair.tuned, "base"), (pair.tuned, pair.base, "tuned model")):
        for noise in storage_noise(side, other, keys):
            about = f"the rounding of the {role}'s {noise.stored}"
            evidence: dict[str, JsonScalar] = {
                "side": role,
                "stored": noise.stored,
                "layers": noise.layers,
                "noise_of_weight": noise.of_weight,
                "noise_of_change": noise.of_change,
            }
            if noise.of_change is None or noise.of_weight is None:
                message = f"How much of the change is {about} is not known: {noise.unavailable}."
                evidence["unavailable"] = noise.unavailable
            else:
                message = (
                    f"About {rough_percent(noise.of_change)} of the change (of ‖ΔW‖², in {counted(noise.layers, 'layer')}) is "
                    f"{about}, which moves weights by {rough_percent(noise.of_weight)} of their size."
                )
            much = noise.of_change is None or noise.of_change > _MUCH_NOISE
            yield Finding(
                "lora.storage_noise",
                "warning" if much else "info",
                message,
                evidence,
                f"Take the {role} in bf16 or fp16: the LoRA holds this noise too, and brings it to every other copy of "
                "the model."
                if much
                else None,
            )


def _uncovered_finding(uncovered: dict[str, float], layers_norm: float) -> Finding:
    norm = root_sum_square(list(uncovered.values()))
    share = norm / root_sum_square([norm, layers_norm])
    return Finding(
        id="lora.biases_and_norms_changed",
        severity="info",
        message=f"Biases and norms changed too ({counted(len(uncovered), 'tensor')}): {rough_percent(share)} of the "
        "change, which the LoRA does not hold.",
        evidence={"tensors": len(uncovered), "delta_norm": norm, "share": share},
        advice="Expect base + LoRA to differ from the tuned model by at least this much.",
    )


def _outside_findings(pair: CheckpointPair) -> list[Finding]:
    """A finding if the VAE or another part that is not compared differs."""
    keys = [key for key in pair.outside if key not in _IGNORED_KEYS]
    step = -(-sum(pair.base.info(key).nbytes for key in keys) // _SAMPLED_BYTES) or 1
    looked_at = keys[::step]
    memory: list[Tensor] = []  # one buffer a side, as large as its largest tensor
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
            message=f"The models also differ in parts that are not compared ({number}, first {changed[0]}); "
            "the LoRA does not hold that change.",
            evidence={"tensors": len(changed), "looked_at": len(looked_at), "key": changed[0]},
            advice="Use the tuned model's other parts (its VAE) with the LoRA, or compare them too with --parts.",
        )
    ]


def _differs(pair: CheckpointPair, key: str, memory: Sequence[Tensor]) -> bool:
    if pair.base.info(key).shape != pair.tuned.info(key).shape:
        return True
    base, tuned = pair.base.tensor_into(key, memory[0]), pair.tuned.tensor_into(key, memory[1])
    if base.dtype == tuned.dtype:  # bits are compared: 0.0 and -0.0 differ, and a NaN equals itself
        return not torch.equal(base.reshape(-1).view(torch.uint8), tuned.reshape(-1).view(torch.uint8))
    if not all(is_real(tensor.dtype) or _is_integer(tensor.dtype) for tensor in (base, tuned)):
        return True  # complex or packed numbers cannot be compared with another dtype
    return bool((base.to(torch.float64) != tuned.to(torch.float64)).any())


def uncovered_changes(pair: CheckpointPair) -> dict[str, float]:
    """Changed tensors of the compared parts other than Linear and convolution weights, such as biases and norms.

    Returns:
        ‖Δ‖ by key.

    Raises:
        NonFiniteError: NaN or Inf among them.
    """
    norms = {key: pair.change(key, _CPU).delta_norm for key in pair.others}
    return {key: norm for key, norm in norms.items() if norm > 0}


def missing_keys(lacking: Checkpoint, having: Checkpoint, keys: Sequence[str]) -> Finding:
    """The finding for keys that one side lacks."""
    return _finding(
        "lora.missing_keys",
        f"{lacking.path} lacks {counted(len(keys), 'tensor')} that {having.path} has; left out: {first_few(keys, _MAX_NAMED)}.",
        keys,
        "Check that both are complete checkpoints of the same architecture.",
        lacking=str(lacking.path),
    )


def unread_keys(checkpoint: Checkpoint) -> list[Finding]:
    """The finding for a file's keys that cannot be compared: types that PyTorch lacks, keys missing in an index."""
    keys = [key for key, reason in checkpoint.skipped.items() if reason != LEFT_OUT_REASON]
    if not keys:
        return []
    return [
        _finding(
            "lora.unread_keys",
            f"{checkpoint.path} holds {counted(len(keys), 'tensor')} that are not compared: {first_few(keys, _MAX_NAMED)} "
            f"({checkpoint.skipped[keys[0]]}).",
            keys,
            "Convert them to a common type, or repair the index, if they belong to the model.",
            file=str(checkpoint.path),
        )
    ]


def changed_shapes(base: Checkpoint, tuned: Checkpoint, keys: Sequence[str]) -> Finding:
    """The finding for tensors whose shapes differ."""
    first = f"{keys[0]} is {base.info(keys[0]).shape} in the base and {tuned.info(keys[0]).shape} in the tuned model"
    return _finding(
        "lora.shapes_changed",
        f"{counted(len(keys), 'tensor')} changed shape ({first}); left out: {first_few(keys, _MAX_NAMED)}.",
        keys,
        "A LoRA cannot change a shape: take these tensors from the tuned model.",
    )


def mixed_dtypes(base: Checkpoint, tuned: Checkpoint, keys: Sequence[str], *, skipped: bool) -> Finding:
    """The finding for tensors that the two files store in different dtypes."""
    first = keys[0]
    dtypes = [str(side.info(first).dtype).removeprefix("torch.") for side in (base, tuned)]
    effect = (
        f"left out: {first_few(keys, _MAX_NAMED)}"
        if skipped
        else "the change includes the rounding of the narrower one"
    )
    return _finding(
        "lora.mixed_dtypes",
        f"The models store {counted(len(keys), 'tensor')} in different dtypes ({first}: {dtypes[0]} in "
        f"the base, {dtypes[1]} in the tuned model): {effect}.",
        keys,
        "Use two checkpoints of one dtype if you have them.",
        key=first,
        base_dtype=dtypes[0],
        tuned_dtype=dtypes[1],
    )


def dequantised(side: Checkpoint, role: str, keys: Sequence[str]) -> Finding:
    """The finding for tensors that are quantised in the file and compared dequantised."""
    how = ", ".join(dict.fromkeys(side.dequantised[key] for key in keys))
    return _finding(
        "lora.dequantised",
        f"{counted(len(keys), 'tensor')} of the {role} {'is' if len(keys) == 1 else 'are'} quantised "
        f"({how}) and dequantised here, so the change includes the quantisation's rounding.",
        keys,
        "Use the checkpoint that it was quantised from if you have it.",
        side=role,
        how=how,
    )


def _finding(id: str, message: str, keys: Sequence[str], advice: str, **evidence: str) -> Finding:
    return Finding(id, "warning", message, {"tensors": len(keys), **evidence, "keys": " ".join(keys)}, advice)
