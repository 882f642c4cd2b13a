"""What the tensors of one module are together: plain factors, LoHa, a difference."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sigmascope.errors import LoraFormatError
from sigmascope.lora.formats.keys import (
    ALPHA,
    DORA,
    DOWN,
    EMBEDDING_DOWN,
    EMBEDDING_UP,
    MAGNITUDE,
    MID,
    UP,
    UP_BIAS,
    KeyGroups,
)

Kind = Literal["lora", "embedding", "tucker", "loha", "lokr", "diff", "set", "up_bias"]

_PARTNERS: Final = (("lora_up", "lora_down"), ("lora_B", "lora_A"), (".up.", ".down."), ("_B", "_A"))


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


def entries_of(path: Path, found: KeyGroups) -> list[Entry]:
    """The entries of a file, in its order.

    Args:
        path: The file, for messages.
        found: Its keys. A magnitude that has nothing to act on joins the unused ones.

    Raises:
        LoraFormatError: A factor without its partner, or a module that is two things at once.
    """
    return [entry for name, group in found.groups.items() for entry in _entries(path, name, group, found)]


def _entries(path: Path, name: str, group: dict[str, str], found: KeyGroups) -> list[Entry]:
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
    found.unused.extend(key for key in group.values() if key not in used)
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
    found = {kind: {role: group[role] for role in roles if role in group} for kind, roles in by_kind.items()}
    return {kind: roles for kind, roles in found.items() if roles}


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
