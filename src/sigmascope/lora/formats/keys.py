"""Sort a LoRA file's keys by module: which tensor plays which role, in every way of writing them.

Each key is a module's name and an ending that says what the tensor is. The endings are those of kohya's and
LyCORIS' tools (`.lora_up.weight`, `.alpha`, `.hada_w1_a`, `.diff`), of PEFT (`.lora_A.weight`, with the
adapter's name between in files saved from a live model) and of diffusers before it used PEFT
(`.lora.up.weight`, `.processor.to_q_lora.up.weight`, `.lora_linear_layer.up.weight`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sigmascope.errors import LoraFormatError

UP: Final = "lora_up.weight"
DOWN: Final = "lora_down.weight"
MID: Final = "lora_mid.weight"
ALPHA: Final = "alpha"
DORA: Final = "dora_scale"
MAGNITUDE: Final = "lora_magnitude_vector"
UP_BIAS: Final = "lora_up.bias"
EMBEDDING_UP: Final = "lora_embedding_B"
EMBEDDING_DOWN: Final = "lora_embedding_A"

_KEY: Final = re.compile(
    r"(?P<name>.+?)(?P<end>"
    r"\.lora_(?:up|down|mid)\.weight"
    r"|[._]lora\.(?:up|down)\.weight"
    r"|\.lora_linear_layer\.(?:up|down)\.weight"
    r"|\.lora_[AB](?:(?:\.[^.]+)?\.(?:weight|bias))?"
    r"|\.lora_embedding_[AB](?:\.[^.]+)?"
    r"|\.lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?"
    r"|\.hada_(?:w[12]_[ab]|t[12])(?:\.[^.]+)?"
    r"|\.lokr_(?:w[12](?:_[ab])?|t2)(?:\.[^.]+)?"
    r"|\.(?:alpha|dora_scale|diff|diff_b|set_weight|w_norm|b_norm)"
    r")"
)
_ROLES: Final = {"lora_A": DOWN, "lora_B": UP, "down": DOWN, "up": UP}
_WRITTEN_BY_PEFT: Final = ("lora_A", "lora_B", "lora", "lora_linear_layer", MAGNITUDE, "lora_embedding_")

# They change what a weight becomes, so a reader that skips them reads a different LoRA.
_REFUSED: Final = (
    (re.compile(r".*\.(?:oft_blocks|oft_diag|oft_R)(?:\..+)?"), "an orthogonal transformation (OFT)"),
    (re.compile(r".*\.boft_[RS](?:\..+)?"), "an orthogonal transformation (BOFT)"),
    (re.compile(r".*\.(?:[ab][12]|bm)\.weight|.*\.glora_.+"), "a GLoRA factor"),
    (re.compile(r".*\.(?:on_input|ia3_l(?:\..+)?)"), "a scaling of activations (IA³)"),
    (re.compile(r".*\.vera_lambda_[bd](?:\..+)?"), "a scaling of shared factors (VeRA)"),
    (re.compile(r".*\.(?:lora_E|ranknum)(?:\..+)?"), "a factor that AdaLoRA prunes"),
    (re.compile(r".*\.reshape_weight"), "another size for the weight (reshape_weight)"),
)


@dataclass(slots=True)
class KeyGroups:
    """The keys of a LoRA file, sorted.

    Attributes:
        groups: Key by role, for each module.
        unused: Keys that belong to no module.
        by_peft: Whether some key is written as PEFT and diffusers do, and not as kohya does.
    """

    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    by_peft: bool = False


def group_keys(path: Path, keys: Iterable[str]) -> KeyGroups:
    """Sort a file's keys.

    Args:
        path: The file, for messages.
        keys: All of its keys.

    Returns:
        The modules in the file's order. Names are those of the file, without what wrappers put into them:
        `base_model.model.`, `.processor`, an adapter's name.

    Raises:
        LoraFormatError: A kind that is not read, two adapters in one file, or two keys for one role.
    """
    found, adapters = KeyGroups(), set[str]()
    for key in keys:
        _refuse(path, key)
        match = _KEY.fullmatch(key)
        if match is None:
            found.unused.append(key)
            continue
        words = match["end"].strip("._").split(".")
        role, adapter = _role(words)
        adapters.update(adapter)
        if len(adapters) > 1:
            raise LoraFormatError(
                f"{path} holds several adapters: {', '.join(sorted(adapters))}.",
                hint="Save each adapter in a file of its own.",
            )
        by_peft = words[0].startswith(_WRITTEN_BY_PEFT) and words[0] not in {
            "lora_up",
            "lora_down",
            "lora_mid",
        }
        found.by_peft |= by_peft or "base_model.model." in match["name"]
        name = _module_name(match["name"], old=match["end"].startswith("_lora."))
        group = found.groups.setdefault(name, {})
        if role in group:
            raise LoraFormatError(f"{path}: {group[role]} and {key} are the same tensor of {name}.")
        group[role] = key
    _set_aside_lone_alphas(found)
    return found


def _role(words: list[str]) -> tuple[str, list[str]]:
    """What a tensor is, and the name of its adapter if the key has one."""
    first, *rest = words
    if first in {"lora_up", "lora_down", "lora_mid"}:
        return ".".join(words), []
    if first in {"lora", "lora_linear_layer"}:
        return _ROLES[rest[0]], []
    if first in {"lora_A", "lora_B"} and rest:
        bias = rest[-1] == "bias"
        return UP_BIAS if bias else _ROLES[first], rest[:-1]
    adapter = [word for word in rest if word != "weight"]
    return _ROLES.get(first, first), adapter


def _module_name(name: str, *, old: bool) -> str:
    """A module's path without what PEFT and diffusers' attention processors put into it."""
    plain = name.replace("base_model.model.", "", 1).replace(".processor.", ".")
    if not old:
        return plain
    path, _, last = plain.rpartition(".")
    if ".self_attn" in path:  # of a text encoder: its projections were named as a UNet's are
        return f"{path}.{last.removeprefix('to_')}_proj"
    return f"{path}.{last}.0" if last == "to_out" else plain


def _refuse(path: Path, key: str) -> None:
    kind = next((what for pattern, what in _REFUSED if pattern.fullmatch(key)), None)
    if kind is not None:
        raise LoraFormatError(
            f"{path}: {key} holds {kind}, which is not read.",
            hint="Convert the file to plain LoRA factors with the tool that made it.",
        )


def _set_aside_lone_alphas(found: KeyGroups) -> None:
    """An alpha or magnitude without factors changes nothing."""
    lone = [name for name, group in found.groups.items() if group.keys() <= {ALPHA, DORA, MAGNITUDE}]
    for name in lone:
        found.unused.extend(found.groups.pop(name).values())
