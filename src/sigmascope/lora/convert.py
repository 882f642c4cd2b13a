"""Carry a LoRA file from one format to another, module by module and without loss.

Changes that the new format cannot hold are approximated by plain factors, if a rank is given; nothing else is cut. With
the model, changes that depend on its weights are formed of them first, and are whole differences without a rank.

The layer of each module follows from the model if one is given (`named_by_model`), otherwise from the LoRA's own names
and header (`named_by_itself`).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.adapters import Adapter, DiffChange, WeightChange, form_delta
from sigmascope.lora.alignment import align, layout_for, of_first_denoiser, weights_of
from sigmascope.lora.budget import StorageCost
from sigmascope.lora.compatibility import by_reason, energy_of, missing_in_variant, unmatched_reasons
from sigmascope.lora.decompose import FormedChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import (
    UNET_FAMILIES,
    ModelLayout,
    Part,
    UnetBlocks,
    family_misfit,
    family_named,
    layout_of,
)
from sigmascope.lora.file import (
    LoraFile,
    check_target,
    is_of_diffusers,
    kept_metadata,
    refuse_files,
    refuse_inputs,
    require_model,
)
from sigmascope.lora.file_family import file_family, layout_as, nearest_family, title_of, told_by_lora
from sigmascope.lora.file_verdict import variant_finding
from sigmascope.lora.formats import LoraFormat, format_named
from sigmascope.lora.kinds import NEEDS_BASE
from sigmascope.lora.kinds.fused import PartOfFused, SwappedHalves
from sigmascope.lora.layer_names import (
    blocks_of_model,
    is_layer,
    is_linear,
    is_unet_layer,
    renamed,
    unet_kernel,
)
from sigmascope.lora.linalg import matrix_shape
from sigmascope.lora.loadable import WrittenLoads
from sigmascope.lora.module_names import ENCODER_PREFIXES, ParsedNames, layer_twice, parse_name, parse_names
from sigmascope.lora.ranks import FixedRank, RankRules, require_rank
from sigmascope.lora.reader import open_lora
from sigmascope.lora.resize import (
    Metrics,
    RankPlan,
    ResizedModule,
    Resizer,
    form_change,
    relative_error,
    weighted_error,
)
from sigmascope.lora.statistics import RIDGE
from sigmascope.lora.writer import LoraWriter, holds, storage_dtype
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding
from sigmascope.units import first_few

__all__ = ["ConversionReport", "LeftOut", "convert_lora"]

_TARGET_ARGUMENT: Final = "OUT"

_BIAS: Final = ".bias"
_WEIGHT: Final = ".weight"
_NUMBERED: Final = re.compile(r"(?:\w+\.)?\d+")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A module that is not in the new file.

    Attributes:
        name: As in the old file.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source: The file that was read.
        target: The file that was written.
        source_format: Of the file that was read.
        format: Of the file that was written.
        family: Of the model that the LoRA is for; `unknown` where it does not matter.
        family_doubt: Why that family is a guess, by the LoRA alone; None if it is certain, given, or told by the model.
        modules: Modules of plain factors in the new file. Fused ones may be fewer or more than before.
        changes: Changes of other kinds there.
        widened: Modules whose up factor is float32 now, because their scale would have rounded it.
        left_out: What is only in the old file, including keys that belong to no module.
        not_in_variant: Those modules of `left_out` that are for layers which the model's family has and this variant does not.
        kept_energy: Share of ‖ΔW‖² that the modules of the new file had in the old one; None if that of one depends on the
            model's weights, or all changes are zero. What belongs to no module is not counted.
        unread: Keys of the old file that belong to no module.
        file_bytes: Size of the new file.
        factored: Changes that the format cannot hold and that became plain factors, with their errors.
        loads: What hosts make of the new file; see `loadable.loads_of_written`.
    """

    source: Path
    target: Path
    source_format: str
    format: str
    family: str
    modules: int
    changes: int
    widened: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    file_bytes: int
    factored: tuple[ResizedModule, ...] = ()
    family_doubt: str | None = None
    loads: WrittenLoads | None = None
    not_in_variant: tuple[str, ...] = ()
    kept_energy: float | None = 1.0
    unread: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was left out because the model has no place for it."""
        names = self.not_in_variant
        return (variant_finding(names, self.modules + self.changes + len(names)),) if names else ()

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − ΔW'‖ / ‖ΔW‖ over all of `factored`; None without any."""
        return relative_error(self.factored)

    @property
    def weighted_error(self) -> float | None:
        """The same error weighed by the statistics, which the factors minimise; None without statistics."""
        return weighted_error(self.factored)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        factored = [module.as_dict() for module in self.factored]
        paths = {"source": str(self.source), "target": str(self.target)}
        bare = asdict(replace(self, factored=(), loads=None))
        errors = {"relative_error": self.relative_error, "weighted_error": self.weighted_error}
        loads = None if self.loads is None else self.loads.as_dict()
        found = [asdict(finding) for finding in self.findings]
        return bare | paths | errors | {"factored": factored, "loads": loads, "findings": found}


def convert_lora(
    source: str | PathLike[str],
    target: str | PathLike[str],
    format: str,
    *,
    model: str | PathLike[str] | None = None,
    family: str | None = None,
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    drop_unsupported: bool = False,
    rank: int | None = None,
    statistics: str | PathLike[str] | None = None,
    ridge: float = RIDGE,
    progress: Progress = no_progress,
) -> ConversionReport:
    """Write a LoRA file in another format.

    One module is in memory at a time, or a few if they are cut. Factors keep their dtype; alpha becomes the rank, and
    the scale goes into the up factor, which becomes float32 if its own dtype would round it. The header keeps what is
    still true.

    Args:
        source: The file to read, in any format.
        target: The `.safetensors` file to write or replace.
        format: "native", "kohya", "peft" or "comfyui".
        model: A checkpoint that the LoRA is for: its layers then say what a flattened name means, and native names
            are its own. Changes that depend on the weight (OFT, HRA, …) and that the format cannot hold are formed of it.
        family: Of the model, where neither it nor the LoRA's header and names tell; see `ModelLayout.family`. Beside
            `model`, it says whose names these are, and the model has the shapes.
        prefix: Before the denoiser's names in PEFT's and native format, "" for none.
        dtype: To store factors in; their own when left out.
        drop_unsupported: Leave out what the format cannot hold or has no name for, and say so in the report. Modules for layers
            that the model's family has and this variant does not are left out, and said so, in any case.
        rank: Of the plain factors that changes become where the format cannot hold them: LoHa, LoKr and whole
            differences of weights in PEFT's, and with the model what depends on its weights; 9999 keeps everything.
        statistics: A file of `sigmascope.lora.statistics` for the LoRA's model: the factors then minimise the error of
            the layers' outputs instead of that of their weights. A fused layer that the format divides is cut as a
            whole, by its weights.
        ridge: Weight of directions that the statistics never met, as a share of the mean.
        progress: Told after each module.

    Returns:
        What was written, and what was left out.

    Raises:
        LoraFormatError: The source is not understood, a name cannot be carried over, or the format cannot hold a
            change; each with its name.
        ConfigError: The target is an input, a folder or not a `.safetensors` file, an argument has no effect, or the
            family or the kernel of a convolution is not known.
        ModelMismatchError: A change does not fit the model's weight, or the statistics are of another model.
        CheckpointError: A file cannot be read.
        NonFiniteError: A tensor holds NaN or Inf, or does so in `dtype`.
        WriteError: The target cannot be written; it is as it was.
    """
    wanted, path = format_named(format), Path(target)
    check_target(path, _TARGET_ARGUMENT)
    _refuse_without_effect(wanted.name, model, prefix)
    if rank is not None:
        require_rank("--rank", rank)
    elif statistics is not None:
        raise ConfigError(
            "--statistics only matter where ranks are cut, and nothing is cut.",
            hint="Add --rank, for changes that peft files cannot hold.",
        )
    with ExitStack() as opened:
        lora = opened.enter_context(open_lora(Path(source), keep_float8=True))
        base = None if model is None else opened.enter_context(open_checkpoint(model))
        with open_checkpoint(source) as checkpoint:
            refuse_inputs(path, checkpoint, flag=_TARGET_ARGUMENT)
        if base is not None:
            require_model(base)
            refuse_inputs(path, base, flag=_TARGET_ARGUMENT)
        if statistics is not None:
            refuse_files(path, [Path(statistics)], _TARGET_ARGUMENT)
        if wanted.name != "native":
            _refuse_numbers(lora, base)
        if base is None:
            named = named_by_itself(lora, wanted.name, family=family, prefix=prefix)
        else:
            named = _of_model(lora, wanted.name, base, family)
        left_out = list(named.left_out)
        if (left_out and not drop_unsupported) or not named.layers:
            raise _no_names(lora, [*left_out, *named.not_in_variant])
        factors = None
        if rank is not None:
            factors = _Factors.of(named, wanted, rank, dtype or _own_dtype(source), statistics, ridge)
        cut: list[ResizedModule] = []

        @contextmanager
        def leaving_out(name: str) -> Iterator[None]:
            try:
                yield
            except LoraFormatError as error:
                if not drop_unsupported:
                    raise
                left_out.append(LeftOut(name, error.message))

        with LoraWriter(
            path,
            format=wanted.name,
            layout=named.layout,
            metadata={} if factors is None else factors.metadata,
            inherited=kept_metadata(lora.metadata),
            expected=named.layers.values(),
            blocks=named.blocks,
            dtype=dtype,
            prefix=prefix,
        ) as writer:
            whole = [name for name in named.layers if factors is None or name not in factors.shapes]
            for done, name in enumerate(whole, start=1):
                with leaving_out(name):
                    if factors is None:
                        _require_held(wanted, named, name)
                    _write(writer, named, name)
                progress(done, len(named.layers), name)
            made = () if factors is None else factors.run()
            for done, (module, factored) in enumerate(made, start=len(whole) + 1):
                with leaving_out(module.name):
                    if factored is None:
                        left_out.append(LeftOut(module.name, "it changes nothing"))
                    else:
                        writer.write(named.layers[module.name], factored)
                        cut.append(module)
                progress(done, len(named.layers), module.name)
        left_out += named.not_in_variant
        kept_energy = _kept_energy(lora, {module.name for module in left_out} & {*lora.names})
        left_out += [LeftOut(key, "belongs to no module") for key in lora.unused_keys]
    return ConversionReport(
        source=Path(source),
        target=path,
        source_format=lora.format,
        format=wanted.name,
        family=named.layout.family,
        modules=writer.tally.modules,
        changes=writer.tally.changes,
        widened=tuple(writer.widened),
        left_out=tuple(left_out),
        file_bytes=path.stat().st_size,
        factored=tuple(cut),
        family_doubt=named.family_doubt,
        loads=writer.loads,
        not_in_variant=tuple(module.name for module in named.not_in_variant),
        kept_energy=kept_energy,
        unread=lora.unused_keys,
    )


def _kept_energy(lora: LoraFile, left_out: Collection[str]) -> float | None:
    if not left_out:
        return 1.0
    lost, kept = (
        energy_of(lora, [name for name in lora.names if (name in left_out) is dropped])
        for dropped in (True, False)
    )
    return None if lost is None or kept is None or lost + kept == 0.0 else kept / (lost + kept)


def _refuse_without_effect(format: str, model: str | PathLike[str] | None, prefix: str | None) -> None:
    if prefix is not None and (
        format not in {"peft", "native"} or (format == "native" and model is not None)
    ):
        whose = "the model's own" if format == "native" else f"those of {format} files"
        raise ConfigError(f"--prefix has no effect: the names are {whose}.", hint="Leave it out.")


def _own_dtype(source: str | PathLike[str]) -> torch.dtype:
    with open_checkpoint(source) as checkpoint:
        return storage_dtype(checkpoint)


@dataclass(frozen=True, slots=True)
class NamedLora:
    """A LoRA whose names are understood.

    Attributes:
        lora: Under its own names, or the model's.
        layers: The layer of each name; for a change of a bias, `<layer>.bias`.
        layout: Of the checkpoint that has these layers.
        left_out: Names in the file that are of no layer.
        blocks: Of the U-Net, if it is one.
        shapes: Of the model's weights, where it is given, by layer.
        family_doubt: As in `ConversionReport`.
        base: The model, open.
        not_in_variant: Names of layers that the model's family has and this variant does not.
    """

    lora: LoraFile
    layers: Mapping[str, str]
    layout: ModelLayout
    left_out: tuple[LeftOut, ...]
    blocks: UnetBlocks | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    family_doubt: str | None = None
    base: Checkpoint | None = None
    not_in_variant: tuple[LeftOut, ...] = ()

    def path_in_unet(self, name: str) -> str | None:
        """The path of a layer of a U-Net as diffusers has it; None of any other, and of rows of a fused one."""
        part, own = self.layout.split(self.layers[name])
        with suppress(LoraFormatError):  # that the writer tells
            path = renamed(own, part, self.layout, "diffusers", self.blocks)
            if part == "denoiser" and isinstance(path, str) and is_unet_layer(path, self.layout):
                return path
        return None

    def shape_in_layer(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a plain change with its layer's kernel, or without one, if that has as many numbers.

        Some files have matrices for convolutions, or kernels of 1×1 for matrices. PEFT refuses them.
        """
        shape, path = self.shapes.get(self.layers[name]), self.path_in_unet(name)
        whole = out, inner = matrix_shape(own)
        if shape is None and path is not None:
            side = unet_kernel(path, self.layout) or 0
            shape = (out, inner // side**2, side, side) if side and inner % side**2 == 0 else whole
        elif shape is None and self._is_linear(name):
            shape = whole
        if shape is None or len(shape) < len(whole) or matrix_shape(shape) != whole:
            return own
        return shape if own == whole or (shape == whole and prod(own[2:]) == 1) else own

    def _is_linear(self, name: str) -> bool:
        """Whether a layer outside of U-Nets is known to be a linear one."""
        part, own = self.layout.split(self.layers[name])
        family = family_named(self.layout.family)
        is_known = part == "denoiser" and self.layout.family != "unknown" and not family.is_unet
        return part.startswith("text_encoder") or (is_known and is_linear(own, family))

    def key_in_base(self, name: str) -> str | None:
        """The model's tensor that a change depends on; None if it depends on none, or the model has none or is not given."""
        if self.base is None or name in self.lora.modules or self.lora.kind_of(name) not in NEEDS_BASE:
            return None
        layer = self.layers[name]
        return next((key for key in (f"{layer}{_WEIGHT}", layer) if key in self.base), None)

    def change(self, name: str) -> WeightChange:
        """A change as it is stored, or the part of it that a layer has by itself."""
        change = self.lora.changes[name]
        shape = self.shapes.get(self.layers[name])
        return (
            change.shaped(shape)
            if isinstance(change, PartOfFused | SwappedHalves) and shape is not None
            else change
        )

    def formed(self, name: str, key: str) -> DiffChange:
        """A change that depends on a tensor of the model, as a whole difference."""
        assert self.base is not None
        weight, change = self.base.tensor(key), self.change(name)
        shaped = change.shaped(weight.shape) if isinstance(change, Adapter) else change
        return DiffChange({"diff": form_delta(name, shaped, weight)})


def _require_held(wanted: LoraFormat, named: NamedLora, name: str) -> None:
    """Refuse, by a LoraFormatError, a change that the format cannot hold and that could become plain factors."""
    kind = named.lora.kind_of(name)
    if kind in NEEDS_BASE or not _is_factorable(named, wanted, name):
        return
    others = "write kohya's or ComfyUI's format, " if not wanted.keys.holds_changes else ""
    what = (
        "by itself, since they have another matrix for it or with it"
        if wanted.keys.holds_changes
        else f"({kind})"
    )
    raise LoraFormatError(
        f"{named.layers[name]}: {wanted.name} files cannot hold such a change {what}.",
        hint=f"Make plain factors of it (--rank 32), {others}or leave it out (--drop_unsupported).",
    )


def _is_factorable(named: NamedLora, wanted: LoraFormat, name: str) -> bool:
    """Whether a layer's change is more than the format can hold, and can become plain factors at a loss."""
    if name in named.lora.modules or named.lora.kind_of(name) == "tucker":
        return False
    shape = named.lora.shape_of(name)
    if named.lora.kind_of(name) in NEEDS_BASE:
        key = named.key_in_base(name)
        if key is None or _holds_as_it_is(named, wanted, name):
            return False
        shape = named.shapes.get(named.layers[name], ())
    elif wanted.keys.holds_changes and _has_its_matrix(named, wanted, name):
        return False
    return is_layer(f"{named.layers[name]}{_WEIGHT}", shape)


def _holds_as_it_is(named: NamedLora, wanted: LoraFormat, name: str) -> bool:
    """Whether a format can hold a change, of the matrix that it is of."""
    return holds(wanted, named.change(name), named.layers[name]) and _has_its_matrix(named, wanted, name)


def _has_its_matrix(named: NamedLora, wanted: LoraFormat, name: str) -> bool:
    """Whether a format has the matrix that a change is of; differences, and DoRA of all parts, are divided and joined."""
    layer, kind = named.layers[name].removesuffix(_BIAS), named.lora.kind_of(name)
    try:
        placed = wanted.placement(layer, named.layout, blocks=named.blocks)
    except LoraFormatError:
        return True  # that it has no name for it, the writer tells
    if isinstance(placed, str) or placed.swapped or kind not in {"diff", "dora"}:
        return isinstance(placed, str)
    _, path = named.layout.split(layer)
    if kind == "diff" or path not in placed.parts:
        return True
    parts = {layer.removesuffix(path) + part for part in placed.parts}
    doras = {at for own, at in named.layers.items() if at in parts and named.lora.kind_of(own) == kind}
    return doras == parts


@dataclass(frozen=True)
class _Factors:
    """Changes that become plain factors.

    Attributes:
        named: The LoRA.
        shapes: Of the changed weights, by name.
        rank: To cut to.
        dtype: Of the factors.
        metrics: In which errors are least; Frobenius norm without.
    """

    named: NamedLora
    shapes: Mapping[str, tuple[int, ...]]
    rank: int
    dtype: torch.dtype
    metrics: Metrics | None

    @classmethod
    def of(
        cls,
        named: NamedLora,
        format: LoraFormat,
        rank: int,
        dtype: torch.dtype,
        statistics: str | PathLike[str] | None,
        ridge: float,
    ) -> "_Factors":
        """Of all that are not plain factors.

        Raises:
            ConfigError: There is none, or a convolution's kernel is not known.
            CheckpointError, ModelMismatchError: As of `Metrics.read`.
        """
        shapes, paths = {}, {}
        for name in filter(partial(_is_factorable, named, format), named.layers):
            layer = named.layers[name]
            shapes[name] = named.shapes.get(layer, named.lora.shape_of(name))
            path = None
            with suppress(LoraFormatError):  # that the writer tells
                path = format.placement(layer, named.layout, blocks=named.blocks)
            if named.layout.split(layer)[0] != "denoiser" or not isinstance(path, str):
                continue
            paths[name] = path
            in_unet = named.path_in_unet(name)
            side = None if in_unet is None else unet_kernel(in_unet, named.layout)
            is_told = layer in named.shapes or named.lora.kind_of(name) == "diff" or len(shapes[name]) > 2
            if side is not None and not is_told:
                out, inner = shapes[name]
                if inner % side**2:
                    raise ConfigError(
                        f"{name}: {inner} inputs do not fit a {side}×{side} convolution, which the layer's name implies.",
                        hint="Give the model: --model.",
                    )
                shapes[name] = (out, inner // side**2, side, side)
        kinds = {name: named.lora.kind_of(name) for name in named.layers if named.key_in_base(name) is None}
        waiting = next((name for name, kind in kinds.items() if kind in NEEDS_BASE), None)
        if not shapes and waiting is not None and not format.keys.holds_changes:
            raise ConfigError(
                f"--rank has no effect without the model: {waiting} has a change ({kinds[waiting]}) that depends on the "
                "model's weights.",
                hint="Give the model too: --model MODEL.",
            )
        if not shapes:
            raise ConfigError(
                "--rank has no effect: the file holds no LoHa, LoKr or whole difference of a weight."
                if not format.keys.holds_changes
                else f"--rank has no effect: {format.name} files hold every change of this file as it is.",
                hint="Leave it out, or change ranks with sigmascope lora resize.",
            )
        metrics = None
        if statistics is not None:
            metrics = Metrics.read(statistics, ridge, [named.lora], shapes, _rank_plan(rank), paths)
        return cls(named, shapes, rank, dtype, metrics)

    @property
    def metadata(self) -> dict[str, str]:
        """For the header."""
        return {} if self.metrics is None else self.metrics.metadata

    def run(self) -> Iterator[tuple[ResizedModule, LoraFactors | None]]:
        """As of `Resizer.run`."""
        resizer = Resizer(
            shapes=self.shapes,
            old_ranks=dict.fromkeys(self.shapes),
            load=self._load,
            plan=_rank_plan(self.rank),
            storage=StorageCost.of(self.dtype),
            has_metric=self.metrics is not None,
        )
        return resizer.run(no_progress)

    def _load(self, name: str, _: int) -> FormedChange:
        key = self.named.key_in_base(name)
        change = self.named.change(name) if key is None else self.named.formed(name, key)
        shaped = change.shaped(self.shapes[name]) if isinstance(change, Adapter) else change
        return form_change(name, shaped, self.dtype, self.metrics)


def _rank_plan(rank: int) -> RankPlan:
    return RankPlan(RankRules(FixedRank(rank, rank)))


def _of_model(lora: LoraFile, format: str, model: Checkpoint, family: str | None) -> NamedLora:
    named = named_by_model(lora, model, family)
    if format == "peft" and not is_of_diffusers(model.path):
        layers = _denoiser_shapes(model, named.layout)
        _require_family(model.path.name, format, named.layout, layers)
    return replace(named, base=model)


def _denoiser_shapes(checkpoint: Checkpoint, layout: ModelLayout) -> dict[str, tuple[int, ...]]:
    placed = {key: layout.split(key.removesuffix(_WEIGHT)) for key in checkpoint}
    return {path: checkpoint.info(key).shape for key, (part, path) in placed.items() if part == "denoiser"}


def _require_family(
    name: str, format: str, layout: ModelLayout, layers: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a format that names layers by their family if the family is not known.

    Args:
        name: Of what the layers are of.
        format: To be written.
        layout: As it was told.
        layers: Of the denoiser: shapes by path.

    Raises:
        ConfigError: With the nearest family.
    """
    if not layers or layout.family != "unknown" or layout.naming in format_named(format).writable:
        return
    raise ConfigError(
        f"{name}: its model family cannot be recognised, and {format} files name layers by it{nearest_family(layers)}.",
        hint="Give the model (--model) or its family (--family). If the family is not known, keep the model's own names: "
        "--format native.",
    )


def _refuse_numbers(lora: LoraFile, model: Checkpoint | None) -> None:
    """Refuse a file whose modules are only numbered, as Stable Cascade's own trainer writes them (ComfyUI's issue 3021).

    Raises:
        LoraFormatError: Nothing in the file says which layer each is for, and the model has no layers of these names.
    """
    names = [lora.stored_names.get(name, name) for name in lora.names]
    lists = {name.rpartition(".")[0] for name in names if _NUMBERED.fullmatch(name)}
    if len(lists) != 1 or not all(map(_NUMBERED.fullmatch, names)):
        return
    if parse_names(lora).layout.family != "unknown":
        return
    if model is not None and any(f"{name}{_WEIGHT}" in model for name in names):
        return
    raise LoraFormatError(
        f"{lora}: its modules have only numbers ({first_few(names, 3)}): the file does not say which layers they are for.",
        hint="Convert it with the tool that trained it: only its list of the layers that it trained tells which layer has "
        "which number. No model and no family can. Stable Cascade's own trainer writes such files, of which ComfyUI loads nothing.",
    )


def _no_names(lora: LoraFile, left_out: list[LeftOut]) -> LoraFormatError:
    return LoraFormatError(
        f"{lora}: {len(left_out)} of {len(lora.names)} names cannot be carried over: "
        f"{by_reason({module.name: module.reason for module in left_out})}.",
        hint="Give the model that the LoRA is for (--model), or leave these out (--drop_unsupported).",
    )


def _write(writer: LoraWriter, named: NamedLora, name: str) -> None:
    """Write a change as it is stored, or, where only the model tells it in this format, as a whole difference."""
    layer = named.layers[name]
    if name in named.lora.modules:
        factors = named.lora.modules[name]
        writer.write(layer, replace(factors, weight_shape=named.shape_in_layer(name, factors.weight_shape)))
        return
    key = named.key_in_base(name)
    if key is None and named.base is not None and named.lora.kind_of(name) == "ia3" and layer.endswith(_BIAS):
        return  # it scales a bias, and the layer has none
    change = named.change(name)
    if key is not None and not _holds_as_it_is(named, writer.format, name):
        change = named.formed(name, key)
    writer.write_change(layer, change)


def named_by_model(lora: LoraFile, checkpoint: Checkpoint, family: str | None = None) -> NamedLora:
    """Interpret a LoRA's names with the help of its model.

    Args:
        lora: In any format.
        checkpoint: The model.
        family: The model's; by default it is told by the model, or else by the LoRA.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one layer.
        ConfigError: The model is not of that family.
    """
    shapes = {key: checkpoint.info(key).shape for key in checkpoint.keys()}  # noqa: SIM118 - not a dict
    layers = tuple(key.removesuffix(_WEIGHT) for key in shapes)
    layout = layout_of(shapes)
    if family is None and layout.family == "unknown" and parse_names(lora).layout.family != "unknown":
        told = told_by_lora(lora, layers, layout)  # as the conversion without the model does
        misfit = family_misfit(told.family, _denoiser_shapes(checkpoint, told))
        layout = told if misfit is None else layout
    elif family is not None:
        layout = layout_as(family, lora, dict(zip(layers, shapes.values(), strict=True)), layout)
    beside = _of_other_parts(lora, layout)
    if beside:
        layers += tuple(dict.fromkeys(beside.values()))
        prefixes = {part: start for part, start in ENCODER_PREFIXES.items() if part not in layout.prefixes}
        layout = replace(layout, prefixes={**layout.prefixes, **prefixes})
    seen = layout_for(lora, layout, checkpoint.path)
    aligned = align(lora, layers, seen, weights=weights_of(checkpoint))
    reasons = unmatched_reasons(lora, aligned.unmatched, shapes, checkpoint.path)
    lacking = missing_in_variant(reasons)
    none_such = f"{checkpoint.path.name} has no such layer"
    left_out = tuple(
        LeftOut(name, why.detail if why.reason == "base_incomplete" else none_such)
        for name, why in reasons.items()
        if name not in lacking
    )
    not_in_variant = tuple(
        LeftOut(name, f"{none_such}, other {title_of(layout.family)} models do") for name in lacking
    )
    own = {name: name for name in aligned.lora.names}
    of_layers = {key.removesuffix(_WEIGHT): shape for key, shape in shapes.items() if key.endswith(_WEIGHT)}
    return NamedLora(
        aligned.lora,
        own,
        layout,
        left_out,
        blocks_of_model(layers, layout),
        of_layers,
        not_in_variant=not_in_variant,
    )


def _of_other_parts(lora: LoraFile, layout: ModelLayout) -> dict[str, str]:
    """The layers of modules for text encoders that the model does not have: their names need no model."""
    without = {part for part in ENCODER_PREFIXES if part not in layout.prefixes}
    beside = [name for name in lora.names if {*parse_name(name.removesuffix(_BIAS)).parts[:1]} & without]
    if not beside or len(without) < len(ENCODER_PREFIXES) or "denoiser" not in layout.prefixes:
        return {}
    parsed = parse_names(lora.only(beside), None if layout.family == "unknown" else layout.family)
    return {name: layer.removesuffix(_BIAS) for name, layer in parsed.layers.items()}


def named_by_itself(
    lora: LoraFile, format: str, *, family: str | None = None, prefix: str | None = None
) -> NamedLora:
    """Interpret a LoRA's names by themselves and by its header.

    Args:
        lora: In any format.
        format: The format that it will be written in.
        family: The model's family, if nothing else shows it.
        prefix: Before the denoiser's layers in native format.

    Raises:
        LoraFormatError: The names contradict each other.
        ConfigError: The format names layers by their family, which is not known.
    """
    if (
        format != "native"
    ):  # hosts' files are for one denoiser: diffusers is told to load one into `transformer_2`
        lora = of_first_denoiser(lora)
    names = parse_names(lora, family)
    _refuse_twice(lora, names.layers)
    layout = names.layout
    placed = ((name, *layout.split(layer)) for name, layer in names.layers.items())
    denoiser = {path: lora.shape_of(name) for name, part, path in placed if part == "denoiser"}
    _require_family(str(lora), format, layout, denoiser)
    left_out = tuple(LeftOut(name, "could be several paths") for name in names.unknown)
    told = file_family(lora)
    doubt = told.doubt if family is None and told.family == layout.family else None
    if family is None and told.family is None and told.is_unet:
        doubt = f"the file has {told.evidence}"
    if format != "native":
        return NamedLora(lora, names.layers, layout, left_out, names.blocks, family_doubt=doubt)
    native = _native_layout(layout, prefix)
    layers = {name: _native_layer(layer, names, native) for name, layer in names.layers.items()}
    return NamedLora(lora, layers, native, left_out, names.blocks, family_doubt=doubt)


def _refuse_twice(lora: LoraFile, layers: Mapping[str, str]) -> None:
    taken: dict[str, str] = {}
    for name, layer in layers.items():
        if taken.setdefault(layer, name) != name:
            raise layer_twice(lora, taken[layer], name, layer)


def _native_layout(layout: ModelLayout, prefix: str | None) -> ModelLayout:
    """Where a checkpoint of that family has its layers: an LBM's denoiser, or a component of a diffusers folder."""
    is_unet = layout.family in UNET_FAMILIES
    if prefix is None:
        prefix = (
            "denoiser" if is_unet else "transformer" if layout.naming == "diffusers" else "diffusion_model"
        )
    start = f"{prefix}." if prefix else ""
    prefixes: dict[Part, str] = {**layout.prefixes, "denoiser": start}
    return replace(layout, naming="diffusers" if is_unet else layout.naming, prefixes=prefixes)


def _native_layer(layer: str, names: ParsedNames, native: ModelLayout) -> str:
    module = layer.removesuffix(_BIAS)
    part, path = names.layout.split(module)
    if part == "denoiser" and native.family in UNET_FAMILIES:
        path = str(renamed(path, part, names.layout, "diffusers", names.blocks))
    return native.prefixes.get(part, "") + path + layer[len(module) :]
