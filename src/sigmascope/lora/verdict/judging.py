"""Judge a LoRA file by a model: what matches, what does not and why, what is damaged."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Final

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.keys import ALPHA
from sigmascope.lora.formats.unread_kinds import open_any
from sigmascope.lora.models.layout import Shapes
from sigmascope.lora.verdict.file_family import file_family
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.lora.verdict.model_shapes import Model, shapes_of
from sigmascope.lora.verdict.module_verdict import ModuleVerdict
from sigmascope.lora.verdict.placing import Placing, place
from sigmascope.lora.verdict.reasons import Reasons, part_of
from sigmascope.lora.verdict.verdict_findings import findings_of, unreadable
from sigmascope.probes.reading import describe

_BIAS: Final = ".bias"


def judge_lora(lora: str | PathLike[str] | LoraFile, model: Model, *, values: bool = True) -> LoraVerdict:
    """Say of every module of a LoRA whether it changes a weight of a model, and if not, why not.

    Names are understood in every format (kohya, PEFT, native, ComfyUI) and naming of the known families, so a
    module that is unmatched here matches in no loader. A loader may still know fewer names than this does: what is
    known of that is among the findings.

    Args:
        lora: A file of any format, or a LoRA in memory.
        model: The model's shapes by key, or an `nn.Module`, an open `Checkpoint`, a diffusers pipeline, or
            modules by the names that their parts have there (`{"unet": …, "text_encoder": …}`; ComfyUI's model
            and CLIP under any names). Only shapes are looked at.
        values: Also read the LoRA's numbers: NaN and Inf, alphas and strength.

    Returns:
        The verdict. Nothing is raised: a file or model that cannot be read is a verdict with an `error`.
    """
    path = str(lora.path) if isinstance(lora, LoraFile) and lora.path else None
    try:
        if not isinstance(lora, LoraFile):
            path = str(lora)
        with _opened(lora) as (file, keys):
            return _judged(file, keys, shapes_of(model), path, values)
    except SigmascopeError as error:
        return LoraVerdict(path, error=str(error), findings=(unreadable(error),))
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return LoraVerdict(path, error=describe(error), findings=(unreadable(error),))


@contextmanager
def _opened(lora: str | PathLike[str] | LoraFile) -> Iterator[tuple[LoraFile, tuple[str, ...]]]:
    """The LoRA with its modules still in the file, and the file's keys."""
    if isinstance(lora, LoraFile):
        yield lora, ()
        return
    with open_checkpoint(Path(lora)) as checkpoint:
        keys = tuple(checkpoint.keys())
    with open_any(Path(lora)) as file:
        yield file, keys


def _judged(
    lora: LoraFile, keys: tuple[str, ...], shapes: Shapes, path: str | None, values: bool
) -> LoraVerdict:
    placing, family = place(lora, shapes), file_family(lora)
    reasons = Reasons(lora, placing, family)
    modules = tuple(_module(lora, name, placing, shapes, reasons) for name in lora.names)
    if values:
        modules = tuple(_with_values(lora, module, keys) for module in modules)
    known = placing.layout.family
    verdict = LoraVerdict(
        path=path,
        format=lora.format,
        file_family=family.family,
        family_evidence=family.evidence,
        model_family=None if known == "unknown" else known,
        model_naming=placing.layout.naming,
        modules=modules,
        unused_keys=lora.unused_keys,
        unavailable={} if values else {"values": "not asked for: numbers were not read"},
    )
    return replace(verdict, findings=findings_of(verdict, keys))


def _module(lora: LoraFile, name: str, placing: Placing, shapes: Shapes, reasons: Reasons) -> ModuleVerdict:
    facts = lora.facts_of(name)
    module = ModuleVerdict(name, facts.kind, facts.weight_shape, part_of(name), facts.rank)
    keys = placing.keys.get(name, ())
    if keys and name not in placing.misfits:
        return replace(module, layers=keys, model_shape=tuple(shapes[keys[0]]))
    why = reasons.explain(name)
    misfit = placing.misfits.get(name)
    return replace(
        module,
        model_shape=None if misfit is None else misfit.model,
        reason=why.reason,
        detail=why.detail,
        nearest=reasons.nearest(name),
    )


def _with_values(lora: LoraFile, module: ModuleVerdict, keys: tuple[str, ...]) -> ModuleVerdict:
    """The module with what its numbers say; one that cannot be read keeps what its header says."""
    name = module.name
    try:
        change = lora.modules[name] if name in lora.modules else lora.changes[name]
        if not isinstance(change, LoraFactors):
            norm = None if getattr(change, "needs_base", False) else change.frobenius_norm()
            return replace(module, finite=True, norm=norm)
        norm = change.frobenius_norm()
    except NonFiniteError:
        return replace(module, finite=False)
    has_alpha = f"{name}.{ALPHA}" in keys or (not keys and change.alpha != change.rank)
    stated = change.alpha if has_alpha or change.scale != 1.0 else None
    return replace(module, finite=True, norm=norm, alpha=stated, scale=change.scale)
