"""Every reason why a LoRA, or a part of it, does nothing, in one table: its severity, its words and its advice.

`VERDICTS` has them by the finding's id, whether the file shows the reason, the model or the application; `verdict_finding`
makes the finding of a row.
"""

from collections.abc import Sequence
from math import fsum
from typing import Final, Literal, NamedTuple, get_args

from sigmascope.errors import SigmascopeError
from sigmascope.records.run import Finding, JsonScalar, Severity
from sigmascope.units import counted

Reason = Literal[
    "broken",
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
    "bias_missing",
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
        of_model: Whether it is about the loader of a model, diffusers' `load_lora_adapter`, and not a pipeline's.
        of_pipeline: Whether it is about a pipeline's, `load_lora_weights`, and not a model's.
    """

    severity: Severity
    says: str
    advice: str | None
    one: str = ""
    many: str = ""
    host: str | None = None
    leaves_all_out: bool = False
    about_names: bool = False
    of_model: bool = False
    of_pipeline: bool = False

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
    of_model: bool = False,
    of_pipeline: bool = False,
) -> VerdictRow:
    return VerdictRow(
        severity,
        says,
        advice,
        host=host,
        leaves_all_out=leaves_all_out,
        about_names=about_names,
        of_model=of_model,
        of_pipeline=of_pipeline,
    )


_TO_PEFT: Final = "For diffusers, convert the file to PEFT's format (sigmascope lora convert)."
_OF_MODULES: Final = "{count} of {modules} {words}{families}: {first}."
_SET_STRENGTH: Final = "Set its strength: set_adapters in diffusers (lora_scale if you fuse it), strength_model and strength_clip in ComfyUI."
VERDICTS: Final[dict[str, VerdictRow]] = {
    # By what is in the file.
    "lora_unreadable": VerdictRow("critical", "{why}", "{advice}"),
    "lora_broken": VerdictRow(
        "error",
        _OF_MODULES,
        "Download or make the file again. Until then hosts leave such modules out, or refuse the file (sigmascope lora inspect FILE), and so do "
        "sigmascope lora convert, merge and resize.",
        "cannot be read",
        "cannot be read",
    ),
    "lora_config_unread": VerdictRow("warning", "PEFT's configuration cannot be read: {why}.", "{advice}"),
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
        'Pass that part of the model too. In diffusers, load a LoRA of a VAE with pipe.vae.load_lora_adapter(FILE, prefix="vae"): '
        "load_lora_weights and ComfyUI's LoRA loaders change denoisers and text encoders alone.",
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
    "lora_bias_missing": VerdictRow(
        "warning",
        _OF_MODULES,
        "All else applies. PEFT adds such a bias while the LoRA is not merged; ComfyUI leaves it out, and a merge does with --allow_unmatched.",
        "is for the bias of a layer that has none",
        "are for biases of layers that have none",
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
    "lora_of_base": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown: the adapter {adapters} began with a part that it took out of the model's weights "
        "(init_lora_weights), and changes nothing until it is trained.",
        "Train it, or compare a picture with one of a model without the adapter.",
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
        "Do nothing if these layers get no gradient, such as the last ones of a text encoder with clip skip. Else look at what "
        "the training left out.",
    ),
    # By what hosts make of the file.
    "lora_hosts_differ": VerdictRow(
        "warning", "Hosts apply the file differently: {first}; {second}.", "Convert the file{how}."
    ),
    "lora_no_host": VerdictRow(
        "warning", "{hosts} {load} nothing of the file{names}.", "Convert the file{how}."
    ),
    "lora_alpha_unread": VerdictRow(
        "warning",
        "{stated}, which is strength {strength}, and no tensor repeats it: hosts apply the LoRA at strength 1.",
        "{advice}",
    ),
    "lora_lokr_alpha_unread": VerdictRow(
        "warning",
        "{modules} of LoKr {have} two whole factors beside alpha {alpha}, and the header asks for rank {rank}: ComfyUI, diffusers and LyCORIS read "
        "no alpha there, and apply them at strength 1.",
        "LyCORIS writes the rank there. If the pictures are ruined, the file was trained at alpha / rank, as PEFT does: load it at strength {strength}.",
    ),
    # By how far a change has come on the model.
    "lora_changes_failed": VerdictRow(
        "error",
        "{model}: {count} cannot be changed, such as {first}: {reason}.",
        "If the shapes differ, use the model that the LoRA was made for.",
    ),
    "lora_without_values": VerdictRow(
        "error",
        "{model}: {count} without values, such as that of {first}: {why}, and calls fail, or compute with whatever lies in memory.",
        "Load the model again, and {how}.",
    ),
    "lora_strength_zero": VerdictRow(
        "warning", "The LoRA changes nothing: it has strength 0 on {weights}.", _SET_STRENGTH
    ),
    "lora_merged_at_zero": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown: it is merged into {weights} and has strength 0 now, which takes nothing out of "
        "them if it was set after merging.",
        "Take it out of the weights: unfuse_lora in diffusers. Set strengths before you fuse, and fuse with no lora_scale of 0.",
    ),
    "lora_magnitudes_unknown": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown: it is a DoRA whose factors add nothing to {weights}, and acts only if its magnitudes "
        "differ from the norms of the weights, which are not at hand.",
        "Load it inside the watch.",
    ),
    "lora_scaled_to_zero": VerdictRow(
        "warning",
        "The LoRA changes nothing in this call: {argument} is 0, for {weights}.",
        "Call with another scale, or without. Set strengths anew first: after a scale of 0 diffusers leaves them at 1.",
    ),
    "lora_control_is_zero": VerdictRow(
        "warning",
        "The LoRA changes nothing in this call: it is on {component}, whose last layers are all zero, so that it adds nothing to the "
        "picture ({weights}).",
        "Load a trained ControlNet. The last layers of a new one (zero convolutions) are zero until it is trained.",
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
    "lora_in_embeddings": VerdictRow(
        "warning",
        "Whether the LoRA acts in this call is unknown: it is on none of the models, but the embeddings that the call was given "
        "were made with one.",
        "Encode the prompt again without the LoRA, if it is not to act: taking it off leaves embeddings as they are.",
    ),
    "lora_not_run": VerdictRow(
        "warning",
        "The LoRA changes nothing in this call: it is on {component}, which did not run ({weights}).",
        "Load it into what runs too, or call so that this runs: with other steps, or a picture to begin with.",
    ),
    "lora_on_late_layers": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown: it is on late layers of {component} alone ({weights}), and pipelines leave some of them out.",
        "SDXL never uses the last layer of its first text encoder, and clip_skip leaves out more. Compare a picture with the LoRA and one "
        "without it, or use one that changes earlier layers.",
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
    "lora_strength_squared": VerdictRow(
        "warning",
        "{weights} with OFT: ComfyUI multiplies with the strength twice, so that {strength} acts as {squared}.",
        "{how}",
    ),
    "lora_bypassed": VerdictRow(
        "warning",
        "The LoRA changes nothing: in place of {weights} the attentions run joined projections, which do not have it.",
        "Separate them: unfuse_qkv_projections in diffusers. To run both, fuse the LoRA before you join them.",
    ),
    "lora_in_base": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown: {why} ({weights}).",
        "To run the model without the LoRA, load the model again: no switch of an adapter gives it its own weights back.",
    ),
    "lora_fused_before": VerdictRow(
        "info",
        "Whether the LoRA acts is unknown: {fused}, and weights do not tell what was fused into them.",
        "Keep what is fused loaded, and fuse inside the watch. To run the model without the LoRA, load the model again.",
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
    "lora_may_be_lost": VerdictRow(
        "warning",
        "Whether the LoRA acts is unknown, because {why}.",
        "Raise its strength: at this one no picture shows it.",
    ),
    "lora_arrives_weak": VerdictRow(
        "warning",
        "Only {share} of the LoRA arrives in {weights}, {noise}: merged, the sum is rounded to {stored}.",
        "Leave it unmerged (all of it arrives, without noise){ways}.",
    ),
    "lora_arrives_noisy": VerdictRow(
        "warning",
        "The LoRA arrives {noise} in {weights} ({share} of it arrives): merged, the sum is "
        "rounded to {stored}.",
        "Leave it unmerged (all of it arrives, without noise){ways}. At a larger strength the noise is a smaller part of it.",
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
        "In a watch this is no fault: fuse_lora, for one, leaves what the models compute as it was. If you took the baseline yourself, take it before you apply the LoRA.",
    ),
    "lora_registered_only": VerdictRow(
        "info",
        "{model}: {count} registered but not in the weights yet.",
        "ComfyUI merges them when it loads the model for sampling; until then the figures are predictions.",
    ),
    "lora_inactive": VerdictRow("info", "{model}: {count} off or at strength 0.", None),
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
        "No weight of the models changed by more than rounding, and no change was registered.",
        "The host may report this only in its log. Compare the file with the model: "
        "sigmascope lora inspect FILE --model MODEL.",
    ),
    "lora_none_there": VerdictRow(
        "info",
        "Nothing changed: no LoRA is on the models.",
        "A LoRA that was fused stays in the weights when its adapter is gone: load the model again to take it out.",
    ),
    "lora_without_effect": VerdictRow(
        "warning",
        "No weight changed, though there are changes on {weights}. Why is unknown: {why}.",
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
    "lora_names_unread": _of_loader(
        "diffusers",
        "warning",
        "diffusers does not read names such as {first} in a file for {family}.",
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
        of_model=True,
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
        of_model=True,
    ),
    "lora_other_prefix": _of_loader(
        "diffusers",
        "warning",
        "load_lora_adapter takes the names that begin with its prefix ({prefix}.), and none in the file does.",
        "{how}, or convert it to PEFT's format (sigmascope lora convert).",
        of_model=True,
    ),
    "lora_part_unnamed": _of_loader(
        "diffusers",
        "warning",
        "diffusers loads nothing from this file with load_lora_weights, since no name in it begins with the part that it is for "
        "({part}.).",
        "Load it with pipe.{part}.load_lora_adapter(FILE, {argument}), or convert it to PEFT's format, which adds the part "
        "(sigmascope lora convert).",
        about_names=True,
        of_pipeline=True,
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
    "lora_kind_unread": VerdictRow(
        "warning",
        "The file holds {kinds}, which neither diffusers nor ComfyUI applies.",
        "Convert it to plain factors: sigmascope lora convert FILE NEW --format peft --rank 32 --model MODEL{drop}.",
        leaves_all_out=True,
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
    "lora_diffusers_loses_magnitudes": _of_loader(
        "diffusers",
        "warning",
        "diffusers leaves out the magnitudes of {modules} and applies the rest as a plain LoRA: it takes .dora_scale out of a "
        "file, and reads .lora_magnitude_vector.",
        "For diffusers, convert the file with its model: sigmascope lora convert FILE NEW --format peft --model MODEL.",
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
    "rounding": "{key} changed by rounding alone: what was merged by hand was taken out again, or lost in it",
    "no_values": "the LoRA on {key} has no values",
    "not_finite": "it holds NaN or Inf, so whether it is there is unknown",
    "unread": "{key} has a change that cannot be read, so whether it is the file's is unknown",
    "others": "{key} has only other changes{sources}",
}
"""Why a module of a file is not on a model, for `lora_not_loaded` and the detail of the module."""


def is_without_values(detail: str | None) -> bool:
    """Whether that is why a module is not on a model, though the model has a change for it."""
    return detail is not None and detail.endswith(ABSENCES["no_values"].partition("{key}")[2])


def is_unread(detail: str | None) -> bool:
    """Whether a module may be on a model, in a change that nothing reads."""
    return detail is not None and detail.endswith(ABSENCES["unread"].partition("{key}")[2])


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


def at_strength_zero(weights: int) -> Finding:
    """That a LoRA which changes so many weights has strength 0."""
    return verdict_finding("lora_strength_zero", {"weights": weights}, weights=counted(weights, "weight"))


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


def unreadable(error: Exception) -> Finding:
    """The finding for a file or model that cannot be read."""
    message = error.message if isinstance(error, SigmascopeError) else str(error)
    hint = error.hint if isinstance(error, SigmascopeError) else None
    return verdict_finding("lora_unreadable", {"error": type(error).__name__}, why=message, advice=hint or "")
