"""The verdict on a LoRA file and a model: module by module, with findings and advice.

A `LoraVerdict` says for each module whether it changes a weight (`ModuleVerdict`), and `MISMATCHES` lists every reason
why one does not. `verdict_findings` sums it up with numbers and advice. `loader_findings` adds what diffusers 0.42 and
ComfyUI 0.3 to 0.18 do with a file that is correct in itself.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

from sigmascope.errors import SigmascopeError
from sigmascope.lora.effect import BlockEffect, Effect, by_block
from sigmascope.lora.families import family_named
from sigmascope.lora.module_names import title_of
from sigmascope.records.run import Finding, Severity
from sigmascope.units import counted, first_few

_NOT_READ: Final = "the model's weights were not read"
Reason = Literal[
    "other_architecture",
    "other_shape",
    "transposed",
    "text_encoder_missing",
    "part_missing",
    "prefix",
    "block_missing",
    "twice",
    "unknown",
]


class MismatchRow(NamedTuple):
    """A reason why modules change nothing.

    Attributes:
        severity: How bad it is.
        one: What a message says after "1 module".
        many: What a message says after "3 modules".
        advice: What to do.
    """

    severity: Severity
    one: str
    many: str
    advice: str

    def words(self, modules: int) -> str:
        """The words of a message after this many modules."""
        return self.one if modules == 1 else self.many


MISMATCHES: Final[dict[Reason, MismatchRow]] = {
    "other_architecture": MismatchRow(
        "error",
        "is for another architecture",
        "are for another architecture",
        "Use the LoRA with the model family that it was made for.",
    ),
    "other_shape": MismatchRow(
        "error",
        "is for a weight of another shape",
        "are for weights of another shape",
        "Use the LoRA with the model that it was made for: this one has other widths.",
    ),
    "transposed": MismatchRow(
        "error",
        "has transposed factors",
        "have transposed factors",
        "Make the file again, with up (out, rank) and down (rank, in).",
    ),
    "text_encoder_missing": MismatchRow(
        "warning",
        "is for a text encoder that was not given",
        "are for a text encoder that was not given",
        "Pass the text encoder too, or accept that the LoRA acts on the denoiser alone.",
    ),
    "part_missing": MismatchRow(
        "warning",
        "is for a part of the model that was not given",
        "are for a part of the model that was not given",
        "Pass that part of the model too.",
    ),
    "prefix": MismatchRow(
        "error",
        "has an unknown prefix before a name that the model has",
        "have an unknown prefix before a name that the model has",
        "Rename the keys without the prefix, or tell the loader the prefix if it takes one.",
    ),
    "block_missing": MismatchRow(
        "error",
        "is for a block that the model does not have",
        "are for blocks that the model does not have",
        "Use the LoRA with the model that it was made for: this one has fewer or other blocks.",
    ),
    "twice": MismatchRow(
        "error",
        "is for a layer that another module of the file already changes",
        "are for layers that another module of the file already changes",
        "Remove one of the two: a loader may apply both.",
    ),
    "unknown": MismatchRow(
        "error",
        "has a name that the model does not have",
        "have names that the model does not have",
        "Compare the names with the model's nearest ones, and convert the file if only the naming differs.",
    ),
}
"""In the order in which findings name them."""

_MAX_NAMED: Final = 3
_SEVERITY_ORDER: Final = ("critical", "error", "warning", "info")
# Ends of keys that loaders treat specially.
_DIFFERENCE_ENDS: Final = (".diff", ".diff_b", ".set_weight", ".w_norm", ".b_norm")
_UP_BIAS_ENDS: Final = (".lora_B.bias", ".lora_up.bias")


@dataclass(frozen=True, slots=True)
class ModuleVerdict:
    """Whether, and how, one module of a LoRA file fits a model.

    Attributes:
        name: As the file has it.
        kind: `lora` for plain factors, else `loha`, `lokr`, `tucker`, `dora`, `diff`, `set`, `oft`, `boft` or `glora`.
        shape: Shape of the weight that it is made for; () if its tensors do not show it.
        part: The part of the model in its name: `denoiser`, `text_encoder`, …
        rank: Of its factors; None if it has none.
        alpha: As stored in the file; None if the file has none, and then the scale is 1.
        scale: The factor on up·down; None unless the factors are plain and were read.
        norm: ‖ΔW‖ at strength 1; None if it was not read, is not finite, or depends on the model's weight.
        layers: The model's weights that it changes: several if the module is fused and the model's layers are not.
        model_shape: The shape of the first of them.
        reason: Why it changes none; None if it changes one.
        detail: The same in words.
        nearest: The model's most similar names, if it changes none.
        finite: Whether all its numbers are finite; None if they were not read.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    part: str
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = None
    norm: float | None = None
    layers: tuple[str, ...] = ()
    model_shape: tuple[int, ...] | None = None
    reason: Reason | None = None
    detail: str | None = None
    nearest: tuple[str, ...] = ()
    finite: bool | None = None

    @property
    def matched(self) -> bool:
        """Whether it changes a weight of the model."""
        return self.reason is None

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        listed = {name: list(getattr(self, name)) for name in ("shape", "layers", "nearest")}
        model_shape = None if self.model_shape is None else list(self.model_shape)
        return asdict(self) | listed | {"model_shape": model_shape, "matched": self.matched}


@dataclass(frozen=True, slots=True)
class LoraVerdict:
    """Whether a LoRA is for a model.

    Attributes:
        path: The file; None for a LoRA in memory.
        format: `native`, `kohya`, `peft` or `comfyui`; None if the file could not be read.
        file_family: The model family that the file is for, such as `sdxl`; None if it is not known.
        family_evidence: What shows the file's family.
        model_family: The model's family; None if it is not known.
        model_naming: How the model names its weights, as in `ModelLayout.naming`.
        modules: Every module of the file, in its order.
        unused_keys: Keys of the file that belong to no module.
        error: Why the file or the model could not be read; then nothing else is known.
        findings: What is wrong or worth knowing, with advice, the worst first.
        unavailable: The reason for each fact that was not read.
    """

    path: str | None
    format: str | None = None
    file_family: str | None = None
    family_evidence: str = ""
    model_family: str | None = None
    model_naming: str = "unknown"
    modules: tuple[ModuleVerdict, ...] = ()
    unused_keys: tuple[str, ...] = ()
    error: str | None = None
    findings: tuple[Finding, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def matched(self) -> tuple[ModuleVerdict, ...]:
        """Modules that change a weight of the model."""
        return tuple(module for module in self.modules if module.matched)

    @property
    def unmatched(self) -> tuple[ModuleVerdict, ...]:
        """Modules that change no weight."""
        return tuple(module for module in self.modules if not module.matched)

    @property
    def fits(self) -> bool:
        """Whether there are modules, every one changes a weight, and none holds NaN or Inf."""
        return bool(self.modules) and not self.unmatched and not self.not_finite

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Modules that hold NaN or Inf."""
        return tuple(module.name for module in self.modules if module.finite is False)

    @property
    def changes_nothing(self) -> bool:
        """Whether modules match, and every change is known to be zero."""
        return bool(self.matched) and all(module.norm == 0.0 for module in self.matched)

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have each rank, by rising rank."""
        return dict(sorted(Counter(m.rank for m in self.modules if m.rank is not None).items()))

    @property
    def reasons(self) -> dict[Reason, int]:
        """How many modules are unmatched for each reason."""
        counts = Counter(module.reason for module in self.unmatched)
        return {reason: counts[reason] for reason in MISMATCHES if counts[reason]}

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """For each part of the model, how many modules there are and how many match."""
        parts: dict[str, dict[str, int]] = {}
        for module in self.modules:
            counts = parts.setdefault(module.part, {"matched": 0, "modules": 0})
            counts["matched"] += int(module.matched)
            counts["modules"] += 1
        return parts

    @property
    def blocks(self) -> tuple[BlockEffect, ...]:
        """The matching modules' strength by block, at LoRA strength 1, from the file alone."""
        effects = {
            module.layers[0]: Effect(module.norm, None, None, unavailable=_why_no_norm(module))
            for module in self.matched
        }
        return by_block(effects)

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON values, totals first."""
        return {
            "path": self.path,
            "format": self.format,
            "fits": self.fits,
            "error": self.error,
            "file_family": self.file_family,
            "family_evidence": self.family_evidence,
            "model_family": self.model_family,
            "model_naming": self.model_naming,
            "total_modules": len(self.modules),
            "matched_modules": len(self.matched),
            "unmatched_modules": len(self.unmatched),
            "reasons": dict(self.reasons),
            "parts": self.parts,
            "ranks": self.ranks,
            "not_finite": list(self.not_finite),
            "changes_nothing": self.changes_nothing,
            "unused_keys": list(self.unused_keys),
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [block.as_dict() for block in self.blocks],
            "modules": [module.as_dict() for module in self.modules],
            "unavailable": dict(self.unavailable),
        }


def _why_no_norm(module: ModuleVerdict) -> dict[str, str]:
    unread = {"weight_norm": _NOT_READ, "relative_change": _NOT_READ}
    if module.norm is not None:
        return unread
    if module.finite is False:
        return unread | {"delta_norm": "the module holds NaN or Inf"}
    if module.finite is None:
        return unread | {"delta_norm": "its numbers were not read"}
    return unread | {"delta_norm": f"what a {module.kind} change does depends on the model's weight"}


def verdict_findings(verdict: LoraVerdict, keys: Sequence[str]) -> tuple[Finding, ...]:
    """What is wrong with a LoRA on a model, the worst first.

    Args:
        verdict: With its modules.
        keys: Of the file.
    """
    findings = [
        *_matches_nothing(verdict),
        *_is_zero(verdict),
        *_by_reason(verdict),
        *_not_finite(verdict),
        *_unused(verdict),
        *loader_findings(verdict, keys),
    ]
    return tuple(sorted(findings, key=lambda finding: _SEVERITY_ORDER.index(finding.severity)))


def _matches_nothing(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.modules and not verdict.matched:
        reason = max(verdict.reasons, key=lambda reason: verdict.reasons[reason])
        yield Finding(
            "lora_matches_nothing",
            "critical",
            f"None of the {_modules(verdict)} changes a weight of the model: most {MISMATCHES[reason].many}.",
            {
                "modules": len(verdict.modules),
                "matched": 0,
                "file_family": verdict.file_family,
                "model_family": verdict.model_family,
            },
            MISMATCHES[reason].advice,
        )


def _is_zero(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.changes_nothing:
        yield Finding(
            "lora_is_zero",
            "warning",
            f"The LoRA changes nothing: all its changes are zero, in {_modules(verdict)}.",
            {"modules": len(verdict.modules), "matched": len(verdict.matched), "norm": 0.0},
            "Train it further or make it again: untrained factors are zero.",
        )


def _by_reason(verdict: LoraVerdict) -> Iterator[Finding]:
    for reason, count in verdict.reasons.items():
        modules = [module for module in verdict.unmatched if module.reason == reason]
        row = MISMATCHES[reason]
        yield Finding(
            f"lora_{reason}",
            row.severity,
            f"{count} of {_modules(verdict)} {row.words(count)}{_families(verdict, reason)}: {_first_modules(modules)}.",
            {
                "modules": count,
                "of": len(verdict.modules),
                "first": modules[0].name,
                "detail": modules[0].detail,
                "nearest": ", ".join(modules[0].nearest),
            },
            row.advice,
        )


def _families(verdict: LoraVerdict, reason: Reason) -> str:
    if reason != "other_architecture":
        return ""
    own = title_of(verdict.file_family) if verdict.file_family else "a U-Net"
    return f" (the file is for {own} by {verdict.family_evidence}, the model is {title_of(verdict.model_family)})"


def _not_finite(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.not_finite:
        modules = [module for module in verdict.modules if module.finite is False]
        yield Finding(
            "lora_not_finite",
            "error",
            f"{len(modules)} of {_modules(verdict)} {'holds' if len(modules) == 1 else 'hold'} NaN or Inf: {_first_modules(modules)}.",
            {"modules": len(modules), "first": modules[0].name},
            "Make the file again, in bf16 or float if it was fp16. As it is, it makes images black.",
        )


def _unused(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.unused_keys:
        shown = first_few(verdict.unused_keys, _MAX_NAMED)
        yield Finding(
            "lora_unused_keys",
            "info",
            f"{counted(len(verdict.unused_keys), 'key of the file belongs', 'keys of the file belong')} to no module: {shown}.",
            {"keys": len(verdict.unused_keys), "first": verdict.unused_keys[0]},
        )


def _modules(verdict: LoraVerdict) -> str:
    return counted(len(verdict.modules), "module")


def _first_modules(modules: Sequence[ModuleVerdict]) -> str:
    first = f"{modules[0].name} ({modules[0].detail})" if modules[0].detail else modules[0].name
    return first_few([first, *(module.name for module in modules[1:])], _MAX_NAMED)


def loader_findings(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    """What to know before loading the file in diffusers or ComfyUI.

    Args:
        verdict: With its modules.
        keys: Of the file.
    """
    yield from _ignored_alphas(verdict, keys)
    yield from _kohya_names(verdict)
    yield from _comfyui_names(verdict, keys)
    yield from _differences(verdict, keys)
    yield from _half_of_attention(verdict)
    yield from _prefix(verdict)
    yield from _some_biases(verdict, keys)
    yield from _rotations(verdict)


_ALPHAS_IGNORED: Final = ("flux", "chroma")
"""Families whose loader in diffusers drops `.alpha` beside `lora_A`; the others' refuse the file because of it."""


def _ignored_alphas(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    alphas = [key for key in keys if key.endswith(".alpha")]
    if verdict.format != "peft" or not alphas:
        return
    scaled = [module for module in verdict.modules if module.scale not in (None, 1.0)]
    ignores = verdict.model_family in _ALPHAS_IGNORED
    consequence = (
        f", so {counted(len(scaled), 'module acts', 'modules act')} with another strength there"
        if scaled
        else ""
    )
    fate = f"ignores {{}}{consequence}" if ignores else "refuses the file because of {}"
    yield Finding(
        "lora_alpha_ignored",
        "warning" if scaled or not ignores else "info",
        f"diffusers {fate.format(counted(len(alphas), '.alpha tensor') + ' beside lora_A and lora_B')}.",
        {"alphas": len(alphas), "scaled": len(scaled), "first_scale": scaled[0].scale if scaled else None},
        "Convert the file (sigmascope lora convert), which puts the scale into the factors."
        if scaled or not ignores
        else None,
    )


def _kohya_names(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.format == "kohya":
        yield Finding(
            "lora_kohya_names",
            "info",
            "The file has kohya's names. diffusers reads them with a pipeline's load_lora_weights, not with a model's "
            "load_lora_adapter.",
            {"format": verdict.format},
            "Load it with the pipeline, or convert it to PEFT's format (sigmascope lora convert).",
        )


def _comfyui_names(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    """Diffusers renames `diffusion_model.` for most newer families, and loads nothing under that name for the
    others.
    """
    down = "lora_A" if any(".lora_A." in key for key in keys) else "lora_down"
    family = family_named(verdict.model_family)
    lost = [
        module
        for module in verdict.matched
        if family.loses("diffusers", "comfyui", module.name.removeprefix("diffusion_model."), down)
    ]
    if verdict.format == "comfyui" and lost:
        some = f"does not load {len(lost)} of {counted(len(verdict.matched), 'module')}"
        loads = "loads nothing" if len(lost) == len(verdict.matched) else some
        refusing = any(
            one.or_refused for one in family.lost if (one.host, one.format) == ("diffusers", "comfyui")
        )
        odd = next((key for key in keys if "lora" not in key), None) if refusing else None
        said = (
            f"diffusers {loads} of a file for {family.title} whose names begin with diffusion_model., and reports no error."
            if odd is None
            else f"diffusers refuses a file for {family.title} whose names begin with diffusion_model. and of which one, "
            f"such as {odd}, does not contain “lora”."
        )
        yield Finding(
            "lora_comfyui_names",
            "warning",
            said,
            {"modules": len(lost), "first": lost[0].name},
            "For diffusers, convert the file to PEFT's format (sigmascope lora convert).",
        )


def _differences(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    differences = [key for key in keys if key.endswith(_DIFFERENCE_ENDS)]
    if not differences:
        return
    fate = "drops them silently" if verdict.format == "peft" else "refuses the file because of them"
    yield Finding(
        "lora_whole_differences",
        "warning",
        f"{counted(len(differences), 'key holds a whole difference', 'keys hold whole differences')}, such as {differences[0]}: diffusers {fate}.",
        {"keys": len(differences), "first": differences[0]},
        "Load the file in ComfyUI, or merge it into the checkpoint (sigmascope lora merge).",
    )


def _half_of_attention(verdict: LoraVerdict) -> Iterator[Finding]:
    family = family_named(verdict.model_family)
    start = f"{family.component}."
    lost = [
        module
        for module in verdict.matched
        if module.name.startswith(start) and family.loses("comfyui", "peft", module.name.removeprefix(start))
    ]
    if verdict.format == "peft" and lost:
        yield Finding(
            "lora_comfyui_loses_attention",
            "warning",
            f"ComfyUI does not find {len(lost)} of the {_modules(verdict)} by these names: all attention "
            "projections. It only warns in its log.",
            {"modules": len(lost), "of": len(verdict.modules), "first": lost[0].name},
            "For ComfyUI, convert the file to kohya's or ComfyUI's format (sigmascope lora convert).",
        )


def _prefix(verdict: LoraVerdict) -> Iterator[Finding]:
    """`load_lora_adapter` expects the prefix `transformer`; with any other it only warns and loads nothing."""
    if verdict.format != "peft" or not verdict.modules:
        return
    starts = {module.name.partition(".")[0] for module in verdict.modules if module.part == "denoiser"}
    if starts and "transformer" not in starts:
        known = sorted(starts & {"unet", "denoiser", "diffusion_model"})
        argument = f'prefix="{known[0]}"' if known else "prefix=None"
        yield Finding(
            "lora_prefix",
            "info",
            f"diffusers' load_lora_adapter loads nothing from this file with its default prefix: it needs {argument}.",
            {"prefix": known[0] if known else None},
            f"Load it with the pipeline's load_lora_weights, or pass {argument} to load_lora_adapter.",
        )


def _some_biases(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    biases = sum(key.endswith(_UP_BIAS_ENDS) for key in keys)
    modules = sum(not module.name.endswith(".bias") for module in verdict.modules)
    if biases and biases != modules:
        yield Finding(
            "lora_some_biases",
            "warning",
            f"{biases} of {counted(modules, 'module')} {'has' if biases == 1 else 'have'} a lora_B bias. diffusers accepts such biases in all modules or in none.",
            {"biases": biases, "modules": modules},
            "Train or convert without lora_B biases, or with one in every module.",
        )


def _rotations(verdict: LoraVerdict) -> Iterator[Finding]:
    kinds = sorted({module.kind for module in verdict.modules} & {"oft", "boft", "glora"})
    if kinds:
        named = " and ".join({"oft": "OFT", "boft": "BOFT", "glora": "GLoRA"}[kind] for kind in kinds)
        yield Finding(
            "lora_comfyui_only",
            "warning",
            f"The file holds {named}, which ComfyUI applies and diffusers does not.",
            {"kinds": ", ".join(kinds)},
            "Load it in ComfyUI, or convert it to plain LoRA factors with the tool that made it.",
        )


def unreadable(error: Exception) -> Finding:
    """The finding for a file or model that cannot be read."""
    message = error.message if isinstance(error, SigmascopeError) else str(error)
    hint = error.hint if isinstance(error, SigmascopeError) else None
    return Finding("lora_unreadable", "critical", message, {"error": type(error).__name__}, hint)
