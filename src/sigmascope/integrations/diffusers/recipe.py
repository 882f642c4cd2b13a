"""What a call was made with beside its arguments: which weights, and which LoRAs from which files.

`models_of` gives each model's fingerprint, `loras_of` each LoRA with its strength and the hash of its tensors; both read
weights, so they are for after a call, and do not wait for an accelerator. `LoraFiles` remembers what `LoraObserver` heard being loaded: the SHA-256 of
an adapter's file, as download pages give it.
"""

import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sigmascope.monitor.hooks import ByIdentity
from sigmascope.probes.copies import Pending
from sigmascope.probes.joined_projections import bypassed_layers
from sigmascope.probes.model_fingerprints import (
    begin_adapter_fingerprint,
    begin_combined_fingerprint,
    begin_model_fingerprint,
    known,
    state_of,
)
from sigmascope.probes.models import components_of, unwrap
from sigmascope.probes.module_tree import once_a_look, tree_of
from sigmascope.probes.peft import adapter_states, adapters_of, configs_of, held_by, number_for, standings_in
from sigmascope.probes.reading import Reading, attempt

_ATTACHING: Final = "sigmascope.lora.apply"
"""Where `attach_lora` is: without it nothing is attached."""
_MOST_FILE_BYTES: Final = 2**30
"""Hashing so much takes half a second."""


Content = Pending[Reading[str]]
"""A fingerprint that may still be on its way, or why there is none."""


States = dict[str, Reading[int]]
"""What tells that a component's weights are still the same, by the component's name."""


def weights_states(pipeline: object) -> States:
    """The state of each component's weights, for `models_of` and `loras_of`: these do not look for it again then."""
    return {name: state_of(module) for name, module in models_in(pipeline).items()}


def models_of(
    pipeline: object, why_not: str | None = None, states: States | None = None
) -> dict[str, Content]:
    """The fingerprint of each component with weights, without LoRAs, or why there is none.

    Args:
        pipeline: What is made of components, or a model alone.
        why_not: Why weights must not be read; None: they may be.
        states: Of the components just now, if they are known.
    """
    states = states or {}
    return {
        name: begin_model_fingerprint(module, states.get(name))
        if why_not is None
        else known(Reading(None, why_not))
        for name, module in models_in(pipeline).items()
    }


class LoraFiles:
    """From which file each adapter of each model came, as far as any watch of this process has seen it."""

    def __init__(self) -> None:
        self._by_model: ByIdentity[dict[str, dict[str, str | None]]] = ByIdentity()

    def loaded(
        self,
        path: str | None,
        before: Mapping[str, frozenset[str]],
        target: object,
        adapter: object = None,
    ) -> None:
        """Note that a LoRA was loaded.

        Args:
            path: The file; None if there was none, or if it is unknown.
            before: What `adapters_in` gave before.
            target: The pipeline or model that it was loaded into.
            adapter: The name that was asked for, where an adapter of that name may have been there before.
        """
        sha256 = None if path is None else attempt(lambda: _sha256(path)).value
        for name, part in models_in(target).items():
            now = adapters_in(part)["denoiser"]
            known = dict(self._by_model.get(part) or {})
            for came in (now - before.get(name, frozenset())) | (now & {adapter}):
                known.pop(came, None)
                if path is not None:
                    known[came] = {"file": Path(path).name, "sha256": sha256}
            self._by_model.put(part, known)

    def of(self, model: nn.Module, adapter: str) -> dict[str, str | None]:
        """`file`, its name, and `sha256` of its content (None: it could not be read); nothing where nobody knows."""
        return (self._by_model.get(model) or {}).get(adapter, {})


LORA_FILES: Final = LoraFiles()


def _sha256(path: str) -> str | None:
    status = Path(path).stat()
    return (
        _sha256_of(path, status.st_size, status.st_mtime_ns) if status.st_size <= _MOST_FILE_BYTES else None
    )


@lru_cache(maxsize=64)
def _sha256_of(path: str, _size: int, _changed_at: int) -> str:
    from sigmascope.checkpoints import file_sha256  # only where a LoRA is loaded

    return file_sha256(path)


def adapters_in(target: object) -> dict[str, frozenset[str]]:
    """The names of the adapters that PEFT has on each model of a pipeline, or on a model alone."""
    return {name: frozenset(map(str, configs_of(part))) for name, part in models_in(target).items()}


def models_in(target: object) -> Mapping[str, nn.Module]:
    """The models of a pipeline by name, or a model alone as "denoiser", without what torch.compile put around them."""
    return once_a_look("models", target, lambda: _models_in(target))


def _models_in(target: object) -> dict[str, nn.Module]:
    parts = components_of(target) or {"denoiser": target}
    found = {str(name): unwrap(part) for name, part in parts.items() if isinstance(part, nn.Module)}
    return {name: module for name, module in found.items() if module is not None}


def loras_of(
    pipeline: object,
    why_not: str | None = None,
    states: States | None = None,
    only: Collection[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """The LoRAs that PEFT runs in a pipeline, by component and adapter, "unet.style", and those that `attach_lora` put on.

    Args:
        pipeline: What is made of components.
        why_not: Why weights must not be read; None: they may be.
        states: Of the components just now, if they are known.
        only: Of which components; None: of all.

    Returns:
        Of each the least and the largest `strength` of its layers (scale · rank / alpha, of rsLoRA scale · √rank / alpha; None: a layer keeps none), its
        number of `layers`, in how many of them it is `active` (not of strength 0, unless it is a DoRA) or merged (`merged`, where it is), the hash of its `content`, and of its file the
        name and SHA-256 where these are known.
    """
    loras: dict[str, dict[str, Any]] = {}
    for name, module in models_in(pipeline).items():
        if only is not None and name not in only:
            continue
        if configs_of(module):
            for adapter, facts in _adapters_of(module).items():
                begun = (
                    begin_adapter_fingerprint(module, adapter, (states or {}).get(name))
                    if why_not is None
                    else None
                )
                content = {"content": begun or known(Reading(None, why_not))}
                loras[f"{name}.{adapter}"] = {**facts, **content, **LORA_FILES.of(module, adapter)}
        loras |= attached_loras(name, module)
    return loras


def strengths_of(model: nn.Module, adapters: Collection[str]) -> dict[str, tuple[float, float]]:
    """The least and the largest strength of the layers of each of these adapters that has one."""
    return {
        name: held["strength"]
        for name, held in _adapters_of(model).items()
        if name in adapters and held["strength"]
    }


def _adapters_of(module: nn.Module) -> Mapping[str, dict[str, Any]]:
    """The facts of each adapter over all layers; those of the last time if every layer stands as it did then."""
    tree = tree_of(module)
    layers, standing, tells = standings_in(tree)
    bypassed = bypassed_layers(module)
    kept: list[Any] = tree.derive("adapters", list)
    is_same = attempt(lambda: bool(kept) and tells and kept[:2] == [bypassed, standing])
    if not is_same.value:
        adapters: dict[str, dict[str, Any]] = {}
        for place in layers:
            layer = tree.modules[place]
            _add_lora_layer(adapters, layer, is_run=id(layer) not in bypassed)
        kept[:] = bypassed, [(*map(_copied, held),) for held in standing], adapters
    facts: Mapping[str, dict[str, Any]] = kept[2]
    return facts


def _copied(held: object) -> object:
    """What a layer keeps, as it is now."""
    return dict(held) if isinstance(held, dict) else list(held) if isinstance(held, list) else held


def _add_lora_layer(adapters: dict[str, dict[str, Any]], layer: nn.Module, *, is_run: bool) -> None:
    standing = adapter_states(layer)
    for adapter in adapters_of(layer):
        scale, rank, alpha = (number_for(layer, name, adapter) for name in ("scaling", "r", "lora_alpha"))
        alpha = number_for(layer, "alpha", adapter) if alpha is None else alpha  # of LoHa and LoKr
        divisor = sqrt(rank) if rank and held_by(layer, "use_rslora", adapter) is True else rank
        strength = scale if scale is None or not divisor or not alpha else round(scale * divisor / alpha, 6)
        lora = adapters.setdefault(adapter, {"strength": None, "layers": 0, "active": 0})
        if strength is not None:
            least, most = lora["strength"] or (strength, strength)
            lora["strength"] = (min(least, strength), max(most, strength))
        lora["layers"] += 1
        is_on = is_run and adapter in standing.active and not standing.disabled
        is_dora = held_by(layer, "lora_magnitude_vector", adapter) is not None  # it acts at 0 too
        runs = is_on and not standing.merged and (scale != 0.0 or is_dora)
        lora["active"] += runs or adapter in standing.merged
        if adapter in standing.merged:
            lora["merged"] = lora.get("merged", 0) + 1


_ATTACHED_CONTENT: "WeakKeyDictionary[Any, Content]" = WeakKeyDictionary()
"""Of each LoRA that is attached: its factors never change."""


def attached_loras(component: str, module: nn.Module) -> dict[str, dict[str, Any]]:
    """What `attach_lora` put on a model, by the names of the files."""
    loras: dict[str, dict[str, Any]] = {}
    for name, lora in _attached(component, module).items():
        content = _ATTACHED_CONTENT.get(lora.handle)
        if content is None:
            content = _ATTACHED_CONTENT[lora.handle] = _of_factors(lora.factors)
        loras[name] = {
            "strength": (lora.scale, lora.scale),
            "layers": len(lora.layers),
            "active": len(lora.layers) if lora.scale else 0,
            "content": content,
        }
    return loras


def attached_layers(component: str, module: nn.Module) -> dict[str, list[str]]:
    """The layers on which each of these acts, by the same names."""
    return {name: [*lora.layers] if lora.scale else [] for name, lora in _attached(component, module).items()}


def _attached(component: str, module: nn.Module) -> dict[str, Any]:
    attaching = sys.modules.get(_ATTACHING)
    found: dict[str, Any] = {}
    for lora in [] if attaching is None else attaching.attached_to(module):
        name = "attached" if lora.path is None else lora.path.stem
        while f"{component}.{name}" in found:
            name += "'"
        found[f"{component}.{name}"] = lora
    return found


def _of_factors(factors: Mapping[str, tuple[Tensor, Tensor, float]]) -> Content:
    tensors = {
        f"{name}.{part}": tensor
        for name, (up, down, _) in factors.items()
        for part, tensor in (("up", up), ("down", down))
    }
    return begin_combined_fingerprint(tensors, [(name, factors[name][2]) for name in sorted(factors)])
