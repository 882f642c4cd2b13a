"""What to know of LoRAs that were merged."""

from collections.abc import Iterator, Sequence

from sigmascope.lora.extraction.provenance import BASE_FINGERPRINT
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.header import family_in
from sigmascope.lora.merging.reduction_report import unused_keys
from sigmascope.lora.names.united import UnitedLoras
from sigmascope.records.finding import Finding

_BASES = (BASE_FINGERPRINT, "ss_new_sd_model_hash", "ss_sd_model_hash")


def merge_findings(loras: Sequence[LoraFile], united: UnitedLoras) -> Iterator[Finding]:
    """Give reasons to doubt that the LoRAs belong together.

    Args:
        loras: Under their own names.
        united: The same under common names.
    """
    families = {family for lora in loras if (family := family_in(lora.metadata)) is not None}
    if len(families) > 1:
        yield Finding(
            "lora.merge.families",
            "warning",
            f"The LoRAs say that they are for different models: {', '.join(sorted(families))}.",
            advice="Merge LoRAs of one base model.",
        )
    elif any(len({lora.metadata[name] for lora in loras if name in lora.metadata}) > 1 for name in _BASES):
        yield Finding(
            "lora.merge.bases",
            "info",
            "The LoRAs were made from different checkpoints of a model, by what their headers say.",
            advice="Look at the result: each change was made for its own base.",
        )
    shared = sum(len(united.positions(name)) > 1 for name in united.names)
    if len(loras) > 1 and shared == 0:
        yield Finding(
            "lora.merge.apart",
            "warning",
            "No layer is changed by more than one of the LoRAs.",
            {"layers": len(united.names)},
            advice="Check that they are for the same model, and that their names are understood: lora inspect.",
        )
    yield from unused_keys(loras)
