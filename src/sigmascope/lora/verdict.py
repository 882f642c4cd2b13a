"""The verdict on a LoRA file and a model: module by module, with findings and advice.

`VERDICTS` has every reason why a LoRA, or a part of it, does nothing, with its words and advice, whether the file shows
it, the model or the application. A `LoraVerdict` says for each module whether it changes a weight (`ModuleVerdict`).
`verdict_findings` sums it up with numbers and advice. `loader_findings` adds what diffusers 0.42 and
ComfyUI 0.3 to 0.18 do with a file that is correct in itself.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import fsum
from typing import Any, Final, Literal, NamedTuple, get_args

from sigmascope.errors import SigmascopeError
from sigmascope.lora.effect import BlockEffect, Effect, by_block
from sigmascope.lora.families import family_named
from sigmascope.lora.file_family import title_of
from sigmascope.lora.module_names import is_of_controlnet
from sigmascope.records.run import Finding, JsonScalar, Severity
from sigmascope.units import counted, first_few

_NOT_READ: Final = "the model's weights were not read"
Reason = Literal[
    "controlnet",
    "other_architecture",
    "other_shape",
    "transposed",
    "text_encoder_missing",
    "part_missing",
    "prefix",
    "base_incomplete",
    "block_missing",
    "layer_lost",
    "layer_missing",
    "twice",
    "unknown",
]


class VerdictRow(NamedTuple):
    """A reason why a LoRA, or a part of it, does nothing.

    Attributes:
        severity: How bad it is.
        says: The message, with names for its figures.
        advice: What to do; it may have figures too.
        one: Of a reason that single modules have: what a message says after "1 module".
        many: What it says after "3 modules".
        host: Whose loader alone it is about: the form of a file matters for one; None: it is about all.
        leaves_all_out: Whether it may be why that loader takes nothing of the file.
        about_names: Whether it no longer matters once every module was found on the model.
    """

    severity: Severity
    says: str
    advice: str | None
    one: str = ""
    many: str = ""
    host: str | None = None
    leaves_all_out: bool = False
    about_names: bool = False

    def words(self, modules: int) -> str:
        """The words of a message after this many modules."""
        return self.one if modules == 1 else self.many


def _of_loader(
    host: str,
    severity: Severity,
    says: str,
    advice: str,
    *,
    leaves_all_out: bool = True,
    about_names: bool = False,
) -> VerdictRow:
    return VerdictRow(
        severity, says, advice, host=host, leaves_all_out=leaves_all_out, about_names=about_names
    )


_TO_PEFT: Final = "For diffusers, convert the file to PEFT's format (sigmascope lora convert)."
_OF_MODULES: Final = "{count} of {modules} {words}{families}: {first}."
_SET_STRENGTH: Final = "Set its strength: set_adapters in diffusers (lora_scale if you fuse it), strength_model and strength_clip in ComfyUI."
VERDICTS: Final[dict[str, VerdictRow]] = {
    # By what is in the file.
    "lora_unreadable": VerdictRow("critical", "{why}", "{advice}"),
    "lora_matches_nothing": VerdictRow(
        "critical",
        "None of the {modules} changes a weight of the model: {share} {words}{families}, such as {first}.",
        "{advice}",
    ),
    "lora_controlnet": VerdictRow(
        "error",
        _OF_MODULES,
        'Load the file into the ControlNet: pipe.controlnet.load_lora_adapter(FILE, prefix=None), with prefix="controlnet" if its '
        "names begin so. load_lora_weights and ComfyUI's LoRA loaders change denoisers and text encoders alone.",
        "is for a ControlNet",
        "are for a ControlNet",
    ),
    "lora_other_architecture": VerdictRow(
        "error",
        _OF_MODULES,
        "Use the LoRA with the model family that it was made for.",
        "is for another architecture",
        "are for another architecture",
    ),
    "lora_other_shape": VerdictRow(
        "error",
        _OF_MODULES,
        "Use the LoRA with the model that it was made for: this one has other widths.",
        "is for a weight of another shape",
        "are for weights of another shape",
    ),
    "lora_transposed": VerdictRow(
        "error",
        _OF_MODULES,
        "Make the file again, with up (out, rank) and down (rank, in).",
        "has transposed factors",
        "have transposed factors",
    ),
    "lora_text_encoder_missing": VerdictRow(
        "warning",
        _OF_MODULES,
        "Pass the text encoder too, or accept that the LoRA acts on the denoiser alone.",
        "is for a text encoder that was not given",
        "are for a text encoder that was not given",
    ),
    "lora_part_missing": VerdictRow(
        "warning",
        _OF_MODULES,
        "Pass that part of the model too.",
        "is for a part of the model that was not given",
        "are for a part of the model that was not given",
    ),
    "lora_prefix": VerdictRow(
        "error",
        _OF_MODULES,
        "Rename the keys without the prefix, or tell the loader the prefix if it takes one.",
        "has an unknown prefix before a name that the model has",
        "have an unknown prefix before a name that the model has",
    ),
    "lora_base_incomplete": VerdictRow(
        "error",
        _OF_MODULES,
        "Download the model again, all of it. One that was pruned on purpose takes only LoRAs that were made for it.",
        "is for a layer that the model lacks, which is incomplete itself",
        "are for layers that the model lacks, which is incomplete itself",
    ),
    "lora_block_missing": VerdictRow(
        "error",
        _OF_MODULES,
        "Use the LoRA with the model that it was made for: this one has fewer or other blocks.",
        "is for a block that the model does not have",
        "are for blocks that the model does not have",
    ),
    "lora_layer_lost": VerdictRow(
        "error",
        _OF_MODULES,
        "Download the model again, all of it. One that was pruned on purpose applies all else: a merge or conversion leaves these modules out.",
        "is for a layer that every model of the family has, and this one lacks in all its blocks: it is incomplete",
        "are for layers that every model of the family has, and this one lacks in all its blocks: it is incomplete",
    ),
    "lora_layer_missing": VerdictRow(
        "warning",
        _OF_MODULES,
        "All else applies. A merge or conversion leaves these modules out and counts them against the energy kept. WAN 2.2, for example, has no image "
        "attention, which LoRAs of WAN 2.1's I2V model change.",
        "is for a layer that the model's family has, but this variant does not",
        "are for layers that the model's family has, but this variant does not",
    ),
    "lora_twice": VerdictRow(
        "error",
        _OF_MODULES,
        "Remove one of the two: a loader may apply both.",
        "is for a layer that another module of the file already changes",
        "are for layers that another module of the file already changes",
    ),
    "lora_unknown": VerdictRow(
        "error",
        _OF_MODULES,
        "Compare the names with the model's nearest ones, and convert the file if only the naming differs.",
        "has a name that the model does not have",
        "have names that the model does not have",
    ),
    "lora_not_finite": VerdictRow(
        "error",
        "{holders} NaN or Inf: {first}.",
        "Take the LoRA off: it makes images black or noise. Make the file again, in bf16 or float if it was fp16.",
    ),
    "lora_is_zero": VerdictRow(
        "warning",
        "The LoRA changes nothing: all its changes are zero, in {modules}.",
        "Train it further or make it again: untrained factors are zero.",
    ),
    "lora_untrained": VerdictRow(
        "info",
        "The new adapter changes nothing yet: {factor} is zero in {modules}, as before training.",
        "Train it, or load its weights.",
    ),
    "lora_alpha_zero": VerdictRow(
        "warning",
        "The LoRA changes nothing: alpha 0 scales its factors to zero, in {modules}.",
        "Set alpha to the rank, or to what it was trained with.",
    ),
    # By its numbers, held to those of the same layer in other blocks.
    "lora_damaged": VerdictRow(
        "error",
        "{count} look damaged, as if bytes of the file were lost or changed: {first}.",
        "Download or copy the file again and compare its hash with the publisher's.",
    ),
    "lora_spikes": VerdictRow(
        "warning",
        "One direction stands out far above those of the same layer in other blocks, or of other layers, in {count}: {first}.",
        "Such a direction often shows as a fixed pattern or colour. Cut it with sigmascope lora resize, "
        "or train with a lower learning rate.",
    ),
    "lora_over_strong": VerdictRow(
        "warning",
        "Far stronger than the same layers in other blocks: {first}.",
        "If images are burnt or distorted, weaken these blocks or leave them out where you load the LoRA.",
    ),
    "lora_rank_collapse": VerdictRow(
        "info",
        "{count} one or two directions of their rank: {first}.",
        "A smaller rank holds the same: sigmascope lora resize. If you trained it, a higher learning rate or rsLoRA uses more.",
    ),
    "lora_dead_modules": VerdictRow(
        "info",
        "{count} change nothing, or a thousandth of what others do: {first}.",
        "None if these layers get no gradient, such as the last ones of a text encoder with clip skip. Else look at what "
        "the training left out.",
    ),
    # By what hosts make of the file.
    "lora_hosts_differ": VerdictRow(
        "warning", "Hosts apply the file differently: {first}; {second}.", "Convert the file{how}."
    ),
    "lora_no_host": VerdictRow(
        "warning", "{hosts} {load} nothing of the file by the names that it has.", "Convert the file{how}."
    ),
    "lora_alpha_unread": VerdictRow(
        "warning",
        "The header has alpha {alpha} for rank {rank}, which is strength {strength}, and no tensor repeats it: hosts apply the LoRA at strength 1.",
        "If it is too strong or too weak, load it at strength {strength}. Of the header, diffusers reads this for MiniMax H3 alone, ComfyUI never.",
    ),
    # By how far a change has come on the model.
    "lora_changes_failed": VerdictRow(
        "error",
        "{model}: {count} cannot be changed, such as {first}: {reason}.",
        "If the shapes differ, use the model that the LoRA was made for.",
    ),
    "lora_without_values": VerdictRow(
        "error",
        "{model}: {count} without values, such as that of {first}: the loader found none for its factors in the file, and calls compute with "
        "whatever lies in memory.",
        "Load the model again, and the file under names that the loader reads: sigmascope lora convert FILE NEW --format peft.",
    ),
    "lora_strength_zero": VerdictRow(
        "warning", "The LoRA changes nothing: it has strength 0 on {weights}.", _SET_STRENGTH
    ),
    "lora_merged_at_zero": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown: it is merged into {weights} and has strength 0 now, which takes nothing out of "
        "them if it was set after merging.",
        "Take it out of the weights: unfuse_lora in diffusers. Set strengths before you fuse.",
    ),
    "lora_scaled_to_zero": VerdictRow(
        "warning",
        "The LoRA changes nothing in this call: {argument} is 0, for {weights}.",
        "Call with another scale, or without. Set strengths anew first: after a scale of 0 diffusers leaves them at 1.",
    ),
    "lora_not_in_embeddings": VerdictRow(
        "warning",
        "The LoRA changes nothing in this call: it is on {component}, which did not run, and the embeddings that the call "
        "was given were made without it ({weights}).",
        "Encode the prompt again with the LoRA loaded, or pass the prompt itself.",
    ),
    "lora_encoder_not_run": VerdictRow(
        "warning",
        "Whether the LoRA acts in this call is unknown: it is on {component}, which did not run, and acts only if the "
        "embeddings that the call was given were made with it ({weights}).",
        "Call encode_prompt with the LoRA loaded and inside the watch, or pass the prompt itself.",
    ),
    "lora_not_run": VerdictRow(
        "warning",
        "The LoRA changes nothing in this call: it is on {component}, which did not run ({weights}).",
        "Load it into what runs too, or call so that this runs: with other steps, or a picture to begin with.",
    ),
    "lora_layers_unused": VerdictRow(
        "warning",
        "The LoRA changes nothing in this call: the pipeline uses {component}, and the LoRA is on what comes after ({weights}).",
        "Use a LoRA that changes earlier layers or the denoiser, or call with a smaller clip_skip if you gave one. SDXL never uses the last "
        "layer of its first text encoder.",
    ),
    "lora_changed_in_call": VerdictRow(
        "info",
        "LoRAs were changed while the call ran: {first}.",
        "The steps before and after a change are made with different LoRAs, so there is no verdict on the whole call. "
        "Each change has a stage of its own in the record.",
    ),
    "lora_disabled": VerdictRow(
        "warning",
        "The LoRA changes nothing: adapters are switched off on {weights}.",
        "Switch them on: enable_lora in diffusers, enable_adapters in PEFT.",
    ),
    "lora_not_active": VerdictRow(
        "warning",
        "The LoRA changes nothing: its adapter is not active on {weights}.",
        "Make it active: set_adapters in diffusers (enable_lora if all are off), set_adapter in PEFT.",
    ),
    "lora_cancelled": VerdictRow(
        "warning",
        "{holders}: the same changes cancel each other on {weights}, since their strengths sum to 0.",
        "Remove one of them, or change a strength.",
    ),
    "lora_opposite": VerdictRow(
        "warning",
        "{holders}: the changes cancel each other on {weights}, since their sum is 0.",
        "Remove one of them, or change a strength: one file is another's negation, at these strengths.",
    ),
    "lora_opposed": VerdictRow(
        "warning",
        "{holders}: the same changes work against each other on {weights}: strengths {strengths} leave {left}.",
        "Load the file once, with the strength that you want.",
    ),
    "lora_others_merged": VerdictRow(
        "warning",
        "The LoRA changes nothing: other adapters are merged into {weights}, and PEFT runs only those.",
        "Unmerge them: unfuse_lora in diffusers, unmerge_adapter in PEFT.",
    ),
    "lora_beside_merged": VerdictRow(
        "warning",
        "The LoRA {adapters} changes nothing beside the adapters that are merged into {weights}: PEFT runs only those.",
        "Merge it too: fuse_lora with adapter_names of both, in one call after set_adapters. Or unmerge the others: unfuse_lora.",
    ),
    "lora_bypassed": VerdictRow(
        "warning",
        "The LoRA changes nothing: attentions run their joined projections in place of {weights}, without it.",
        "Separate them: unfuse_qkv_projections in diffusers. To run both, fuse the LoRA before you join them.",
    ),
    "lora_in_base": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown: {why} ({weights}).",
        "To run the model without the LoRA, load the model again: no switch of an adapter gives it its own weights back.",
    ),
    "lora_off_in_base": VerdictRow(
        "warning",
        "The model does not run with its own weights, though the adapter {adapters} is off: {why} ({weights}).",
        "To run the model without the adapter, load the model again: no switch of an adapter gives it its own weights back.",
    ),
    "lora_lost_in_rounding": VerdictRow(
        "warning",
        "The LoRA changes nothing: its change of {weights} is lost in rounding, below half a step of {dtype}.",
        "Raise its strength. If it is merged, leave it unmerged, or use a base of more bits.",
    ),
    "lora_arrives_weak": VerdictRow(
        "warning",
        "Only {share} of the LoRA arrives in {weights}, with noise of {noise} its size: merged, the sum is rounded to {stored}.",
        "Leave it unmerged (100 % arrive, without noise){ways}.",
    ),
    "lora_arrives_noisy": VerdictRow(
        "warning",
        "The LoRA arrives with noise of {noise} its size in {weights} ({share} of it arrives): merged, the sum is "
        "rounded to {stored}.",
        "Leave it unmerged (100 % arrive, without noise){ways}. At a larger strength the noise is a smaller part of it.",
    ),
    "lora_weights_disagree": VerdictRow(
        "warning",
        "{model}: the weights in use contradict the changes on them in {weights}: {first} is changed by {used}, "
        "not by {predicted}.",
        "The verdict follows the weights. Something else wrote into them, or the host applies the LoRA in another way: "
        "load the model and the LoRA again.",
    ),
    "lora_as_before": VerdictRow(
        "info",
        "Nothing changed: {weights} had the same changes before.",
        "In a watch there is nothing to do. If you took the baseline yourself, take it before you apply the LoRA.",
    ),
    "lora_registered_only": VerdictRow(
        "info",
        "{model}: {count} registered but not in the weights yet.",
        "ComfyUI merges them when it loads the model for sampling; until then the figures are predictions.",
    ),
    "lora_inactive": VerdictRow("info", "{model}: {count} off or of strength 0.", None),
    # By what is on the models as a whole.
    "lora_not_loaded": VerdictRow(
        "critical",
        "None of the file's {modules} is on the model: {why}.",
        "Run sigmascope lora inspect FILE --model MODEL: it says why, module by module.",
    ),
    "lora_partly_loaded": VerdictRow(
        "error",
        "{missing} of the file's {modules} {are} not on the model ({why}): {first}.",
        "If the model has these layers, the loader does not read their names: sigmascope lora convert FILE NEW --format peft "
        "(comfyui for ComfyUI). sigmascope lora inspect FILE --model MODEL says why, module by module.",
    ),
    "lora_not_applicable": VerdictRow(
        "error",
        "{idle} of the file's {modules} {are} on the model and cannot act ({reason}): {first}.",
        "Use a LoRA whose shapes fit the model.",
    ),
    "lora_not_acting": VerdictRow(
        "warning",
        "{idle} of the file's {modules} {are} on the model and not acting ({reason}): {first}.",
        "Set its strength, or make the adapter active.",
    ),
    "lora_left_off": VerdictRow(
        "warning",
        "The models were given back unchanged: both strengths are 0, or the models that the loader returned were not used.",
        "Set a strength, and pass the models that the loader returned.",
    ),
    "lora_in_conditioning": VerdictRow(
        "info",
        "The LoRA is a hook in the conditioning and not on the models.",
        "Sample with this conditioning: ComfyUI applies the LoRA then, and the models stay as they are.",
    ),
    "lora_not_applied": VerdictRow(
        "error",
        "No weight of the models changed, and no change was registered.",
        "The host may report this only in its log. Compare the file with the model: "
        "sigmascope lora inspect FILE --model MODEL.",
    ),
    "lora_none_there": VerdictRow(
        "info",
        "Nothing changed: no LoRA is on the models beside their weights.",
        "A LoRA that was fused stays in the weights when its adapter is gone: load the model again to take it out.",
    ),
    "lora_without_effect": VerdictRow(
        "warning",
        "No weight changed though {weights} have changes: why is unknown, because {why}.",
        "Look at the states of the changes in the analysis.",
    ),
    "lora_not_seen": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown, because {why}.",
        "Take the baseline before you apply the LoRA, while the weights are in memory. Trace or export a model with its "
        "LoRA on it, and anew for another.",
    ),
    # By the form of the file, for one host's loader.
    "lora_alpha_refused": _of_loader(
        "diffusers",
        "warning",
        "diffusers refuses the file because of {alphas} beside lora_A and lora_B.",
        "Convert the file (sigmascope lora convert), which puts the scale into the factors.",
    ),
    "lora_start_unread": _of_loader(
        "diffusers",
        "warning",
        "diffusers does not read names that begin with {starts} in a file for {family}.",
        _TO_PEFT,
        about_names=True,
    ),
    "lora_kohya_names": _of_loader(
        "diffusers",
        "info",
        "The file has kohya's names. diffusers reads them with a pipeline's load_lora_weights, not with a model's "
        "load_lora_adapter.",
        "Load it with the pipeline, or convert it to PEFT's format (sigmascope lora convert).",
        about_names=True,
    ),
    "lora_comfyui_names": _of_loader(
        "diffusers",
        "warning",
        "diffusers {takes} a file for {family} whose names begin with diffusion_model.{what}",
        _TO_PEFT,
        about_names=True,
    ),
    "lora_whole_differences": _of_loader(
        "diffusers",
        "warning",
        "{keys}, such as {first}: diffusers {takes}.",
        "Load the file in ComfyUI, or merge it into the checkpoint (sigmascope lora merge).",
    ),
    "lora_adapter_prefix": _of_loader(
        "diffusers",
        "info",
        "diffusers' load_lora_adapter loads nothing from this file with its default prefix: it needs {argument}.",
        "Load it with the pipeline's load_lora_weights, or pass {argument} to load_lora_adapter.",
        about_names=True,
    ),
    "lora_part_unnamed": _of_loader(
        "diffusers",
        "warning",
        "diffusers loads nothing from this file, and only warns, since no name in it begins with the part that it is for "
        "({part}.).",
        "Load it with pipe.{part}.load_lora_adapter(FILE, prefix=None), or convert it to PEFT's format, which adds the part "
        "(sigmascope lora convert).",
        about_names=True,
    ),
    "lora_some_biases": _of_loader(
        "diffusers",
        "warning",
        "{count} of {modules} a lora_B bias. diffusers accepts such biases in all modules or in none.",
        "Train or convert without lora_B biases, or with one in every module.",
    ),
    "lora_comfyui_only": _of_loader(
        "diffusers",
        "warning",
        "The file holds {kinds}, which ComfyUI applies and diffusers does not.",
        "For diffusers, convert it to plain factors: sigmascope lora convert FILE NEW --format peft --rank 32{model}.",
    ),
    "lora_comfyui_loses_attention": _of_loader(
        "comfyui",
        "warning",
        "ComfyUI does not find {count} of the denoiser's {modules} by these names: all attention projections. It only warns in "
        "its log.",
        "For ComfyUI, convert the file to kohya's or ComfyUI's format (sigmascope lora convert).",
        about_names=True,
    ),
    "lora_comfyui_loses_magnitudes": _of_loader(
        "comfyui",
        "warning",
        "ComfyUI leaves out the magnitudes of {modules} and applies the rest as a plain LoRA: it reads magnitudes as "
        ".dora_scale, and the file has .lora_magnitude_vector.",
        "For ComfyUI, convert the file with its model: sigmascope lora convert FILE NEW --format kohya --model MODEL.",
        leaves_all_out=False,
    ),
}
"""Every reason, by the finding's id. Reasons of single modules stand in the order in which findings name them."""


MISMATCHES: Final[dict[Reason, VerdictRow]] = {
    reason: VERDICTS[f"lora_{reason}"] for reason in get_args(Reason)
}
ABSENCES: Final = {
    "no_weight": "the model has no weight for it",
    "no_change": "no LoRA is applied to {key}",
    "no_values": "the LoRA on {key} has no values",
    "not_finite": "it holds NaN or Inf, so whether it is there is unknown",
    "others": "{key} has only other changes{sources}",
}
"""Why a module of a file is not on a model, for `lora_not_loaded` and the detail of the module."""


def is_without_values(detail: str | None) -> bool:
    """Whether that is why a module is not on a model, though the model has a change for it."""
    return detail is not None and detail.endswith(ABSENCES["no_values"].partition("{key}")[2])


def verdict_finding(id: str, evidence: dict[str, JsonScalar] | None = None, **figures: object) -> Finding:
    """The finding of a row of `VERDICTS`.

    Args:
        id: Of the row.
        evidence: What the finding is concluded from.
        figures: What the row's message and advice have names for.
    """
    row = VERDICTS[id]
    advice = row.advice and (row.advice.format(**figures) or None)
    return Finding(id, row.severity, row.says.format(**figures), evidence or {}, advice)


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


def is_opposed(strengths: Sequence[float]) -> bool:
    """Whether some of the same changes take from the others."""
    return any(strength > 0 for strength in strengths) and any(strength < 0 for strength in strengths)


def opposed_finding(
    strengths: Sequence[float], evidence: dict[str, JsonScalar], holders: str, weights: str
) -> Finding:
    """The same changes with these strengths on one weight, of both signs."""
    left = fsum(strengths)
    return verdict_finding(
        "lora_opposed",
        {**evidence, "left": left},
        holders=holders,
        weights=weights,
        strengths=" and ".join(f"{strength:.4g}" for strength in strengths),
        left=f"{left:.4g}",
    )


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
        *loader_findings(verdict, keys),
    ]
    return tuple(sorted(findings, key=lambda finding: _SEVERITY_ORDER.index(finding.severity)))


def _matches_nothing(verdict: LoraVerdict) -> Iterator[Finding]:
    if not verdict.modules or verdict.matched:
        return
    reason = max(verdict.reasons, key=lambda reason: verdict.reasons[reason])
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
        share="all" if len(verdict.reasons) == 1 else "most",
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
    yield from _refused_alphas(verdict, keys)
    yield from _kohya_names(verdict)
    yield from _comfyui_names(verdict, keys)
    yield from _differences(verdict, keys)
    yield from _half_of_attention(verdict)
    yield from _prefix(verdict)
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


def _kohya_names(verdict: LoraVerdict) -> Iterator[Finding]:
    if {module.kind for module in verdict.modules} <= {*_kinds_left_out(verdict)}:
        return  # it reads these under no name
    family = family_named(verdict.model_family)
    read = {reads.start for reads in family.reads if reads.host == "diffusers"}
    names = [module.name for module in verdict.matched if module.part == "denoiser"]
    unread = [start for start in _FLAT_STARTS if any(name.startswith(start) for name in names)]
    if verdict.format == "kohya" and unread and read and not read & set(unread):
        starts = " or ".join(unread)
        yield verdict_finding("lora_start_unread", {"prefix": starts}, starts=starts, family=family.title)
    elif verdict.format == "kohya":
        yield verdict_finding("lora_kohya_names", {"format": verdict.format})


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
        takes=f"drops {them} silently" if verdict.format == "peft" else f"refuses the file because of {them}",
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
        denoiser = [module for module in verdict.modules if module.part == "denoiser"]
        yield verdict_finding(
            "lora_comfyui_loses_attention",
            {"modules": len(lost), "of": len(denoiser), "first": lost[0].name},
            count=len(lost),
            modules=counted(len(denoiser), "module"),
        )


def _prefix(verdict: LoraVerdict) -> Iterator[Finding]:
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
    if known or any((reads.host, reads.start) == ("diffusers", "") for reads in family.reads):
        argument = f'prefix="{known[0]}"' if known else "prefix=None"
        yield verdict_finding(
            "lora_adapter_prefix", {"prefix": known[0] if known else None}, argument=argument
        )
        return
    yield verdict_finding("lora_part_unnamed", {"prefix": None}, part=family.component)


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
    """ComfyUI 0.3 to 0.33 reads DoRA's magnitudes by kohya's name alone, and logs others as keys that are not loaded."""
    lost = [key for key in keys if ".lora_magnitude_vector" in key]
    if lost:
        yield verdict_finding(
            "lora_comfyui_loses_magnitudes",
            {"modules": len(lost), "first": lost[0]},
            modules=counted(len(lost), "DoRA module"),
        )


def unreadable(error: Exception) -> Finding:
    """The finding for a file or model that cannot be read."""
    message = error.message if isinstance(error, SigmascopeError) else str(error)
    hint = error.hint if isinstance(error, SigmascopeError) else None
    return verdict_finding("lora_unreadable", {"error": type(error).__name__}, why=message, advice=hint or "")
