"""The verdict on a LoRA file and a model: module by module, with findings and advice.

A `LoraVerdict` says for each module whether it changes a weight (`ModuleVerdict`). `verdict_findings` sums it up with
numbers and advice. `loader_findings` adds what diffusers 0.42 and ComfyUI 0.3 to 0.33 do with a file that is correct in
itself. The words are those of `sigmascope.lora.verdict`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import takewhile
from typing import Any, Final

from sigmascope.lora.effect import BlockEffect, Effect, by_block
from sigmascope.lora.families import family_named
from sigmascope.lora.file_family import title_of
from sigmascope.lora.formats import DORA
from sigmascope.lora.host_findings import kind_unread
from sigmascope.lora.hosts import IN_NO_HOST, PEFT_START, ending_of, leaves_other_keys, may_read
from sigmascope.lora.module_names import is_of_controlnet
from sigmascope.lora.verdict import MISMATCHES, Reason, verdict_finding
from sigmascope.records.run import Finding
from sigmascope.units import counted, first_few

_NOT_READ: Final = "the model's weights were not read"
_MAX_NAMED: Final = 3
_SEVERITY_ORDER: Final = ("critical", "error", "warning", "info")
# Ends of keys that loaders treat specially.
_DIFFERENCE_ENDS: Final = (".diff", ".diff_b", ".set_weight", ".w_norm", ".b_norm")
_BIAS: Final = ".bias"
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
        values = {name: getattr(self, name) for name in _MODULE_FIELDS}
        return values | listed | {"model_shape": model_shape, "matched": self.matched}


_MODULE_FIELDS: Final = tuple(one.name for one in fields(ModuleVerdict))


@dataclass(frozen=True, slots=True)
class LoraVerdict:
    """Whether a LoRA is for a model.

    Attributes:
        path: The file; None for a LoRA in memory.
        format: `native`, `kohya`, `peft` or `comfyui`; None if the file could not be read.
        file_family: The model family that the file is for, such as `sdxl`; None if it is not known.
        family_evidence: What shows the file's family.
        family_doubt: Why that family is a guess; None if it is certain or not known.
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
    family_doubt: str | None = None
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
            "family_doubt": self.family_doubt,
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


_SAY_IT_ALL: Final = frozenset({"controlnet", "text_encoder_missing", "part_missing"})
"""Reasons of which a module's detail says no more than their words."""


def match_sentence(verdict: LoraVerdict, model: str) -> str:
    """How many modules match a model, and the reason of most that do not.

    Args:
        verdict: With its modules.
        model: The model's name.
    """
    matched, count = len(verdict.matched), len(verdict.modules)
    some = f"All {count} modules" if matched == count > 1 else f"{matched} of {counted(count, 'module')}"
    said = f"{some} of the LoRA {'matches' if matched == 1 else 'match'} {model}"
    if not verdict.unmatched:
        return f"{said}."
    reason, most = max(verdict.reasons.items(), key=lambda item: item[1])
    first = next(module for module in verdict.unmatched if module.reason == reason)
    others = len(verdict.unmatched) - most
    more = f"; {others} more {'does' if others == 1 else 'do'} not match for other reasons" if others else ""
    detail = "" if reason in _SAY_IT_ALL else first.detail
    why = _families(verdict, reason) or (f" ({detail})" if detail else "")
    return f"{said}: {most} {MISMATCHES[reason].words(most)}{why}{more}."


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
        *loader_findings(
            replace(verdict, modules=tuple(one for one in verdict.modules if one.reason != "broken")), keys
        ),
    ]
    return tuple(sorted(findings, key=lambda finding: _SEVERITY_ORDER.index(finding.severity)))


def _matches_nothing(verdict: LoraVerdict) -> Iterator[Finding]:
    if not verdict.modules or verdict.matched:
        return
    # A file of which modules are broken is likely to be wrong where its tensors can be read, too.
    most = max(verdict.reasons, key=lambda reason: verdict.reasons[reason])
    reason: Reason = "broken" if "broken" in verdict.reasons else most
    first = [module for module in verdict.unmatched if module.reason == reason][:1]
    families = _families(verdict, reason)
    yield verdict_finding(
        "lora_matches_nothing",
        {
            "modules": len(verdict.modules),
            "matched": 0,
            "file_family": verdict.file_family,
            "model_family": verdict.model_family,
            "reason": f"lora_{reason}",
        },
        modules=_modules(verdict),
        share="all" if len(verdict.reasons) == 1 else "most" if reason == most else "some",
        words=MISMATCHES[reason].many,
        families=families,
        first=first[0].name if families else _first_modules(first),
        advice=MISMATCHES[reason].advice,
    )


def _is_zero(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.changes_nothing:
        by_alpha = all(module.scale == 0.0 for module in verdict.matched)
        yield verdict_finding(
            "lora_alpha_zero" if by_alpha else "lora_is_zero",
            {"modules": len(verdict.modules), "matched": len(verdict.matched), "norm": 0.0},
            modules=_modules(verdict),
        )


def _by_reason(verdict: LoraVerdict) -> Iterator[Finding]:
    for reason, count in verdict.reasons.items():
        modules = [module for module in verdict.unmatched if module.reason == reason]
        yield verdict_finding(
            f"lora_{reason}",
            {
                "modules": count,
                "of": len(verdict.modules),
                "first": modules[0].name,
                "detail": modules[0].detail,
                "nearest": ", ".join(modules[0].nearest),
            },
            count=count,
            modules=_modules(verdict),
            words=MISMATCHES[reason].words(count),
            families=_families(verdict, reason),
            first=_first_modules(modules, said=_families(verdict, reason)),
        )


def variant_finding(names: Sequence[str], modules: int, file: object = None) -> Finding:
    """That modules are left out, as they are for layers which the model's family has and this variant does not.

    Args:
        names: Of these modules, at least one.
        modules: How many the LoRA has.
        file: The LoRA, where there are several.
    """
    return verdict_finding(
        "lora_layer_missing",
        {"modules": len(names), "of": modules, "first": names[0]},
        count=len(names),
        modules=counted(modules, "module") + ("" if file is None else f" of {file}"),
        words=MISMATCHES["layer_missing"].words(len(names)),
        families="",
        first=first_few(names, _MAX_NAMED),
    )


def _families(verdict: LoraVerdict, reason: Reason) -> str:
    details = (module.detail or "" for module in verdict.unmatched if module.reason == reason)
    if reason != "other_architecture" or not any("the file is for" in detail for detail in details):
        return ""
    own = title_of(verdict.file_family) if verdict.file_family else "a U-Net"
    return f" (the file is for {own} by {verdict.family_evidence}, the model is {title_of(verdict.model_family)})"


def _not_finite(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.not_finite:
        modules = [module for module in verdict.modules if module.finite is False]
        hold = "holds" if len(modules) == 1 else "hold"
        yield verdict_finding(
            "lora_not_finite",
            {"modules": len(modules), "first": modules[0].name},
            holders=f"{len(modules)} of {_modules(verdict)} {hold}",
            first=_first_modules(modules),
        )


def _unused(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.unused_keys:
        shown = first_few(verdict.unused_keys, _MAX_NAMED)
        yield Finding(
            "lora_unused_keys",
            "info",
            f"{counted(len(verdict.unused_keys), 'key of the file belongs', 'keys of the file belong')} to no module: {shown}.",
            {"keys": len(verdict.unused_keys), "first": verdict.unused_keys[0]},
            _WORDS_IN_BUNDLE if any(key.startswith("bundle_emb.") for key in verdict.unused_keys) else None,
        )


_WORDS_IN_BUNDLE: Final = (
    "What begins with bundle_emb. are embeddings of words that OneTrainer put beside the LoRA. Where a host leaves them out, these words "
    "mean nothing in a prompt: train again with the embeddings in files of their own, or do without the words."
)


def _modules(verdict: LoraVerdict) -> str:
    return counted(len(verdict.modules), "module")


def _first_modules(modules: Sequence[ModuleVerdict], said: str = "") -> str:
    """The first names, with the first one's detail unless that ends as what is said before it does."""
    detail = modules[0].detail or ""
    own_words = detail.partition("the file is for ")[0].removesuffix(": ") if said else detail
    first = f"{modules[0].name} ({own_words})" if own_words else modules[0].name
    return first_few([first, *(module.name for module in modules[1:])], _MAX_NAMED)


def loader_findings(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    """What to know before loading the file in diffusers or ComfyUI.

    Args:
        verdict: With its modules.
        keys: Of the file.
    """
    known = frozenset(key.removeprefix(PEFT_START) for key in keys)
    endings = {ending_of(module.name.removesuffix(_BIAS), module.kind, known) for module in verdict.modules}
    if endings and endings <= IN_NO_HOST.keys():  # under whatever names
        yield kind_unread(endings)
        return
    yield from _refused_alphas(verdict, keys)
    yield from _kohya_names(verdict, keys)
    yield from _comfyui_names(verdict, keys)
    yield from _differences(verdict, keys)
    yield from _half_of_attention(verdict)
    yield from _prefix(verdict, keys)
    yield from _some_biases(verdict, keys)
    yield from _not_in_diffusers(verdict)
    yield from _magnitudes(keys)


_ALPHAS_READ: Final = ("flux", "chroma")
"""Families whose loader in diffusers 0.42 multiplies by `.alpha` / rank beside `lora_A` too; the others' refuse the file."""


def _refused_alphas(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    alphas = [key for key in keys if key.endswith(".alpha")]
    if verdict.format != "peft" or not alphas or verdict.model_family in _ALPHAS_READ:
        return
    scaled = [module for module in verdict.modules if module.scale not in (None, 1.0)]
    yield verdict_finding(
        "lora_alpha_refused",
        {"alphas": len(alphas), "scaled": len(scaled), "first_scale": scaled[0].scale if scaled else None},
        alphas=counted(len(alphas), ".alpha tensor"),
    )


_FLAT_STARTS: Final = ("lora_unet_", "lora_transformer_", "lycoris_")
"""How flat names of a denoiser's modules begin."""


def _kohya_names(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    if {module.kind for module in verdict.modules} <= {*_kinds_left_out(verdict)}:
        return  # it reads these under no name
    family = family_named(verdict.model_family)
    read = {reads.start for reads in family.reads if reads.host == "diffusers"}
    names = [module.name for module in verdict.matched if module.part == "denoiser"]
    unread = [start for start in _FLAT_STARTS if any(name.startswith(start) for name in names)]
    if verdict.format == "kohya" and unread and read and not read & set(unread):
        starts = " or ".join(unread)
        yield verdict_finding("lora_start_unread", {"prefix": starts}, starts=starts, family=family.title)
    elif verdict.format == "kohya" and read and (unread_names := _unread_names(verdict, keys)):
        yield verdict_finding(
            "lora_names_unread", {"modules": len(names)}, first=unread_names[0], family=family.title
        )
    elif verdict.format == "kohya":
        yield verdict_finding("lora_kohya_names", {"format": verdict.format})


def _unread_names(verdict: LoraVerdict, keys: Sequence[str]) -> list[str]:
    """Of plain factors for the denoiser, the names if diffusers reads none of them."""
    end = "A" if any(".lora_A." in key for key in keys) else "down"
    plain = [module for module in verdict.matched if (module.part, module.kind) == ("denoiser", "lora")]
    family = family_named(verdict.model_family)
    if any(may_read("diffusers", module.name, end, family) for module in plain):
        return []
    return [f"{module.name}.lora_{end}" for module in plain]


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
        some = f"does not load {len(lost)} of {counted(len(verdict.matched), 'module')} of"
        takes = "loads nothing of" if len(lost) == len(verdict.matched) else some
        refusing = any(
            one.or_refused for one in family.lost if (one.host, one.format) == ("diffusers", "comfyui")
        )
        odd = next((key for key in keys if "lora" not in key), None) if refusing else None
        yield verdict_finding(
            "lora_comfyui_names",
            {"modules": len(lost), "first": lost[0].name},
            takes=takes if odd is None else "refuses",
            family=family.title,
            what=", and reports no error."
            if odd is None
            else f" and of which one, such as {odd}, does not contain “lora”.",
        )


def _differences(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    differences = [key for key in keys if key.endswith(_DIFFERENCE_ENDS)]
    if not differences:
        return
    them = "it" if len(differences) == 1 else "them"
    yield verdict_finding(
        "lora_whole_differences",
        {"keys": len(differences), "first": differences[0]},
        keys=counted(len(differences), "key holds a whole difference", "keys hold whole differences"),
        first=differences[0],
        takes=_takes_differences(verdict, differences, them),
    )


def _takes_differences(verdict: LoraVerdict, differences: Sequence[str], them: str) -> str:
    """What diffusers does with a file that holds whole differences, as measured."""
    family = family_named(verdict.model_family)
    of_biases = all(key.endswith(".diff_b") for key in differences)
    if leaves_other_keys(family) and (verdict.format == "peft" or (verdict.format == "kohya" and of_biases)):
        return f"drops {them} silently"
    if family.name == "wan" and verdict.format == "comfyui":
        return "takes those of biases beside factors, and of the rest some, such as head.head, make it refuse the file"
    drops = f" or drops {them}" if verdict.model_family is None else ""
    return f"refuses the file because of {them}{drops}"


def _half_of_attention(verdict: LoraVerdict) -> Iterator[Finding]:
    family = family_named(verdict.model_family)
    start = f"{family.component}."
    lost = [
        module
        for module in verdict.matched
        if module.name.startswith(start) and family.loses("comfyui", "peft", module.name.removeprefix(start))
    ]
    if verdict.format == "peft" and lost:
        denoiser = [module for module in verdict.modules if module.part == "denoiser"]
        yield verdict_finding(
            "lora_comfyui_loses_attention",
            {"modules": len(lost), "of": len(denoiser), "first": lost[0].name},
            count=len(lost),
            modules=counted(len(denoiser), "module"),
        )


def _prefix(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    """`load_lora_adapter` expects the prefix `transformer`; with any other it only warns and loads nothing.

    Nor does `load_lora_weights` load names without any prefix, except for the few families that their record names.
    """
    if verdict.format != "peft" or not verdict.modules:
        return
    of_controlnet = [
        module for module in verdict.modules if any(map(is_of_controlnet, (module.name, *module.layers)))
    ]
    if of_controlnet:
        yield from _on_controlnet(of_controlnet, verdict)
        return
    starts = {module.name.partition(".")[0] for module in verdict.modules if module.part == "denoiser"}
    if not starts or "transformer" in starts:
        return
    known = sorted(starts & {"unet", "denoiser", "diffusion_model"})
    family = family_named(verdict.model_family)
    wrapper = PEFT_START if any(key.startswith(PEFT_START) for key in keys) else ""
    prefix = (wrapper + (known[0] if known else "")).removesuffix(".") or None
    argument = "prefix=None" if prefix is None else f'prefix="{prefix}"'
    if known or any(
        (reads.host, reads.start) == ("diffusers", wrapper) for reads in family.reads if reads.known
    ):
        yield verdict_finding("lora_adapter_prefix", {"prefix": prefix}, argument=argument)
        return
    prefix = _unknown_prefix(verdict, keys)
    argument = f'prefix="{prefix}"' if prefix else "prefix=None"
    yield verdict_finding("lora_part_unnamed", {"prefix": prefix}, part=family.component, argument=argument)


def _unknown_prefix(verdict: LoraVerdict, keys: Sequence[str]) -> str | None:
    """What stands in all keys before the names of layers, such as `model.unet`; None if nothing does."""
    of_keys, of_names = _shared_start(keys), _shared_start([module.name for module in verdict.modules])
    before = of_keys.rpartition(of_names)[0] if of_names else of_keys
    return before.removesuffix(".") or None


def _shared_start(names: Sequence[str]) -> str:
    """The parts with which all names begin, but for the last: `a.b` of `a.b.c` and `a.b.d`."""
    both = zip(min(names).split(".")[:-1], max(names).split(".")[:-1], strict=False)
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _on_controlnet(modules: Sequence[ModuleVerdict], verdict: LoraVerdict) -> Iterator[Finding]:
    """Where the ControlNet is given alone or beside the denoiser, its LoRA fits; but not by way of `load_lora_weights`."""
    matched = [module for module in modules if module.layers]
    if not matched:  # said module by module
        return
    finding = verdict_finding(
        "lora_controlnet",
        {"modules": len(matched), "of": len(verdict.modules), "first": matched[0].name},
        count=len(matched),
        modules=_modules(verdict),
        words=MISMATCHES["controlnet"].words(len(matched)),
        families="",
        first=_first_modules(matched),
    )
    is_beside = any(layer.startswith("controlnet.") for module in matched for layer in module.layers)
    yield finding if is_beside else replace(finding, severity="info")


def _some_biases(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    biases = sum(key.endswith(_UP_BIAS_ENDS) for key in keys)
    modules = sum(not module.name.endswith(".bias") for module in verdict.modules)
    if biases and biases != modules:
        yield verdict_finding(
            "lora_some_biases",
            {"biases": biases, "modules": modules},
            count=biases,
            modules=f"{counted(modules, 'module')} {'has' if biases == 1 else 'have'}",
        )


_NAMES_OF_KINDS: Final = {"oft": "OFT", "boft": "BOFT", "glora": "GLoRA", "loha": "LoHa", "lokr": "LoKr"}


def _kinds_left_out(verdict: LoraVerdict) -> list[str]:
    """The kinds of a file that diffusers 0.42 applies to no model of the family: LoKr it does to those of two."""
    kinds = {module.kind for module in verdict.modules} & _NAMES_OF_KINDS.keys()
    family = family_named(verdict.model_family)
    takes_lokr = any(reads.host == "diffusers" and "lokr" in reads.endings for reads in family.reads)
    return sorted(kinds - {"lokr"} if takes_lokr else kinds)


def _not_in_diffusers(verdict: LoraVerdict) -> Iterator[Finding]:
    kinds = _kinds_left_out(verdict)
    if kinds:
        named = " and ".join(_NAMES_OF_KINDS[kind] for kind in kinds)
        yield verdict_finding(
            "lora_comfyui_only",
            {"kinds": ", ".join(kinds)},
            kinds=named,
            model="" if {*kinds} <= {"loha", "lokr"} else " --model MODEL",
        )


def _magnitudes(keys: Sequence[str]) -> Iterator[Finding]:
    """ComfyUI 0.3 to 0.33 reads DoRA's magnitudes by kohya's name alone, and logs others as keys that are not loaded.

    The loaders of diffusers 0.42 take just that name out of a file, and say so in the log.
    """
    lost = [key for key in keys if ".lora_magnitude_vector" in key]
    if lost:
        yield verdict_finding(
            "lora_comfyui_loses_magnitudes",
            {"modules": len(lost), "first": lost[0]},
            modules=counted(len(lost), "DoRA module"),
        )
    lost = [key for key in keys if key.endswith(f".{DORA}")]
    if lost:
        yield verdict_finding(
            "lora_diffusers_loses_magnitudes",
            {"modules": len(lost), "first": lost[0]},
            modules=counted(len(lost), "DoRA module"),
        )
