"""What is wrong with a LoRA by its stored tensors alone: broken modules, damage, dead, collapsed and over-strong modules, spikes.

Sound LoRAs differ by orders of magnitude from layer to layer, so no size is wrong in itself. A module is held to its peers:
the same layer in other blocks. It stands out if it is `_FAR` times the median of theirs, and beyond what their own spread
explains (six standard deviations, estimated from the median deviation of the logarithms).

A tensor is called damaged where lost or changed bytes explain its numbers and training does not: a number far above both
its peers' largest and its own line (the row or column of the longer axis), or a run of zeros that is no row and no column.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import exp, log
from statistics import median
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.lora.file import LoraFile
from sigmascope.lora.linalg import is_finite, root_sum_square
from sigmascope.lora.module_strength import ModuleStrength, TensorFacts, stored_tensors
from sigmascope.lora.verdict import VERDICTS, verdict_finding
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import counted, first_few

__all__ = ["broken_config", "broken_findings", "dead_modules", "health_findings"]

_NEAR_ZERO_RATIO: Final = 1e-3
"""A module whose values are this small relative to the median module's has no visible effect."""
_FAR: Final = 20.0
_DEVIATIONS: Final = 6.0
_FEWEST_PEERS: Final = 4
_SPIKE: Final = 10.0
"""How far σ₁ of a spike is above σ₂."""
_LEAST_COLLAPSIBLE_RANK: Final = 4
_COLLAPSED_SHARE: Final = 0.05
_MOST_COLLAPSED: Final = 2.0
"""A module is collapsed if its effective rank is at most 1 and this share of its other directions, or at most 2."""
_ABOVE_PEERS: Final = 16.0
"""How far a number is above the largest of its peers before it is looked at."""
_ABOVE_LINE: Final = 100.0
"""How far a damaged number is above the median of its line; of millions of normal numbers the largest is 8 times that."""
_ALONE: Final = 1000.0
"""The same where there are no peers."""
_MOST_NAMED: Final = 3
_NUMBER: Final = re.compile(r"\d+")
_LARGEST_EXPONENT: Final = 700.0
_MAD_TO_DEVIATION: Final = 1.4826

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class _Stored(NamedTuple):
    """A tensor of a module."""

    module: str
    facts: TensorFacts


def dead_modules(modules: Sequence[ModuleStrength]) -> tuple[str, ...]:
    """Modules whose values are zero, or a thousand times smaller than the median module's."""
    sizes = {module.name: module.size for module in modules if module.size is not None}
    middle = median(size for size in sizes.values() if size > 0.0) if any(sizes.values()) else 0.0
    return tuple(name for name, size in sizes.items() if size <= _NEAR_ZERO_RATIO * middle)


def health_findings(
    modules: Sequence[ModuleStrength], lora: LoraFile, checkpoint: Checkpoint
) -> Iterator[Finding]:
    """What the numbers say is wrong, the worst first.

    Args:
        modules: All of the file, measured.
        lora: The open file; suspicious modules are read once more.
        checkpoint: The same file.
    """
    yield from _not_finite(modules, checkpoint)
    damaged = dict(_damage(modules, lora))
    yield from _damaged(damaged, len(modules))
    sound = [module for module in modules if module.name not in damaged]
    spiking = dict(_spiking_layers(sound)) | dict(_spikes(sound))
    yield from _of_modules("lora_spikes", spiking, len(modules))
    dead = [name for name in dead_modules(sound) if any(module.norm for module in sound)]
    even = [module for module in sound if module.name not in spiking]
    yield from _over_strong(
        [module for module in even if module.name not in dead]
    )  # beside them all is strong
    yield from _collapsed(even, len(modules))
    yield from _of_modules("lora_dead_modules", dict.fromkeys(dead), len(modules))


def broken_findings(lora: LoraFile) -> Iterator[Finding]:
    """What of a file cannot be read: modules, and PEFT's configuration.

    Args:
        lora: As it is in the file.
    """
    if lora.broken:
        row, modules = VERDICTS["lora_broken"], len(lora.names) + len(lora.broken)
        named = [f"{name} ({part.why})" for name, part in lora.broken.items()]
        yield verdict_finding(
            "lora_broken",
            {"modules": len(named), "of": modules, "first": next(iter(lora.broken))},
            count=len(named),
            modules=counted(modules, "module"),
            words=row.words(len(named)),
            families="",
            first=first_few(named, _MOST_NAMED),
        )
    yield from broken_config(lora)


def broken_config(lora: LoraFile) -> Iterator[Finding]:
    """That PEFT's configuration of a file cannot be read."""
    if lora.broken_config is not None:
        yield verdict_finding(
            "lora_config_unread", why=lora.broken_config.why, advice=lora.broken_config.hint or ""
        )


def _not_finite(modules: Sequence[ModuleStrength], checkpoint: Checkpoint) -> Iterator[Finding]:
    names = [module.name for module in modules if module.problem == "not_finite"]
    if names:
        where = [text for name in names[:_MOST_NAMED] for text in _where_not_finite(name, checkpoint)][
            :_MOST_NAMED
        ]
        hold = "holds" if len(names) == 1 else "hold"
        yield verdict_finding(
            "lora_not_finite",
            {"modules": len(names), "first": names[0], "where": "; ".join(where)},
            holders=f"{len(names)} of {counted(len(modules), 'module')} {hold}",
            first=first_few(where or names, _MOST_NAMED, between="; "),
        )


def _where_not_finite(module: str, checkpoint: Checkpoint) -> Iterator[str]:
    for key in checkpoint:
        if f"{module.removesuffix('.bias')}." in key:
            tensor = checkpoint.tensor(key)
            wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
            if wide.is_floating_point() and not is_finite(wide):
                bad = (~torch.isfinite(wide)).nonzero()
                where = f", {len(bad)} of {counted(wide.numel(), 'number')} from {bad[0].tolist()}"
                yield f"{key}{where if wide.ndim else f' = {float(wide)}'}"


def _damage(modules: Sequence[ModuleStrength], lora: LoraFile) -> Iterator[tuple[str, str]]:
    """Damaged modules, and what is wrong in words."""
    stored = [
        _Stored(module.name, facts) for module in modules for facts in module.tensors if facts.norm > 0.0
    ]
    near = _medians(stored, lambda one: (_role(one.module), one.facts.part))
    like = _medians(stored, lambda one: ("", one.facts.part))
    for one in stored:
        facts = one.facts
        if facts.hole is not None:
            start, length = facts.hole
            yield one.module, f"{facts.part} has {length} zeros from element {start}"
            continue
        peers = near.get((_role(one.module), facts.part)) or like.get(("", facts.part))
        if peers is None or facts.largest > _ABOVE_PEERS * peers:
            tensor = stored_tensors(lora.change(one.module)).get(facts.part)
            line = None if tensor is None else _line_median(tensor)
            if line and facts.largest > (_ALONE if peers is None else _ABOVE_LINE) * line:
                yield (
                    one.module,
                    f"{facts.part} has a number of {facts.largest:.3g} among numbers near {line:.3g}",
                )


def _medians(stored: Sequence[_Stored], key: Callable[[_Stored], Key]) -> dict[Key, float]:
    """The median of the tensors' largest numbers by group, of groups that are large enough to tell."""
    return {
        group: median(one.facts.largest for one in members)
        for group, members in _groups(stored, key).items()
        if len(members) > _FEWEST_PEERS
    }


def _line_median(tensor: Tensor) -> float | None:
    """The median absolute value of the line, along the longer axis, that holds the largest; None for too short a line."""
    matrix = tensor.reshape(tensor.shape[0], -1).abs() if tensor.ndim > 1 else tensor.abs().reshape(1, -1)
    matrix = matrix if matrix.shape[1] >= matrix.shape[0] else matrix.mT
    if matrix.shape[1] < 16:
        return None
    row = int(matrix.amax(dim=1).argmax())
    return float(matrix[row].median())


def _damaged(damaged: Mapping[str, str], modules: int) -> Iterator[Finding]:
    if damaged:
        named = [f"{name} ({why})" for name, why in damaged.items()]
        yield verdict_finding(
            "lora_damaged",
            {"modules": len(damaged), "of": modules, "first": named[0]},
            count=f"{len(damaged)} of {counted(modules, 'module')}",
            first=first_few(named, _MOST_NAMED),
        )


def _spikes(modules: Sequence[ModuleStrength]) -> Iterator[tuple[str, float]]:
    """Modules of which one direction is far above the strongest of their peers, with how many times."""
    largest = {module.name: module.largest for module in modules if module.largest}
    for name, times in _far_above({name: (value, _role(name)) for name, value in largest.items()}):
        module = next(module for module in modules if module.name == name)
        if len(module.singular_values) > 1 and (module.spike is None or module.spike > _SPIKE):
            yield name, times


def _spiking_layers(modules: Sequence[ModuleStrength]) -> Iterator[tuple[str, float]]:
    """Modules of a layer that spikes in every block while the others do not, with σ₁ over the others' median."""
    groups = _groups([module for module in modules if module.spike], lambda module: _role(module.name))
    for role, group in groups.items():
        others = [module for other, members in groups.items() if other != role for module in members]
        if min(len(group), len(others)) > _FEWEST_PEERS:
            spike, largest = (_middle(group, name) for name in ("spike", "largest"))
            calm, middle = (_middle(others, name) for name in ("spike", "largest"))
            if spike > _SPIKE and calm < _SPIKE / 2 and largest > _SPIKE / 2 * middle:
                yield from ((module.name, (module.largest or 0.0) / middle) for module in group)


def _middle(modules: Sequence[ModuleStrength], name: str) -> float:
    return float(median(getattr(module, name) for module in modules))


def _over_strong(modules: Sequence[ModuleStrength]) -> Iterator[Finding]:
    sizes = {module.name: (module.size, _role(module.name)) for module in modules if module.size}
    found = dict(_far_above(sizes))
    blocks = dict(_strong_blocks(modules))
    inside = {module.name for module in modules if module.block in blocks}
    told = {**{f"{name}, the whole block": times for name, times in blocks.items()}}
    told |= {name: times for name, times in found.items() if name not in inside}
    if told:
        total = root_sum_square([module.norm for module in modules if module.norm])
        strong = [
            module.norm
            for module in modules
            if module.norm and (module.name in found or module.name in inside)
        ]
        first, times = max(told.items(), key=lambda item: item[1])
        yield verdict_finding(
            "lora_over_strong",
            {
                "blocks": len(blocks),
                "modules": len(told) - len(blocks),
                "first": first,
                "times": times,
                "share": (root_sum_square(strong) / total) ** 2,
            },
            first=first_few([f"{name} ({times:.0f} times)" for name, times in told.items()], _MOST_NAMED),
        )


def _strong_blocks(modules: Sequence[ModuleStrength]) -> Iterator[tuple[str, float]]:
    """Blocks whose median module is far above its peers: each module is held to the median of its role."""
    sized = [module for module in modules if module.size]
    middles = {
        role: median(module.size or 0.0 for module in group)
        for role, group in _groups(sized, lambda module: _role(module.name)).items()
    }
    ratios = {
        block: (median((module.size or 0.0) / middles[_role(module.name)] for module in group), _role(block))
        for block, group in _groups(sized, lambda module: module.block).items()
        if len(group) > 1
    }
    yield from _far_above(ratios)


def _far_above(values: Mapping[str, tuple[float, str]]) -> Iterator[tuple[str, float]]:
    """Names whose value is far above their group's, and how many times its median; small groups are held to all.

    The spread is that of all groups around their own medians: of a group of eight it is too uncertain.
    """
    whole = [value for value, _ in values.values()]
    if len(whole) <= _FEWEST_PEERS:
        return
    groups = _groups(list(values.values()), lambda item: item[1])
    middles = {
        role: median([value for value, _ in members] if len(members) > _FEWEST_PEERS else whole)
        for role, members in groups.items()
    }
    times = {name: value / middles[role] for name, (value, role) in values.items()}
    spread = _MAD_TO_DEVIATION * median(abs(log(ratio)) for ratio in times.values())
    limit = exp(max(log(_FAR), min(_DEVIATIONS * spread, _LARGEST_EXPONENT)))
    yield from ((name, ratio) for name, ratio in times.items() if ratio > limit)


def _collapsed(modules: Sequence[ModuleStrength], of: int) -> Iterator[Finding]:
    found: dict[str, tuple[float, int]] = {}
    for module in modules:
        rank = len(module.singular_values)
        most = min(1.0 + _COLLAPSED_SHARE * (rank - 1), _MOST_COLLAPSED)
        if rank >= _LEAST_COLLAPSIBLE_RANK and 0.0 < (module.effective_rank or 0.0) <= most:
            found[module.name] = (module.effective_rank or 0.0, rank)
    if found:
        named = [f"{name} ({effective:.2f} of {rank})" for name, (effective, rank) in found.items()]
        yield verdict_finding(
            "lora_rank_collapse",
            {
                "modules": len(found),
                "of": of,
                "first": named[0],
                "effective_rank": median(effective for effective, _ in found.values()),
            },
            count=f"{len(found)} of {counted(of, 'module')} {'uses' if len(found) == 1 else 'use'}",
            first=first_few(named, _MOST_NAMED),
        )


def _of_modules(id: str, found: Mapping[str, float | None], modules: int) -> Iterator[Finding]:
    if found:
        named = [name if times is None else f"{name} ({times:.0f} times)" for name, times in found.items()]
        evidence: dict[str, JsonScalar] = {"modules": len(found), "of": modules, "first": named[0]}
        yield verdict_finding(
            id,
            evidence,
            count=f"{len(found)} of {counted(modules, 'module')}",
            first=first_few(named, _MOST_NAMED),
        )


@lru_cache(maxsize=4096)
def _role(name: str) -> str:
    """The same for a layer in every block."""
    return _NUMBER.sub("#", name)


def _groups(items: Sequence[Item], key: Callable[[Item], Key]) -> "dict[Key, list[Item]]":
    found: defaultdict[Key, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)
