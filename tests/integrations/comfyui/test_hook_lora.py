import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import LoRAAdapter, lora_adapter, lora_parts
from tests.comfy_shapes.beside import Hook, HookGroup
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node, latent
from tests.integrations.comfyui.test_nodes import nodes


class Patcher(ModelPatcher):
    """A patcher that merges hooks as ComfyUI does: it keeps the weight, and changes it in place."""

    is_clip = False

    def register_all_hook_patches(self, hooks: Any, target_dict: Any) -> None:
        for hook in hooks.hooks:
            self.hook_patches[hook.hook_ref] = {Q: [1.0]}

    def patch_hook_weight_to_device(self, hooks: Any, combined_patches: Any, key: str) -> None:
        weight = self.model.get_parameter(key)
        self.hook_backup[key] = (weight.detach().clone(), weight.device)
        with torch.no_grad():
            weight += combined_patches[key][0]


@pytest.mark.parametrize(
    ("strength", "change", "merges", "used", "of", "says"),
    [
        pytest.param(1.0, 0.5, True, 1, 2, "1 of 2 modules used", id="acts"),
        pytest.param(
            1.0,
            0.0,
            True,
            0,
            2,
            "0 of 2 modules used; ComfyUI merged it, and no weight became another one",
            id="changes nothing",
        ),
        pytest.param(
            1.0, 0.5, False, 0, 2, "in force for no text that was encoded and no step", id="not in force"
        ),
        pytest.param(
            1.0, 0.5, None, 0, None, "no node that encodes a text or samples takes it", id="not taken"
        ),
        pytest.param(0.0, 0.5, True, 0, None, "both strengths are 0", id="strength 0"),
    ],
)
def test_a_hook_is_judged_by_the_weights_that_it_is_merged_into(
    watch: Watch, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    strength: float, change: float, merges: bool | None, used: int, of: int | None, says: str,
) -> None:  # fmt: skip
    file = tmp_path / "hook.safetensors"
    parts = {"lora_B.weight": torch.ones(8, 2), "lora_A.weight": torch.ones(2, 8)}
    names = ("diffusion_model.middle_block.0.to_q", "diffusion_model.no_such_block")
    save_file({f"{name}.{part}": value.clone() for name in names for part, value in parts.items()}, file)
    folders = SimpleNamespace(
        get_full_path=lambda _kind, _name: str(file), get_user_directory=lambda: str(tmp_path)
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    host.module("comfy.model_patcher").ModelPatcher = type(
        "ModelPatcher", (ModelPatcher,), dict(vars(Patcher))
    )
    patcher = host.module("comfy.model_patcher").ModelPatcher(BaseModel())

    def make(lora_name: str, strength_model: float, strength_clip: float) -> Any:
        return (HookGroup(Hook()) if strength_model else HookGroup(),)

    def sample(hooks: HookGroup) -> Any:
        if merges is not None:
            patcher.register_all_hook_patches(hooks, {})
        if merges and hooks.hooks:
            patcher.patch_hook_weight_to_device(hooks, {Q: [change]}, Q)
        return (latent(),)

    host.nodes |= {"Hook": Node(("HOOKS",), make), "Sample": Node(("LATENT",), sample)}
    strengths = {"strength_model": strength, "strength_clip": strength}
    run = watch().run(
        {
            "1": {"class_type": "Hook", "inputs": {"lora_name": "hook.safetensors", **strengths}},
            "2": {"class_type": "Sample", "inputs": {"hooks": ["1", 0]}},
        }
    )
    (verdict,) = nodes(run)["1"].facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (used > 0, used, of)
    assert says in verdict["says"]
    assert "lora_verdicts" not in nodes(run)["2"].facts


LORA, ZEROS = lora_adapter(), LoRAAdapter(set(), (torch.zeros(8, 2), *lora_parts()[1:]))
OPPOSITE = LoRAAdapter(set(), (-lora_parts()[0], *lora_parts()[1:]))


class Merging(ModelPatcher):
    """A patcher that merges hooks as ComfyUI does: it takes those out first that were in force, and adds in float32."""

    is_clip = False

    def register_all_hook_patches(self, hooks: Any, target_dict: Any) -> None: ...

    def patch_hook_weight_to_device(self, hooks: Any, combined_patches: Any, key: str) -> None:
        weight = self.model.get_parameter(key)
        if key in self.hook_backup:
            weight.data.copy_(self.hook_backup[key][0])
        self.hook_backup[key] = (weight.detach().clone(), weight.device)
        for strength, adapter in combined_patches[key]:
            weight.data += strength * adapter.weights[0] @ adapter.weights[1]


Moment = dict[str, float]
"""Which hooks are in force, each with the strength that its schedule has then."""


@pytest.mark.parametrize(
    ("adapters", "moments", "acting", "says"),
    [
        pytest.param([LORA], [{"1": 1.0}, {"1": 0.0}], "1", "", id="a schedule that ends"),
        pytest.param([LORA], [{"1": 0.0}, {"1": 1.0}], "1", "", id="a schedule that begins later"),
        pytest.param([LORA], [{"1": 0.0}], "", "its schedule has strength 0", id="a schedule of 0"),
        pytest.param([LORA, ZEROS], [{"1": 1.0}, {"2": 1.0}], "1", "", id="one on each conditioning"),
        pytest.param([ZEROS, LORA], [{"1": 1.0}, {"2": 1.0}], "2", "", id="the other way round"),
        pytest.param([LORA, ZEROS], [{"1": 1.0, "2": 1.0}], "1", "", id="both at once"),
        pytest.param([LORA, LORA], [{"1": 1.0, "2": 0.0}], "1", "", id="one of both is off"),
        pytest.param([LORA, LORA], [{"1": 0.5, "2": 0.5}], "12", "", id="the same twice"),
        pytest.param([LORA, OPPOSITE], [{"1": 1.0, "2": 1.0}], "", "cancel each other", id="opposites"),
    ],
)
def test_of_several_hooks_and_moments_each_hook_is_judged_by_those_that_it_was_in_force_for(
    watch: Watch, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    adapters: list[Any], moments: list[Moment], acting: str, says: str,
) -> None:  # fmt: skip
    file = tmp_path / "hook.safetensors"
    parts = {"lora_B.weight": torch.ones(8, 2), "lora_A.weight": torch.ones(2, 8)}
    save_file({f"diffusion_model.middle_block.0.to_q.{name}": part for name, part in parts.items()}, file)
    folders = SimpleNamespace(
        get_full_path=lambda _kind, _name: str(file), get_user_directory=lambda: str(tmp_path)
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    host.module("comfy.model_patcher").ModelPatcher = type("ModelPatcher", (ModelPatcher,), {**vars(Merging)})
    patcher = host.module("comfy.model_patcher").ModelPatcher(BaseModel())
    made = {str(number): Hook() for number in range(1, len(adapters) + 1)}
    patcher.hook_patches = {
        hook.hook_ref: {Q: [(1.0, adapter, 1.0, None, None)]}
        for hook, adapter in zip(made.values(), adapters, strict=True)
    }

    def sample(**_: HookGroup) -> Any:
        patcher.register_all_hook_patches(HookGroup(*made.values()), {})
        for moment in moments:
            for name, strength in moment.items():
                made[name].strength = strength
            combined = [(strength, adapters[int(name) - 1]) for name, strength in moment.items()]
            hooks = HookGroup(*(made[name] for name in moment))
            patcher.patch_hook_weight_to_device(hooks, {Q: combined}, Q)
        return (latent(),)

    host.nodes |= {
        "Hook": Node(("HOOKS",), lambda lora_name, number: (HookGroup(made[number]),)),
        "Sample": Node(("LATENT",), sample),
    }
    nodes_of_hooks = {
        name: {"class_type": "Hook", "inputs": {"lora_name": f"{name}.safetensors", "number": name}}
        for name in made
    }
    links = {f"hooks{name}": [name, 0] for name in made}
    run = watch().run({**nodes_of_hooks, "9": {"class_type": "Sample", "inputs": links}})
    verdicts = {name: nodes(run)[name].facts["lora_verdicts"][0] for name in made}
    assert {name for name, verdict in verdicts.items() if verdict["effective"]} == set(acting)
    assert all(says in verdict["says"] for verdict in verdicts.values())
