"""A LoRA file's keys sorted by module: which tensor plays which role, and what they are together.

Each key is a module's name and an ending that says what the tensor is (`group_keys`). The endings are those of
kohya's and LyCORIS' tools (`.lora_up.weight`, `.alpha`, `.hada_w1_a`, `.diff`), of PEFT (`.lora_A.weight`, with the
adapter's name between in files saved from a live model) and of diffusers before it used PEFT (`.lora.up.weight`,
`.processor.to_q_lora.up.weight`, `.lora_linear_layer.up.weight`).

A module's tensors are then one or several entries (`entries_of`): plain factors, LoHa, a difference, each one change
of one tensor of the model.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

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
Kind = Literal["lora", "embedding", "tucker", "loha", "lokr", "diff", "set", "up_bias"]

_PARTNERS: Final = (("lora_up", "lora_down"), ("lora_B", "lora_A"), (".up.", ".down."), ("_B", "_A"))


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
    groups, adapters = KeyGroups(), set[str]()
    for key in keys:
        _refuse(path, key)
        match = _KEY.fullmatch(key)
        if match is None:
            groups.unused.append(key)
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
        groups.by_peft |= by_peft or "base_model.model." in match["name"]
        name = _module_name(match["name"], old=match["end"].startswith("_lora."))
        group = groups.groups.setdefault(name, {})
        if role in group:
            raise LoraFormatError(f"{path}: {group[role]} and {key} are the same tensor of {name}.")
        group[role] = key
    _set_aside_lone_alphas(groups)
    return groups


def _refuse(path: Path, key: str) -> None:
    kind = next((what for pattern, what in _REFUSED if pattern.fullmatch(key)), None)
    if kind is not None:
        raise LoraFormatError(
            f"{path}: {key} holds {kind}, which is not read.",
            hint="Convert the file to plain LoRA factors with the tool that made it.",
        )


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


def _set_aside_lone_alphas(groups: KeyGroups) -> None:
    """An alpha or magnitude without factors changes nothing."""
    lone = [name for name, group in groups.groups.items() if group.keys() <= {ALPHA, DORA, MAGNITUDE}]
    for name in lone:
        groups.unused.extend(groups.groups.pop(name).values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One change of one tensor of the model, still in its file.

    Attributes:
        name: Its name in `LoraFile.modules` or `LoraFile.changes`.
        module: Name of the file's module that it is part of.
        kind: What its tensors are.
        roles: Key of each tensor, by role.
        alpha: Key of the alpha.
        magnitude: Key of DoRA's magnitudes; they make any kind of change a `dora`.
        by_peft: Whether the magnitudes are as PEFT writes them, which is always per output.
    """

    name: str
    module: str
    kind: Kind
    roles: Mapping[str, str]
    alpha: str | None = None
    magnitude: str | None = None
    by_peft: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is plain factors, and so one of `LoraFile.modules`."""
        return self.magnitude is None and self.kind in {"lora", "embedding"}


def entries_of(path: Path, groups: KeyGroups) -> list[Entry]:
    """The entries of a file, in its order.

    Args:
        path: The file, for messages.
        groups: Its keys. A magnitude that has nothing to act on joins the unused ones.

    Raises:
        LoraFormatError: A factor without its partner, or a module that is two things at once.
    """
    return [entry for name, group in groups.groups.items() for entry in _entries(path, name, group, groups)]


def _entries(path: Path, name: str, group: dict[str, str], groups: KeyGroups) -> list[Entry]:
    kinds = _kinds(group)
    if len(kinds) > 1:
        raise LoraFormatError(
            f"{path}: {name} is {' and '.join(kinds)} at once.",
            hint="Which of them is meant cannot be told: make the file again.",
        )
    magnitudes = [role for role in (DORA, MAGNITUDE) if role in group]
    entries = []
    for kind, roles in kinds.items():
        if kind in {"lora", "embedding", "tucker"}:
            _require_partners(path, name, group, kind)
        scaled = kind not in {"diff", "set"}
        magnitude = group[magnitudes[0]] if magnitudes and scaled else None
        alpha = group.get(ALPHA) if scaled else None
        by_peft = bool(magnitudes) and magnitudes[0] == MAGNITUDE
        entries.append(Entry(name, name, kind, roles, alpha, magnitude, by_peft))
    entries += _bias_entries(name, group)
    used = {key for entry in entries for key in (*entry.roles.values(), entry.alpha, entry.magnitude)}
    groups.unused.extend(key for key in group.values() if key not in used)
    return entries


def _kinds(group: Mapping[str, str]) -> dict[Kind, dict[str, str]]:
    """The roles of each kind of weight change that a module has tensors of."""
    plain: Kind = "tucker" if MID in group else "lora"
    by_kind: dict[Kind, tuple[str, ...]] = {
        plain: (UP, DOWN, MID),
        "embedding": (EMBEDDING_UP, EMBEDDING_DOWN),
        "loha": tuple(role for role in group if role.startswith("hada_")),
        "lokr": tuple(role for role in group if role.startswith("lokr_")),
        "diff": ("diff", "w_norm"),
        "set": ("set_weight",),
    }
    keys_by_kind = {
        kind: {role: group[role] for role in roles if role in group} for kind, roles in by_kind.items()
    }
    return {kind: roles for kind, roles in keys_by_kind.items() if roles}


def _bias_entries(name: str, group: Mapping[str, str]) -> list[Entry]:
    """Changes of the bias: a difference, or the bias of the up factor, which takes part in its scale."""
    entries = [
        Entry(f"{name}.bias", name, "diff", {role: group[role]})
        for role in ("diff_b", "b_norm")
        if role in group
    ]
    if UP_BIAS in group and DOWN in group:
        roles = {UP_BIAS: group[UP_BIAS], DOWN: group[DOWN]}
        entries.append(Entry(f"{name}.bias", name, "up_bias", roles, group.get(ALPHA)))
    return entries


def _require_partners(path: Path, name: str, group: Mapping[str, str], kind: Kind) -> None:
    needed = (EMBEDDING_UP, EMBEDDING_DOWN) if kind == "embedding" else (UP, DOWN)
    missing = [role for role in needed if role not in group]
    if not missing:
        return
    there = next(group[role] for role in (*needed, MID) if role in group)
    ending = there.removeprefix(name).strip("._")
    raise LoraFormatError(
        f"{path}: {name} has {ending} but no {_partner(ending) or missing[0]}.",
        hint="The file is incomplete: make it again, or take the whole module out.",
    )


def _partner(ending: str) -> str | None:
    """How the same file would write the other factor's ending."""
    dotted = f".{ending}"
    for up, down in _PARTNERS:
        for this, other in ((up, down), (down, up)):
            if this in dotted:
                return dotted.replace(this, other, 1).removeprefix(".")
    return None
