"""Native LBM naming: the checkpoint's own module paths (SPEC section 7).

`<module>.lora_up.weight` (out, r[, 1, 1]), `<module>.lora_down.weight` (r, in[, kh, kw]) and the scalar
`<module>.alpha`; the header says `lbm_native_naming: "true"`. We always write alpha = r, so that a reader
which ignores alpha gets the same ΔW. A model of any other family has its own paths in the same way.
"""

from sigmascope.lora.formats.base import LoraFormat
from sigmascope.lora.formats.keys import KeyGroups
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.layer_paths import Naming


def _is_native(found: KeyGroups) -> bool:
    """Every file of dotted paths that no other format claims."""
    return bool(found.groups)


def _native_naming(family: str) -> Naming | None:
    return None


def _native_module_name(part: Part, path: str, layout: ModelLayout, prefix: str | None) -> str:
    return layout.prefixes.get(part, "") + path


NATIVE = LoraFormat(
    name="native", recognises=_is_native, naming=_native_naming, module_name=_native_module_name
)
