"""LoRAs of nodes that do not run again, and of models that no node uses: on stand-ins."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.beside import BypassForwardHook, BypassInjectionManager, Hook, HookGroup
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node, latent
from tests.integrations.comfyui.test_hook_lora import Patcher
from tests.integrations.comfyui.test_nodes import nodes

from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.history.row import row_of
from sigmascope.integrations.comfyui.browser import view_of
from sigmascope.integrations.comfyui.lora import _calls
from sigmascope.integrations.comfyui.models_in_use import doubt_of
from sigmascope.integrations.comfyui.one_line import line_of
from sigmascope.integrations.comfyui.posted_graph import link_of, signature_of
from sigmascope.records.run import Run
from sigmascope.reports.measurements import measured


@pytest.fixture
def host_with_lora(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host that loads a model, puts a LoRA on it or makes a hook of it, chooses between two models, and samples."""
    file = tmp_path / "style.safetensors"
    up, down, alpha, *_ = lora_parts()
    parts = {"lora_B.weight": up, "lora_A.weight": down, "alpha": torch.tensor(alpha)}
    save_file({f"{Q.removesuffix('.weight')}.{part}": value for part, value in parts.items()}, file)
    folders = SimpleNamespace(
        get_full_path=lambda _kind, _name: str(file), get_user_directory=lambda: str(tmp_path)
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    module = host.module("comfy.model_patcher")
    module.ModelPatcher = type("ModelPatcher", (ModelPatcher,), dict(vars(Patcher)))

    def put_on(model: Any, lora_name: str, strength_model: float = 1.0) -> Any:
        changed = model.clone()
        changed.add_patches({Q: lora_adapter()}, strength_model)
        return (changed,)

    def merge(model: Any, other: Any, ratio: float) -> Any:
        """As ComfyUI merges: weights and patches of the second become one patch of the first."""
        merged, weight = model.clone(), model.model.get_parameter(Q)
        merged.add_patches({Q: [(weight, None), *other.patches.get(Q, ())]}, 1.0 - ratio, ratio)
        return (merged,)

    def sample(model: Any, latent_image: Any, hooks: Any = None, **_: Any) -> Any:
        host.module("comfy.model_management").load_models_gpu([model])
        if hooks is not None:
            model.register_all_hook_patches(hooks, {})
            model.patch_hook_weight_to_device(hooks, {Q: [0.5]}, Q)
        return (latent(),)

    def make_hook(lora_name: str, strength_model: float) -> Any:
        return (HookGroup(Hook()),)

    host.nodes |= {
        "Base": Node(("MODEL",), lambda: (module.ModelPatcher(BaseModel()),)),
        "Lora": Node(("MODEL",), put_on),
        "Choose": Node(("MODEL",), lambda a, b, first: (a if first else b,)),
        "Merge": Node(("MODEL",), merge),
        "Hook": Node(("HOOKS",), make_hook),
        "Sampler": Node(("LATENT",), sample),
    }
    return host


def graph(model: str = "2", more: dict[str, Any] | None = None, *, seed: int = 1) -> dict[str, Any]:
    return {
        "1": {"class_type": "Base", "inputs": {}},
        "2": {"class_type": "Lora", "inputs": {"model": ["1", 0], "lora_name": "style.safetensors"}},
        "3": {"class_type": "Empty", "inputs": {}},
        **(more or {}),
        "9": sampler(model, seed),
    }


def sampler(model: str, seed: int, **more: Any) -> dict[str, Any]:
    inputs = {"model": [model, 0], "latent_image": ["3", 0], "steps": 2, "sampler_name": "euler"}
    return {"class_type": "Sampler", "inputs": {**inputs, "seed": seed, **more}}


def choose(first: bool) -> dict[str, Any]:
    return {"class_type": "Choose", "inputs": {"a": ["2", 0], "b": ["1", 0], "first": first}}


def kept(run: Run) -> list[tuple[str, str, bool | None, int | None]]:
    verdicts = run.facts["comfyui"].get("loras_kept", [])
    return [(one["node"], one["lora"], one["effective"], one["modules_used"]) for one in verdicts]


def test_a_prompt_names_the_lora_of_a_loader_that_comfyui_kept(watch: Watch, host_with_lora: Host) -> None:
    watched = watch()
    first = watched.run(graph(seed=1), "a")
    again = watched.run(graph(seed=2), "b")
    (verdict,) = nodes(first)["2"].facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], kept(first)) == (True, 1, [])
    assert kept(again) == [("2", "style.safetensors", True, 1)]
    assert again.facts["comfyui"]["loras_kept"][0]["since_prompt"] == "a"
    for run, since in ((first, ""), (again, "kept from prompt a: ")):
        assert row_of(run).loras == ("style.safetensors",)
        assert [part.verdicts for part in measured(run)] == [("acts",)]
        said = f"LoRA style.safetensors: {since}1 of 1 module used"
        assert said in line_of(run)
        (loader,) = [node for node in view_of(run, "x")["nodes"] if node["id"] == "2"]
        assert loader["reasons"] == [said]


@pytest.mark.parametrize("change", ["lora_name", "model"])
def test_what_was_kept_belongs_to_a_loader_of_the_same_values(
    watch: Watch, host_with_lora: Host, change: str
) -> None:
    watched = watch()
    watched.run(graph(seed=1), "a")
    other = graph(seed=2)
    if change == "model":
        other["1"]["inputs"]["of"] = "another"
        host_with_lora.nodes["Base"].run = lambda of: (ModelPatcher(BaseModel()),)
    else:
        other["2"]["inputs"]["lora_name"] = "other.safetensors"
    host_with_lora.cache["2", repr(other["2"])] = host_with_lora.cache["2", repr(graph()["2"])]
    assert kept(watched.run(other, "b")) == []


@pytest.mark.parametrize(("first", "effective"), [(True, True), (False, False)])
def test_a_model_that_no_node_uses_makes_the_lora_one_that_does_nothing(
    watch: Watch, host_with_lora: Host, first: bool, effective: bool
) -> None:
    """A node is given both models, and takes one: the graph's links do not say which."""
    run = watch().run(graph("5", {"5": choose(first)}))
    (verdict,) = nodes(run)["2"].facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"]) == (effective, int(effective))
    assert verdict["why"] == (
        None if effective else "no node that ran uses the denoiser that the loader gives"
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_lora_of_no_known_file_acts_as_far_as_its_model_is_used(
    watch: Watch, host_with_lora: Host, first: bool
) -> None:
    host = host_with_lora
    put_on, folders = host.nodes["Lora"].run, sys.modules["folder_paths"]
    vars(folders)["get_full_path"] = lambda _kind, _name: None

    def put_on_unnamed(model: Any) -> Any:
        host.module("comfy.lora").load_lora({"a": 1}, {"a": 1})
        return put_on(model, "")

    host.nodes["Unnamed"] = Node(("MODEL",), put_on_unnamed)
    nodes_of_graph = graph("5", {"5": choose(first)})
    nodes_of_graph["2"] = {"class_type": "Unnamed", "inputs": {"model": ["1", 0]}}
    (verdict,) = nodes(watch().run(nodes_of_graph))["2"].facts["lora_verdicts"]
    assert (verdict["lora"], verdict["effective"]) == ("(unnamed)", first)
    assert first or "no node that ran uses the denoiser" in verdict["says"]


@pytest.mark.parametrize(
    ("of", "ratio", "effective"),
    [("model", 0.5, True), ("model", 0.0, False), ("other", 0.5, True), ("other", 1.0, False)],
)
def test_a_model_is_used_as_far_as_a_merge_takes_it(
    watch: Watch, host_with_lora: Host, of: str, ratio: float, effective: bool
) -> None:
    models = {"model": ["1", 0], "other": ["1", 0], of: ["2", 0]}
    merge = {"class_type": "Merge", "inputs": {**models, "ratio": ratio}}
    ran = nodes(watch().run(graph("5", {"5": merge})))
    (verdict,) = ran["2"].facts["lora_verdicts"]
    assert verdict["effective"] is effective
    assert "lora_verdicts" not in ran["5"].facts


def test_a_model_that_was_used_for_what_comfyui_kept_is_used(watch: Watch, host_with_lora: Host) -> None:
    watched = watch()
    watched.run(graph("2", {"8": sampler("1", 1)}), "a")
    assert kept(watched.run(graph("2", {"8": sampler("1", 2)}), "b")) == [("2", "style.safetensors", True, 1)]


def test_of_a_model_whose_patches_a_node_made_anew_nobody_knows_what_its_lora_does(
    watch: Watch, host_with_lora: Host
) -> None:
    """As nodes do that scale what loaders before them put on."""

    def scale(model: Any, times: float) -> Any:
        scaled = model.clone()
        scaled.patches = {
            key: [(one[0] * times, *one[1:]) for one in patches] for key, patches in model.patches.items()
        }
        return (scaled,)

    host_with_lora.nodes["Scale"] = Node(("MODEL",), scale)
    watched = watch()
    for prompt_id, times, effective in ("a", 0.5, None), ("b", 0.0, False):
        more = {"4": {"class_type": "Scale", "inputs": {"model": ["2", 0], "times": times}}}
        run = watched.run(graph("4", more, seed=int(10 * times)), prompt_id)
        verdicts = (
            nodes(run)["2"].facts["lora_verdicts"] if prompt_id == "a" else run.facts["comfyui"]["loras_kept"]
        )
        (verdict,) = verdicts
        assert verdict["effective"] is effective
        assert ("made other patches of it" in verdict["says"]) is (effective is None)


def test_a_sampler_that_makes_no_step_uses_no_lora_though_it_puts_the_model_on_a_device(
    watch: Watch, host_with_lora: Host
) -> None:
    """As SamplerCustomAdvanced does with the first half of sigmas that are split at 0."""
    nodes_of_graph = {**graph(), "10": sampler("1", 1, latent_image=["9", 0])}
    nodes_of_graph["9"]["inputs"]["steps"] = 0
    (verdict,) = nodes(watch().run(nodes_of_graph))["2"].facts["lora_verdicts"]
    assert verdict["effective"] is False


ATTENTION = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_"
AWAY = (0.0, (None,), 0.0, None, None)
"""A patch that multiplies a weight with 0, as UNetSelfAttentionMultiply makes it."""


def times(factor: float) -> Any:
    return lambda q, k, v, _options: (q, k * factor, v)


@pytest.mark.parametrize(
    ("part", "beside", "function", "is_open"),
    [
        pytest.param("q", {"k": [AWAY]}, None, True, id="q beside k of 0"),
        pytest.param("k", {"q": [AWAY]}, None, True, id="k beside q of 0"),
        pytest.param("q", {"v": [AWAY]}, None, True, id="q beside v of 0"),
        pytest.param("v", {"out.0": [AWAY]}, None, True, id="v before an output of 0"),
        pytest.param("out.0", {"v": [AWAY]}, None, True, id="output of v of 0"),
        pytest.param("v", {"k": [AWAY]}, None, False, id="v beside k of 0, which takes the mean of all"),
        pytest.param("q", {"q": [AWAY]}, None, False, id="q of 0 itself"),
        pytest.param("q", {"k": [(0.0, (None,), 0.5, None, None)]}, None, False, id="half of k"),
        pytest.param("q", {"k": [AWAY, (0.8, "change", 1.0, None, None)]}, None, False, id="k of 0, to which another adds"),
        pytest.param("q", {"k": [(0.8, "change", 1.0, None, None), AWAY]}, None, True, id="k with a LoRA, and then of 0"),
        pytest.param("q", {}, times(0.0), True, id="a function with 0"),
        pytest.param("q", {}, times(2.0), False, id="a function with 2"),
    ],
)  # fmt: skip
def test_it_is_open_whether_a_change_acts_beside_what_is_multiplied_with_0(
    part: str, beside: dict[str, Any], function: Any, is_open: bool
) -> None:
    functions = {"attn1_patch": [] if function is None else [function], "attn2_patch": [times(0.0)]}
    patcher = SimpleNamespace(
        model=object(),
        is_clip=False,
        patches={f"{ATTENTION}{other}.weight": patches for other, patches in beside.items()},
        model_options={"transformer_options": {"patches": functions}},
    )
    assert (doubt_of(patcher, f"{ATTENTION}{part}.weight") is not None) is is_open


@pytest.mark.parametrize(("part", "is_open"), [("q", True), ("v", False)])
def test_so_it_is_in_a_text_encoder(part: str, is_open: bool) -> None:
    """As CLIPAttentionMultiply multiplies keys with 0."""
    layer = "clip_l.transformer.text_model.encoder.layers.3.self_attn."
    patcher = SimpleNamespace(model=object(), is_clip=True, patches={f"{layer}k_proj.weight": [AWAY]})
    assert (doubt_of(patcher, f"{layer}{part}_proj.weight") is not None) is is_open


@pytest.mark.parametrize("first", [True, False])
def test_the_lora_of_a_node_that_expands_into_its_loader_acts_as_far_as_its_model_is_used(
    watch: Watch, host_with_lora: Host, first: bool
) -> None:
    """Now, and once ComfyUI has kept what the node gave."""

    def expand(model: Any) -> Any:
        inputs = {"model": model, "lora_name": "style.safetensors"}
        return {"expand": {"a": {"class_type": "Lora", "inputs": inputs}}, "last": "a"}

    host_with_lora.nodes["Loader"] = Node(("MODEL",), expand)
    watched = watch()
    for prompt_id, seed in ("a", 1), ("b", 2):
        nodes_of_graph = graph("5", {"5": choose(first)}, seed=seed)
        nodes_of_graph["2"] = {"class_type": "Loader", "inputs": {"model": ["1", 0]}}
        run = watched.run(nodes_of_graph, prompt_id)
        found = [*run.facts["comfyui"].get("loras_kept", ())]
        found += [one for stage in run.walk() for one in stage.facts.get("lora_verdicts", ())]
        assert [one["effective"] for one in found] == [first]


def test_of_a_node_that_samples_with_a_lora_of_its_own_nobody_knows_what_that_does(
    watch: Watch, host_with_lora: Host
) -> None:
    """As samplers do that compare LoRAs: no model with it leaves the node."""
    host = host_with_lora
    put_on, sample = host.nodes["Lora"].run, host.nodes["Sampler"].run

    def compare(model: Any, lora_name: str, **more: Any) -> Any:
        host.module("comfy.lora").load_lora({"a": 1}, {"a": 1})
        return sample(*put_on(model, lora_name), **more)

    host.nodes["Sampler"] = Node(("LATENT",), compare)
    nodes_of_graph = graph("1")
    nodes_of_graph["9"]["inputs"]["lora_name"] = "style.safetensors"
    verdict = nodes(watch().run(nodes_of_graph))["9"].facts["lora_verdicts"][0]
    assert (verdict["lora"], verdict["effective"]) == ("style.safetensors", None)
    assert "the node gives no model" in verdict["says"]


@pytest.mark.parametrize("is_hook", [False, True])
@pytest.mark.parametrize(("steps", "effective"), [(0, None), (1, True)])
def test_of_a_prompt_that_fails_before_a_step_is_done_nobody_knows_what_its_lora_does(
    watch: Watch, host_with_lora: Host, steps: int, effective: bool | None, is_hook: bool
) -> None:
    host = host_with_lora
    hook = {"class_type": "Hook", "inputs": {"lora_name": "style.safetensors", "strength_model": 1.0}}
    sample = host.nodes["Sampler"].run

    def fail(**given: Any) -> Any:
        sample(**given)
        host.step_through(steps)
        raise ValueError("planted")

    host.nodes["Sampler"] = Node(("LATENT",), fail)
    nodes_of_graph = graph("1" if is_hook else "2", {"7": hook})
    if is_hook:
        nodes_of_graph["9"]["inputs"]["hooks"] = ["7", 0]
    ran = nodes(watch().run(nodes_of_graph))
    (verdict,) = ran["7" if is_hook else "2"].facts["lora_verdicts"]
    assert verdict["effective"] is effective
    assert ("the prompt ended before" in verdict["says"]) is (effective is None)


@pytest.mark.parametrize("kind", ["Lora", "Hook"])
def test_of_a_loader_that_fails_nobody_knows_what_its_lora_would_have_done(
    watch: Watch, host_with_lora: Host, kind: str
) -> None:
    """As with a file that cannot be read."""

    def fail(**_: Any) -> Any:
        raise ValueError("planted")

    host_with_lora.nodes[kind] = Node(host_with_lora.nodes[kind].RETURN_TYPES, fail)
    nodes_of_graph = graph("1")
    nodes_of_graph["2"]["class_type"] = kind
    run = watch().run(nodes_of_graph)
    (verdict,) = nodes(run)["2"].facts["lora_verdicts"]
    assert verdict["effective"] is None
    assert "LoRA style.safetensors: unknown (the node failed before it gave" in line_of(run)


def test_of_a_hook_in_a_prompt_that_fails_before_a_sampler_takes_it_nobody_knows_what_it_does(
    watch: Watch, host_with_lora: Host
) -> None:
    hook = {"class_type": "Hook", "inputs": {"lora_name": "style.safetensors", "strength_model": 1.0}}
    nodes_of_graph = graph("1", {"7": hook, "8": {"class_type": "Fail", "inputs": {"x": ["7", 0]}}})
    nodes_of_graph["9"]["inputs"] |= {"hooks": ["7", 0], "latent_image": ["8", 0]}
    (verdict,) = nodes(watch().run(nodes_of_graph))["7"].facts["lora_verdicts"]
    assert verdict["effective"] is None
    assert "the prompt ended before a step was made with it" in verdict["says"]


@pytest.mark.parametrize("strength", [1.0, 0.0])
def test_a_loader_that_makes_the_model_and_encodes_the_prompt_is_judged(
    watch: Watch, host_with_lora: Host, strength: float
) -> None:
    """LucianoCirino/efficiency-nodes-comfyui has such a loader, whose issue 65 is "Efficient Loader ignoring SDXL LORAs ?"."""
    patcher = host_with_lora.module("comfy.model_patcher").ModelPatcher

    def load(lora_name: str, strength: float) -> Any:
        model = patcher(BaseModel())
        if strength:
            model.add_patches({Q: lora_adapter()}, strength)
        return model, [[torch.zeros(1, 2, 8), {}]]

    host_with_lora.nodes["Whole"] = Node(("MODEL", "CONDITIONING"), load)
    nodes_of_graph = graph()
    nodes_of_graph["2"] = {"class_type": "Whole", "inputs": {"lora_name": "a", "strength": strength}}
    (verdict,) = nodes(watch().run(nodes_of_graph))["2"].facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"]) == (bool(strength), int(strength))


def test_a_lora_that_a_node_kept_on_its_model_is_told_though_it_was_switched_off(
    watch: Watch, host_with_lora: Host
) -> None:
    """jags111/efficiency-nodes-comfyui issue 279: "LoraStack persists even if bypassed"."""
    model = host_with_lora.module("comfy.model_patcher").ModelPatcher(BaseModel())
    changed = model.clone()
    changed.add_patches({Q: lora_adapter()}, 1.0)
    host_with_lora.nodes["Cached"] = Node(("MODEL",), lambda is_on: (changed if is_on else model,))
    run = graph("4", {"4": {"class_type": "Cached", "inputs": {"is_on": True}}})
    (verdict,) = nodes(watch().run(run))["4"].facts["lora_verdicts"]
    assert (verdict["lora"], verdict["effective"]) == ("(unnamed)", True)
    assert "gives a model that has one from before" in verdict["says"]
    run["4"]["inputs"]["is_on"] = False
    assert "lora_verdicts" not in nodes(watch().run(run))["4"].facts


def test_a_trained_lora_with_strength_0_is_told(watch: Watch, host_with_lora: Host) -> None:
    """ComfyUI's LoraModelLoader takes one that a node has trained, and gives the model back at strength 0."""
    host_with_lora.nodes |= {
        "Train": Node(("LORA_MODEL",), lambda: ({"a": torch.ones(1)},)),
        "Trained": Node(("MODEL",), lambda model, **_: (model,)),
    }
    inputs = {"model": ["1", 0], "lora": ["5", 0], "strength_model": 0.0}
    more = {"5": {"class_type": "Train", "inputs": {}}, "4": {"class_type": "Trained", "inputs": inputs}}
    (verdict,) = nodes(watch().run(graph("4", more)))["4"].facts["lora_verdicts"]
    assert verdict["effective"] is False
    assert "its strength is 0" in verdict["says"]


@pytest.mark.parametrize(("model", "effective"), [("1", None), ("2", True)])
def test_of_a_model_that_goes_to_no_sampler_nobody_knows_what_its_lora_does(
    watch: Watch, host_with_lora: Host, model: str, effective: bool | None
) -> None:
    """Such as to a node that shows what it is given, or writes it into a file."""
    host_with_lora.nodes["Show"] = Node((), lambda x: ())
    run = watch().run(graph(model, {"4": {"class_type": "Show", "inputs": {"x": ["2", 0]}}}))
    (verdict,) = nodes(run)["2"].facts["lora_verdicts"]
    assert verdict["effective"] is effective


def test_of_a_prompt_that_failed_before_it_sampled_nobody_knows_what_its_lora_does(
    watch: Watch, host_with_lora: Host
) -> None:
    nodes_of_graph = graph("2", {"4": {"class_type": "Fail", "inputs": {"x": ["2", 0]}}})
    nodes_of_graph["9"]["inputs"]["latent_image"] = ["4", 0]
    (verdict,) = nodes(watch().run(nodes_of_graph))["2"].facts["lora_verdicts"]
    assert verdict["effective"] is None
    assert "the prompt ended before a node used the denoiser that the loader gives" in verdict["says"]


def test_of_two_loaders_that_bypass_the_weights_the_second_replaces_the_first(
    watch: Watch, host_with_lora: Host
) -> None:
    """ComfyUI 0.33 keeps what bypasses a model's weights under one name: of a stack, pictures show the last LoRA alone."""
    management = host_with_lora.module("comfy.model_management")

    def bypass(model: Any, lora_name: str) -> Any:
        changed, layer = model.clone(), model.model.get_submodule(Q.removesuffix(".weight"))
        manager = BypassInjectionManager(BypassForwardHook(layer, lora_adapter(), 0.5))
        changed.injections = {"bypass_lora": manager.create_injections()}
        return (changed,)

    def sample(model: Any, **_: Any) -> Any:
        management.load_models_gpu([model])
        management.current_loaded_models = [SimpleNamespace(model=model)]
        model.injections["bypass_lora"][0].inject(model)
        return (latent(),)

    host_with_lora.nodes |= {"Bypass": Node(("MODEL",), bypass), "Sampler": Node(("LATENT",), sample)}
    loaders = {
        name: {"class_type": "Bypass", "inputs": {"model": [before, 0], "lora_name": f"{name}.safetensors"}}
        for name, before in (("2", "1"), ("4", "2"))
    }
    run = watch().run(graph("4", loaders))
    first, second = (nodes(run)[name].facts["lora_verdicts"][0] for name in loaders)
    assert (first["effective"], second["effective"]) == (False, True)
    assert "a loader after it replaces it" in first["says"]


@pytest.mark.parametrize(("before", "acts"), [(0.0, None), (0.5, True)])
def test_it_is_open_whether_a_lora_beside_the_weights_acts_where_another_patch_multiplies_some_with_0(
    watch: Watch, host_with_lora: Host, before: float, acts: bool | None
) -> None:
    layer = Q.removesuffix(".weight")

    def bypass(model: Any, lora_name: str) -> Any:
        changed = model.clone()
        hook = BypassForwardHook(model.model.get_submodule(layer), lora_adapter(), 0.5)
        changed.injections = {"bypass_lora": BypassInjectionManager(hook).create_injections()}
        return (changed,)

    def multiply(model: Any, before: float) -> Any:
        changed = model.clone()
        changed.injections = dict(model.injections)
        changed.add_patches({f"{layer.removesuffix('q')}out.weight": (None,)}, 0.0, before)
        return (changed,)

    def sample(model: Any, **_: Any) -> Any:
        management = host_with_lora.module("comfy.model_management")
        management.load_models_gpu([model])
        management.current_loaded_models = [SimpleNamespace(model=model)]
        model.injections["bypass_lora"][0].inject(model)
        return (latent(),)

    host_with_lora.nodes |= {
        "Bypass": Node(("MODEL",), bypass),
        "Multiply": Node(("MODEL",), multiply),
        "Sampler": Node(("LATENT",), sample),
    }
    nodes_of_graph = graph(
        "4", {"4": {"class_type": "Multiply", "inputs": {"model": ["2", 0], "before": before}}}
    )
    nodes_of_graph["2"]["class_type"] = "Bypass"
    (verdict,) = nodes(watch().run(nodes_of_graph))["2"].facts["lora_verdicts"]
    assert verdict["effective"] is acts
    assert ("multiplies queries" in verdict["says"]) is (acts is None)


def loader_of(model: str, strength: float) -> dict[str, Any]:
    inputs = {"model": [model, 0], "lora_name": "style.safetensors", "strength_model": strength}
    return {"class_type": "Lora", "inputs": inputs}


@pytest.mark.parametrize(
    ("second", "acts", "says"),
    [
        (
            -0.8,
            [False, False],
            "the same changes cancel each other on 1 weight, since their strengths sum to 0",
        ),
        (-0.3, [True, True], "1 of 1 module used"),
    ],
)
def test_of_loaders_that_cancel_each_other_neither_acts(
    watch: Watch, host_with_lora: Host, second: float, acts: list[bool], says: str
) -> None:
    """Each loader's stage is true of the model that it gives. The run's first sentence is about what was sampled with."""
    watched = watch()
    chain = {"2": loader_of("1", 0.8), "4": loader_of("2", second)}
    run = watched.run(graph("4", chain), "a")
    told = {name: nodes(run)[name].facts["lora_verdicts"][0] for name in chain}
    assert [one["effective"] for one in told.values()] == acts
    assert [one["modules_used"] for one in told.values()] == [int(acting) for acting in acts]
    first_sentences = headline(run) + (acting_lora(run) or "")
    assert says in first_sentences
    assert (acting_lora(run) is None) is not any(acts)
    again = watched.run(graph("4", chain), "b")
    assert [(node, acting) for node, _, acting, _ in kept(again)] == list(zip(chain, acts, strict=True))
    other_seed = watched.run(graph("4", chain, seed=2), "c")
    assert [(node, acting) for node, _, acting, _ in kept(other_seed)] == list(zip(chain, acts, strict=True))


def test_patches_at_the_places_of_earlier_ones_are_not_taken_for_them(
    watch: Watch, host_with_lora: Host
) -> None:
    """ComfyUI lets go of the earlier ones before it makes these, so that Python may put them where those were."""
    watched = watch()
    for number in range(20):
        strength = -0.8 if number % 2 else -0.3
        chain = {"2": loader_of("1", 0.8), "4": loader_of("2", strength)}
        run = watched.run(graph("4", chain, seed=number), str(number))
        (verdict,) = nodes(run)["4"].facts["lora_verdicts"] if "4" in nodes(run) else [{}]
        known = verdict or next(one for one in run.facts["comfyui"]["loras_kept"] if one["node"] == "4")
        assert known["effective"] is (strength == -0.3)


def test_a_prompt_of_which_all_was_kept_says_what_was_said_when_it_ran(
    watch: Watch, host_with_lora: Host
) -> None:
    watched = watch()
    merge = {"class_type": "Merge", "inputs": {"model": ["1", 0], "other": ["2", 0], "ratio": 1.0}}
    first, again = (watched.run(graph("5", {"5": merge}), name) for name in "ab")
    (verdict,) = nodes(first)["2"].facts["lora_verdicts"]
    assert (verdict["effective"], kept(again)) == (False, [("2", "style.safetensors", False, 0)])


@pytest.mark.parametrize(
    "settings",
    [{"denoise": 0.0}, {"steps": 0}, {"start_at_step": 4, "end_at_step": 9, "steps": 4}],
    ids=["denoise", "steps", "start"],
)
def test_where_no_step_is_made_no_lora_acts(
    watch: Watch, host_with_lora: Host, settings: dict[str, Any]
) -> None:
    """ComfyUI gives the latent back as it was, and puts no model on a device."""
    host_with_lora.nodes["Sampler"] = Node(("LATENT",), lambda **_: (latent(),))
    watched = watch()
    nodes_of_graph = graph()
    nodes_of_graph["9"]["inputs"] |= settings
    said = "no sampler made a step with the denoiser that the loader gives"
    (verdict,) = nodes(watched.run(nodes_of_graph, "a"))["2"].facts["lora_verdicts"]
    assert (verdict["effective"], verdict["why"]) == (False, said)
    assert kept(watched.run(nodes_of_graph, "b")) == [("2", "style.safetensors", False, 0)]


@pytest.mark.parametrize(("first", "effective"), [(True, True), (False, False)])
def test_of_two_checkpoints_the_one_that_was_not_sampled_with_has_a_lora_that_does_nothing(
    watch: Watch, host_with_lora: Host, first: bool, effective: bool
) -> None:
    other = {"class_type": "Base", "inputs": {"of": "another"}}
    host_with_lora.nodes["Base"].run = lambda of="": (
        host_with_lora.module("comfy.model_patcher").ModelPatcher(BaseModel()),
    )
    choose_one = {"class_type": "Choose", "inputs": {"a": ["2", 0], "b": ["6", 0], "first": first}}
    run = watch().run(graph("5", {"6": other, "5": choose_one}))
    (verdict,) = nodes(run)["2"].facts["lora_verdicts"]
    assert verdict["effective"] is effective


def test_of_a_sampler_that_puts_no_model_on_a_device_nobody_knows_what_it_uses(
    watch: Watch, host_with_lora: Host
) -> None:
    """kijai/ComfyUI-HunyuanVideoWrapper issue 303: "Loras only work once if the model is cached between runs"."""
    management = host_with_lora.module("comfy.model_management")
    put_on = host_with_lora.nodes["Lora"].run

    def put_on_and_load(model: Any, lora_name: str) -> Any:
        management.load_models_gpu([changed := put_on(model, lora_name)[0]])
        return (changed,)

    host_with_lora.nodes |= {
        "Lora": Node(("MODEL",), put_on_and_load),
        "Sampler": Node(("LATENT",), lambda **_: (latent(),)),
    }
    watched = watch()
    (verdict,) = nodes(watched.run(graph(seed=1), "a"))["2"].facts["lora_verdicts"]
    again = watched.run(graph(seed=2), "b")
    assert (verdict["effective"], kept(again)) == (None, [("2", "style.safetensors", None, None)])
    assert "a node that puts no model on a device itself may use the denoiser" in verdict["says"]
    assert (headline(again) + str(acting_lora(again))).count("style.safetensors") == 0


@pytest.mark.parametrize(("strength", "effective"), [(0.8, None), (0.0, False)])
def test_of_a_loader_that_gives_back_the_very_model_nobody_knows_what_it_wrote_into_it(
    watch: Watch, host_with_lora: Host, strength: float, effective: bool | None
) -> None:
    """nunchux-ai/nunchaku issue 123: a LoRA whose "effects persist" once its loader is gone."""
    utils = host_with_lora.module("comfy.utils")

    def write(model: Any, lora_name: str, strength: float) -> Any:
        if strength:
            utils.load_torch_file(lora_name)
            model.model.get_parameter(Q).data += strength
        return (model,)

    host_with_lora.nodes["Lora"] = Node(("MODEL",), write)
    nodes_of_graph = graph()
    nodes_of_graph["2"]["inputs"]["strength"] = strength
    run = watch().run(nodes_of_graph)
    (verdict,) = nodes(run)["2"].facts["lora_verdicts"]
    assert verdict["effective"] is effective
    assert ("whether it wrote into its weights was not seen" in verdict["says"]) is (effective is None)
    assert {one.id for one in run.findings}.isdisjoint({"lora_left_off"}) is (effective is None)


def test_a_loader_that_runs_anew_was_used_for_what_comfyui_kept(watch: Watch, host_with_lora: Host) -> None:
    """With a cache of the last outputs alone, a loader may run again for one node while another's output is kept."""
    watched = watch()
    both = {"7": sampler("2", 3), "8": {"class_type": "Pass", "inputs": {"x": ["2", 0]}}}
    watched.run(graph("1", both), "a")
    host_with_lora.cache.pop(("2", repr(graph()["2"])))
    run = watched.run(graph("1", both, seed=9), "b")
    (verdict,) = nodes(run)["2"].facts["lora_verdicts"]
    assert verdict["effective"] is True


def test_a_node_is_called_for_each_entry_of_its_longest_list() -> None:
    inputs = {"model": ["m"], "strength_model": [0.0, 0.8]}
    calls = [
        ({"model": "m", "strength_model": 0.0}, ("a",)),
        ({"model": "m", "strength_model": 0.8}, ("b",)),
    ]
    assert _calls(inputs, [["a", "b"]], is_one=False) == calls
    assert _calls(inputs, [["a"]], is_one=True) == calls[:1]


def test_a_prompt_names_the_lora_of_a_hook_that_comfyui_kept(watch: Watch, host_with_lora: Host) -> None:
    make = {"class_type": "Hook", "inputs": {"lora_name": "style.safetensors", "strength_model": 1.0}}
    through = {"class_type": "Pass", "inputs": {"x": ["4", 0]}}
    watched = watch()

    def prompt(seed: int) -> dict[str, Any]:
        return graph("2", {"4": make, "5": through, "8": sampler("1", seed, hooks=["5", 0])})

    first = watched.run(prompt(1), "a")
    (verdict,) = nodes(first)["4"].facts["lora_verdicts"]
    assert verdict["effective"] is True
    assert ("4", "style.safetensors", True, 1) in kept(watched.run(prompt(2), "b"))


def test_a_prompt_names_the_lora_of_a_hook_in_a_node_that_expands_and_was_kept(
    watch: Watch, host_with_lora: Host
) -> None:
    def expand(lora_name: str) -> Any:
        inputs = {"lora_name": lora_name, "strength_model": 1.0}
        return {"expand": {"a": {"class_type": "Hook", "inputs": inputs}}, "last": "a"}

    host_with_lora.nodes["Hooks"] = Node(("HOOKS",), expand)
    hooks = {"2": {"class_type": "Hooks", "inputs": {"lora_name": "style.safetensors"}}}
    watched = watch()
    for prompt_id, seed in ("a", 1), ("b", 2):
        nodes_of_graph = graph("1", hooks, seed=seed)
        nodes_of_graph["9"]["inputs"]["hooks"] = ["2", 0]
        run = watched.run(nodes_of_graph, prompt_id)
    assert kept(run) == [("2", "style.safetensors", True, 1)]


def test_a_signature_is_that_of_all_that_comes_before() -> None:
    def chain(value: int) -> dict[str, Any]:
        links = {str(at): {"class_type": "A", "inputs": {"x": [str(at - 1), 0]}} for at in range(1, 3000)}
        return {"0": {"class_type": "A", "inputs": {"x": value}}, **links}

    assert signature_of(chain(1), "2999", {}) == signature_of(chain(1), "2999", {})
    assert signature_of(chain(1), "2999", {}) != signature_of(chain(2), "2999", {})


def loader(first: str, second: str, model: str = "m", slot: int = 0) -> dict[str, Any]:
    inputs = {"model": [first, slot], "clip": [first, 1], "lora_name": "a"}
    return {
        first: {"class_type": "Load", "inputs": {"ckpt_name": model}},
        second: {"class_type": "Lora", "inputs": inputs},
    }


def test_a_signature_is_the_same_from_whichever_node_it_is_asked_for() -> None:
    """Where a node takes what another one before it takes too."""
    names = [str(number) for number in range(8)]
    nodes_of_graph = {
        name: {"class_type": "A", "inputs": {before: [before, 0] for before in names[:at]}}
        for at, name in enumerate(names)
    }
    known: dict[str, str] = {}
    signature_of(nodes_of_graph, "7", known)
    assert known == {name: signature_of(nodes_of_graph, name, {}) for name in names}


def test_a_signature_is_the_same_whatever_the_ids() -> None:
    known = signature_of(loader("1", "2"), "2", {})
    other_ids = loader("77", "x") | {"5": {"class_type": "Empty", "inputs": {}}}
    assert signature_of(other_ids, "x", {}) == known
    assert signature_of(loader("1", "2", model="n"), "2", {}) != known
    assert signature_of(loader("1", "2", slot=1), "2", {}) != known


@pytest.mark.parametrize("value", [[512, 512], ["a", "b"], ["1", 0, 1], ["1"], ("1", 0), "1", None])
def test_what_is_no_id_with_the_number_of_an_output_is_a_value(value: object) -> None:
    assert link_of(["1", 0]) == ("1", 0)
    assert link_of(value) is None


def test_a_signature_of_nodes_in_a_circle_ends() -> None:
    circle = {name: {"inputs": {"x": [other, 0]}} for name, other in (("a", "b"), ("b", "a"))}
    assert signature_of(circle, "a", {})
