"""What a LoRA does through the conditionings that a sampler counts, on stand-ins: texts, hooks, and models with hooks."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import LoRAAdapter, lora_adapter, lora_parts
from tests.comfy_shapes.beside import Hook, HookGroup
from tests.comfy_shapes.modules import CLIP_Q, BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node, latent
from tests.integrations.comfyui.test_hook_lora import Merging
from tests.integrations.comfyui.test_nodes import nodes

from sigmascope.integrations.comfyui import conditionings, hook_lora
from sigmascope.integrations.comfyui.models_in_use import _cancelled_in

Graph = dict[str, dict[str, Any]]
MASK = torch.tensor([0.0, 1.0, 1.0, 1.0])


class Taken(NamedTuple):
    """What a model takes of a text."""

    cond: torch.Tensor


class KSAMPLER:
    """A sampler of ComfyUI's own, by the name of its function."""

    def __init__(self, function: str) -> None:
        self.sampler_function = lambda: None
        self.sampler_function.__name__ = function


def own_guider(samplers: Any) -> Any:
    """A guider with a formula of its own, such as `DualCFGGuider`."""

    class Guider(samplers.CFGGuider):  # type: ignore[misc]
        def predict_noise(self, x: Any, timestep: Any) -> None:
            for side in self.conds.values():
                for one in side:
                    samplers.get_area_and_mult(one, x, timestep)

    return Guider


def formula(scale: float) -> Any:
    """A formula in place of cfg's, such as that of `PerpNeg`."""
    return lambda given: given["cond"] - given["uncond"] * scale


@pytest.fixture
def sampling(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose nodes do with conditionings what ComfyUI's own of these names do, and sample with them."""
    up, down, alpha, *_ = lora_parts()
    parts = {"lora_B.weight": up, "lora_A.weight": down, "alpha": torch.tensor(alpha)}
    for file, weight in {"unet": Q, "text": f"text_encoders.{CLIP_Q}"}.items():
        named = {f"{weight.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        save_file(named, tmp_path / f"{file}.safetensors")
    folders = SimpleNamespace(
        get_full_path=lambda _kind, name: str(tmp_path / name), get_user_directory=lambda: str(tmp_path)
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    patchers, samplers, management = (
        host.module(f"comfy.{name}") for name in ("model_patcher", "samplers", "model_management")
    )
    patchers.ModelPatcher = type("ModelPatcher", (ModelPatcher,), dict(vars(Merging)))
    marks = iter(range(1000))

    def put_on(key: str) -> Any:
        def run(of: Any, lora_name: str, strength_model: float) -> Any:
            changed = of.clone()
            changed.is_clip = of.is_clip
            changed.add_patches({key: lora_adapter()}, strength_model)
            return (changed,)

        return run

    def clip() -> Any:
        patcher = patchers.ModelPatcher(SDClipModel())
        patcher.is_clip = True
        return (patcher,)

    def encode(clip: Any, text: str) -> Any:
        management.load_models_gpu([clip])
        return ([[torch.ones(1, 2, 8), {"pooled_output": torch.ones(1, 8)}]],)

    def encode_and_zero(clip: Any, text: str) -> Any:
        inner = {
            "a": node("Encode", clip=clip, text=text),
            "b": node("Zero", c=["4.0.0.a", 0]),
        }
        return {"expand": inner, "last": "b"}

    def with_values(c: Any, **values: Any) -> Any:
        return ([[text, {**more, **values}] for text, more in c],)

    def zeroed(c: Any) -> Any:
        return ([[text * 0, {name: one * 0 for name, one in more.items()}] for text, more in c],)

    def average(conditioning_to: Any, conditioning_from: Any, conditioning_to_strength: float) -> Any:
        first = conditioning_to[0][0]
        second = conditioning_from[0][0][:, : first.shape[1]]
        share = conditioning_to_strength
        return ([[first * share + second * (1 - share), {}]],)

    def sample(
        model: Any,
        positive: Any,
        negative: Any,
        latent_image: Any,
        cfg: float = 5.0,
        steps: int = 2,
        noise_mask: torch.Tensor | None = None,
        function: str = "sample_euler",
        guider: str = "CFGGuider",
        **options: Any,
    ) -> Any:
        management.load_models_gpu([model])
        conds = [
            [
                {**more, "cross_attn": text, "uuid": next(marks), "model_conds": {"c_crossattn": Taken(text)}}
                for text, more in one
            ]
            for one in (positive, negative)
        ]
        for side, other in (conds, conds[::-1]):  # as ComfyUI copies them for the other side
            copied = [one for one in other if "area" in one and "is_copy" not in one]
            side += [{**one, "is_copy": True, "model_conds": side[0]["model_conds"]} for one in copied]
        groups = {id(one["hooks"]): one["hooks"] for side in conds for one in side if "hooks" in one}
        model.hook_patches = {
            hook.hook_ref: {Q: [hook.entry]} for group in groups.values() for hook in group.hooks
        }
        for group in groups.values():
            model.register_all_hook_patches(group, {})
            combined = {Q: [(hook.strength * hook.entry[0], hook.entry[1]) for hook in group.hooks]}
            model.patch_hook_weight_to_device(group, combined, Q)
        known = {name: value for name, value in options.items() if name.endswith("_function")}
        kinds = {"CFGGuider": samplers.CFGGuider, "Own": own_guider(samplers)}
        kinds[guider](
            model, dict(zip(("positive", "negative"), conds, strict=True)), cfg, known
        ).inner_sample(steps, KSAMPLER(function), denoise_mask=noise_mask)
        for key, (weight, _) in model.hook_backup.items():
            model.model.get_parameter(key).data.copy_(weight)
        model.hook_backup, model.hook_patches = {}, {}
        return (latent(),)

    def set_hooks(clip: Any, hooks: Any) -> Any:
        """As ComfyUI sets hooks on a text encoder, which gets them there."""
        hooked = clip.clone()
        hooked.is_clip = True
        hooked.set_hooks = hooks
        hooked.register_all_hook_patches(hooks, {})
        return (hooked,)

    def encode_hooked(clip: Any, text: str) -> Any:
        """As ComfyUI encodes with the hooks that are set on a text encoder."""
        hooked, hooks = clip, clip.set_hooks
        hooked.hook_patches = {hook.hook_ref: {CLIP_Q: [hook.entry]} for hook in hooks.hooks}
        hooked.register_all_hook_patches(hooks, {})
        combined = {CLIP_Q: [(hook.strength * hook.entry[0], hook.entry[1]) for hook in hooks.hooks]}
        hooked.patch_hook_weight_to_device(hooks, combined, CLIP_Q)
        return encode(hooked, text)

    def make_hook(lora_name: str, strength_model: float) -> Any:
        hook: Any = Hook()
        hook.entry = (strength_model, lora_adapter(), 1.0, None, None)
        return (HookGroup(hook),)

    host.nodes |= {
        "Base": Node(("MODEL",), lambda: (patchers.ModelPatcher(BaseModel()),)),
        "Clip": Node(("CLIP",), clip),
        "Lora": Node(("MODEL",), lambda model, **more: put_on(Q)(model, **more)),
        "TextLora": Node(("CLIP",), lambda clip, **more: put_on(CLIP_Q)(clip, **more)),
        "Encode": Node(("CONDITIONING",), encode),
        "SetHooks": Node(("CLIP",), set_hooks),
        "EncodeHooked": Node(("CONDITIONING",), encode_hooked),
        "EncodeZeros": Node(("CONDITIONING",), lambda clip, text: zeroed(encode(clip, text)[0])),
        "EncodeAndZero": Node(("CONDITIONING",), encode_and_zero),
        "Set": Node(("CONDITIONING",), with_values),
        "Mask": Node(("CONDITIONING",), lambda c, weight: with_values(c, mask=MASK * weight)),
        "Over": Node(("CONDITIONING",), lambda c: with_values(c, is_over=True)),
        "Combine": Node(("CONDITIONING",), lambda a, b: (a + b,)),
        "Zero": Node(("CONDITIONING",), zeroed),
        "Double": Node(("CONDITIONING",), lambda c: ([[text * 2, more] for text, more in c],)),
        "ConditioningAverage": Node(("CONDITIONING",), average),
        "ConditioningConcat": Node(
            ("CONDITIONING",),
            lambda conditioning_to, conditioning_from: (
                [[torch.cat([conditioning_to[0][0], conditioning_from[0][0]], 1), {}]],
            ),
        ),
        "Mix": Node(
            ("LATENT",), lambda a, b, share: ({"samples": share * a["samples"] + (1 - share) * b["samples"]},)
        ),
        "Decode": Node(("IMAGE",), lambda x: (x["samples"].movedim(1, -1)[..., :3] + 2,)),
        "Blend": Node(("IMAGE",), lambda a, b, share: (share * a + (1 - share) * b,)),
        "Code": Node(("LATENT",), lambda x: ({"samples": torch.cat([x, x[..., :1]], -1).movedim(-1, 1)},)),
        "Hooks": Node(("HOOKS",), lambda a, b: (HookGroup(*a.hooks, *b.hooks),)),
        "Hook": Node(("HOOKS",), make_hook),
        "Sampler": Node(("LATENT",), sample),
    }
    return host


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def sampler(positive: str, negative: str, model: str = "1", **more: Any) -> dict[str, Any]:
    inputs = {"positive": [positive, 0], "negative": [negative, 0], "latent_image": ["3", 0], **more}
    return node("Sampler", model=[model, 0], sampler_name="euler", steps=2, **inputs)


def text_graph(more: Mapping[str, Any], positive: str, negative: str = "5", **settings: Any) -> Graph:
    """ "4" is encoded with the LoRA, "5" without it."""
    return {
        "1": node("Base"),
        "6": node("Clip"),
        "2": node("TextLora", clip=["6", 0], lora_name="text.safetensors", strength_model=1.0),
        "3": node("Empty"),
        "4": node("Encode", clip=["2", 0], text="a"),
        "5": node("Encode", clip=["6", 0], text="b"),
        **more,
        "9": sampler(positive, negative, **settings),
    }


def verdict_of(run: Any, name: str = "2") -> dict[str, Any]:
    known = {one["node"]: one for one in run.facts["comfyui"].get("loras_kept", ())}
    found: dict[str, Any] = nodes(run)[name].facts["lora_verdicts"][0] if name in nodes(run) else known[name]
    return found


C = ["4", 0]
OTHERS = {"conditioning_to": ["5", 0], "conditioning_from": C}


@pytest.mark.parametrize(
    ("more", "positive", "settings", "acts"),
    [
        pytest.param({}, "4", {}, True, id="as it is"),
        pytest.param({"7": node("Set", c=C, strength=0.5)}, "7", {}, True, id="half its strength"),
        pytest.param({"7": node("Set", c=C, strength=0.0)}, "7", {}, False, id="strength 0"),
        pytest.param({"7": node("Mask", c=C, weight=1.0)}, "7", {}, True, id="a mask"),
        pytest.param({"7": node("Mask", c=C, weight=0.0)}, "7", {}, False, id="a mask of zeros"),
        pytest.param(
            {"7": node("Mask", c=C, weight=0.0), "8": node("Combine", a=["7", 0], b=C)}, "8", {}, True,
            id="masked, and as it is",
        ),
        pytest.param({"7": node("Over", c=C)}, "7", {}, False, id="for no step"),
        pytest.param({"7": node("Zero", c=C)}, "7", {}, False, id="zeroed"),
        pytest.param({"7": node("Double", c=C)}, "7", {}, None, id="changed by an unknown node"),
        pytest.param({"7": node("ConditioningConcat", **OTHERS)}, "7", {}, True, id="concatenated"),
        pytest.param(
            {"7": node("ConditioningAverage", **OTHERS, conditioning_to_strength=0.5)}, "7", {}, True, id="averaged"
        ),
        pytest.param(
            {"7": node("ConditioningAverage", **OTHERS, conditioning_to_strength=1.0)}, "7", {}, False,
            id="averaged with weight 0",
        ),
        pytest.param(
            {
                "7": node("ConditioningConcat", conditioning_to=["5", 0], conditioning_from=C),
                "8": node("ConditioningAverage", conditioning_to=["5", 0], conditioning_from=["7", 0], conditioning_to_strength=0.0),
            },
            "8", {}, None, id="averaged with a longer one, of which a part is taken",
        ),
        pytest.param(
            {
                "7": node("Combine", a=["5", 0], b=C),
                "8": node("ConditioningConcat", conditioning_to=["5", 0], conditioning_from=["7", 0]),
            },
            "8", {}, None, id="concatenated with two, of which the first is taken",
        ),
        pytest.param({"7": node("Pass", x=C)}, "5", {}, False, id="to no sampler"),
        pytest.param({}, "4", {"cfg": 0.0}, False, id="positive at cfg 0"),
        pytest.param({}, "4", {"cfg": 0.0, "sampler_post_cfg_function": [len]}, None, id="positive at cfg 0, which a function may take"),
        pytest.param({"7": node("Set", c=C, area=(8, 8, 0, 0))}, "7", {}, True, id="on an area"),
        pytest.param({"7": node("Set", c=C, area=(8, 8, 0, 0))}, "7", {"cfg": 0.0}, None, id="on an area, at cfg 0"),
        pytest.param({"7": node("Set", c=C, strength=0.0, area=(8, 8, 0, 0))}, "7", {}, None, id="strength 0 on an area"),
        pytest.param({}, "4", {"sampler_cfg_function": formula(0.5)}, True, id="a model's own formula"),
        pytest.param({}, "4", {"sampler_cfg_function": formula(0.0)}, None, id="a model's own formula with a 0"),
        pytest.param({}, "4", {"guider": "Own"}, True, id="a guider's own formula"),
        pytest.param({}, "4", {"guider": "Own", "cfg": 0.0}, None, id="a guider's own formula, which may multiply with 0"),
        pytest.param({}, "4", {"noise_mask": MASK}, True, id="a noise mask"),
        pytest.param({}, "4", {"noise_mask": MASK * 0}, False, id="a noise mask of zeros"),
    ],
)  # fmt: skip
def test_a_lora_of_a_text_encoder_acts_as_far_as_a_step_counts_the_text(
    watch: Watch,
    sampling: Host,
    more: dict[str, Any],
    positive: str,
    settings: dict[str, Any],
    acts: bool | None,
) -> None:
    watched = watch()
    run = watched.run(text_graph(more, positive, **settings, seed=1), "a")
    assert watched.off() == {}
    assert verdict_of(run)["effective"] is acts
    assert verdict_of(run)["modules_used"] == (None if acts is None else int(acts))
    for prompt_id, seed in ("b", 1), ("c", 7):  # all is kept, and all but the sampler
        again = watched.run(text_graph(more, positive, **settings, seed=seed), prompt_id)
        assert verdict_of(again)["effective"] is acts


@pytest.mark.parametrize(("cfg", "acts"), [(1.0, False), (0.0, True), (5.0, True)])
def test_a_lora_of_the_negative_text_acts_as_far_as_cfg_takes_it(
    watch: Watch, sampling: Host, cfg: float, acts: bool
) -> None:
    assert verdict_of(watch().run(text_graph({}, "5", "4", cfg=cfg)))["effective"] is acts


@pytest.mark.parametrize("kind", ["EncodeZeros", "EncodeAndZero"])
def test_a_node_may_encode_a_text_and_give_zeros(watch: Watch, sampling: Host, kind: str) -> None:
    """By itself, or by nodes that it expands into."""
    nodes_of_graph = text_graph({}, "4")
    nodes_of_graph["4"]["class_type"] = kind
    verdict = verdict_of(watch().run(nodes_of_graph))
    assert verdict["effective"] is False
    assert "no step counted a text" in verdict["says"]


@pytest.mark.parametrize(("positive", "acts"), [("4", True), ("5", False)])
def test_a_loader_whose_own_texts_are_used_has_a_lora_that_acts_though_no_node_takes_its_text_encoder(
    watch: Watch, sampling: Host, positive: str, acts: bool
) -> None:
    """As loaders give all at once: model, texts, VAE and text encoder."""
    put_on, encode = sampling.nodes["TextLora"].run, sampling.nodes["Encode"].run

    def load(clip: Any, text: str, **more: Any) -> Any:
        (changed,) = put_on(clip, **more)
        return (*encode(changed, text), changed)

    sampling.nodes["Whole"] = Node(("CONDITIONING", "CLIP"), load)
    nodes_of_graph = text_graph({}, positive)
    del nodes_of_graph["2"]
    loaded = {"lora_name": "text.safetensors", "strength_model": 1.0}
    nodes_of_graph["4"] = node("Whole", clip=["6", 0], text="text.safetensors", **loaded)
    watched = watch()
    for prompt_id in "ab":
        verdict = verdict_of(watched.run(nodes_of_graph, prompt_id), "4")
        assert verdict["effective"] is acts


@pytest.mark.parametrize("samples_before", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_it_is_open_whether_a_text_acts_in_a_prompt_that_ends_before_it_is_sampled_with(
    watch: Watch, sampling: Host, samples_before: bool, is_kept: bool
) -> None:
    """Another sampler may have run with another text."""
    nodes_of_graph = text_graph({}, "4")
    if samples_before:
        nodes_of_graph["9"] = sampler("5", "5")
    watched = watch()
    if is_kept:
        watched.run(nodes_of_graph, "earlier")
    last = sampler("4", "5", seed=2)
    last["inputs"]["latent_image"] = ["10", 0]
    if not samples_before:
        del nodes_of_graph["9"]
    cut = {**nodes_of_graph, "10": node("Fail", x=["9" if samples_before else "3", 0]), "11": last}
    verdict = verdict_of(watched.run(cut, "cut"))
    assert verdict["effective"] is None
    assert "the prompt ended before a node used the text encoder" in verdict["says"]


def hook_graph(
    strength: float,
    on: Mapping[str, Any] | None = None,
    *,
    plain: float = 0.0,
    negative: bool = True,
    cfg: float = 5.0,
) -> Graph:
    """A hook on the positive conditioning, and on the negative one; with a LoRA on the model, if `plain` is not 0."""
    hooks = {"hooks": ["7", 0], **(on or {})}
    return {
        "1": node("Base"),
        "6": node("Clip"),
        "3": node("Empty"),
        "5": node("Encode", clip=["6", 0], text="b"),
        "7": node("Hook", lora_name="unet.safetensors", strength_model=strength),
        "10": node("Set", c=["5", 0], **hooks),
        "11": node("Set", c=["5", 0], **hooks),
        "2": node("Lora", model=["1", 0], lora_name="unet.safetensors", strength_model=plain),
        "9": sampler("10", "11" if negative else "5", "2" if plain else "1", cfg=cfg),
    }


@pytest.mark.parametrize(
    ("on", "cfg", "acts"),
    [({"strength": 0.5}, 5.0, True), ({"strength": 0.0}, 5.0, False), ({"mask": MASK * 0}, 5.0, False), ({}, 0.0, False)],
    ids=["half", "strength 0", "a mask of zeros", "cfg 0"],
)  # fmt: skip
def test_a_hook_acts_as_far_as_its_conditioning_has_weight(
    watch: Watch, sampling: Host, on: dict[str, Any], cfg: float, acts: bool
) -> None:
    verdict = verdict_of(watch().run(hook_graph(1.0, on, negative=False, cfg=cfg)), "7")
    assert verdict["effective"] is acts
    assert acts or "no conditioning that it is on has any weight" in verdict["says"]


@pytest.mark.parametrize(
    ("strength", "negative", "acts"),
    [(-0.8, True, False), (-0.3, True, True), (-0.8, False, True)],
    ids=["everywhere", "not all of it", "on one conditioning of two"],
)
def test_a_lora_that_hooks_take_out_of_each_conditioning_does_nothing(
    watch: Watch, sampling: Host, strength: float, negative: bool, acts: bool
) -> None:
    run = watch().run(hook_graph(strength, plain=0.8, negative=negative))
    assert (verdict_of(run, "2")["effective"], verdict_of(run, "7")["effective"]) == (acts, acts)
    assert acts or "it cancels a LoRA that is on the model itself" in verdict_of(run, "7")["says"]


@pytest.mark.parametrize(
    ("on", "acts"), [({"strength": 0.0}, False), ({"is_over": True}, False), ({"strength": 0.5}, True)]
)
def test_a_lora_of_the_denoiser_does_nothing_where_no_conditioning_has_any_weight(
    watch: Watch, sampling: Host, on: dict[str, Any], acts: bool
) -> None:
    nodes_of_graph = hook_graph(0.0, on, plain=0.8)
    verdict = verdict_of(watch().run(nodes_of_graph))
    assert verdict["effective"] is acts
    assert acts or "every conditioning has weight 0 in what was sampled with the denoiser" in verdict["says"]


def test_a_conditioning_of_which_cfg_leaves_out_a_copy_has_its_weight(watch: Watch, sampling: Host) -> None:
    """ComfyUI gives the positive side a copy of a negative one that has an area, with the same mark."""
    nodes_of_graph = hook_graph(0.0, {"area": (8, 8, 0, 0)}, plain=0.8, cfg=0.0)
    nodes_of_graph["9"]["inputs"]["positive"] = ["5", 0]
    assert verdict_of(watch().run(nodes_of_graph))["effective"] is True


UNSEEN = "may leave nothing of what was sampled with the denoiser"


@pytest.mark.parametrize(
    ("on", "settings", "acts", "says"),
    [
        pytest.param({}, {"noise_mask": MASK * 0}, False, "the noise mask of the latent is zeros in what was sampled", id="a noise mask of zeros"),
        pytest.param(
            {}, {"noise_mask": MASK * 0, "function": "sample_euler_cfg_pp"}, None, UNSEEN, id="beside which the sampler takes more"
        ),
        pytest.param(
            {}, {"noise_mask": MASK * 0, "denoise_mask_function": len}, None, UNSEEN, id="that a function changes"
        ),
        pytest.param({"timestep_end": 1}, {}, None, UNSEEN, id="no conditioning in the last step"),
        pytest.param({"timestep_end": 1}, {"guider": "Own"}, None, UNSEEN, id="nor by a guider's own formula"),
        pytest.param({}, {"guider": "Own", "cfg": 0.0}, True, "1 of 1 module used", id="a formula that multiplies some with 0"),
        pytest.param({"timestep_end": 2}, {}, True, "1 of 1 module used", id="one in the last step"),
    ],
)  # fmt: skip
def test_a_lora_of_the_denoiser_acts_as_far_as_the_latent_is_what_was_sampled(
    watch: Watch,
    sampling: Host,
    on: dict[str, Any],
    settings: dict[str, Any],
    acts: bool | None,
    says: str,
) -> None:
    nodes_of_graph = hook_graph(0.0, on, plain=0.8)
    nodes_of_graph["9"]["inputs"] |= settings
    watched = watch()
    verdict = verdict_of(watched.run(nodes_of_graph))
    assert watched.off() == {}
    assert verdict["effective"] is acts
    assert says in verdict["says"]


def test_it_is_open_whether_a_hook_acts_whose_conditioning_a_function_may_take(
    watch: Watch, sampling: Host
) -> None:
    nodes_of_graph = hook_graph(1.0, negative=False, cfg=0.0)
    nodes_of_graph["9"]["inputs"]["sampler_post_cfg_function"] = [len]
    verdict = verdict_of(watch().run(nodes_of_graph), "7")
    assert verdict["effective"] is None
    assert "it is not seen whether any conditioning that it is on counts" in verdict["says"]


@pytest.mark.parametrize(
    ("both_on", "alone", "acts"),
    [
        pytest.param(["10"], {}, True, id="taken out of one conditioning"),
        pytest.param(["10", "11"], {}, False, id="of each"),
        pytest.param(["10"], {"strength": 0.0}, False, id="and of weight 0 in the other"),
    ],
)
def test_a_hook_that_takes_another_out_of_one_conditioning_acts(
    watch: Watch, sampling: Host, both_on: list[str], alone: dict[str, Any], acts: bool
) -> None:
    first, second = (
        node("Hook", lora_name="unet.safetensors", strength_model=strength) for strength in (0.8, -0.8)
    )
    both = node("Hooks", a=["7", 0], b=["8", 0])
    nodes_of_graph = {"7": first, "8": second, "12": both, **hook_graph(0.8)}
    nodes_of_graph["11"]["inputs"] |= alone
    for name in both_on:
        nodes_of_graph[name]["inputs"]["hooks"] = ["12", 0]
    run = watch().run(nodes_of_graph)
    assert [verdict_of(run, name)["effective"] for name in ("7", "8")] == [acts, acts]


def text_hook_graph() -> Graph:
    """A hook on the text encoder that "4" is encoded with; the sampler "9" takes that text."""
    nodes_of_graph = text_graph({}, "4")
    nodes_of_graph["2"] = node("Hook", lora_name="text.safetensors", strength_model=1.0)
    nodes_of_graph["4"] = node("EncodeHooked", clip=["8", 0], text="a")
    return {
        "6": node("Clip"),
        "2": nodes_of_graph.pop("2"),
        "8": node("SetHooks", clip=["6", 0], hooks=["2", 0]),
        **nodes_of_graph,
    }


@pytest.mark.parametrize("kind", ["model", "text", "hook"])
@pytest.mark.parametrize(("share", "acts"), [(1.0, True), (0.5, True), (0.0, None)])
def test_it_is_open_whether_a_lora_acts_of_whose_latent_a_node_leaves_nothing(
    watch: Watch, sampling: Host, kind: str, share: float, acts: bool | None
) -> None:
    """As in a blend with factor 0. Now, once all is kept, and once all but the last sampler is."""
    graphs = {
        "model": hook_graph(0.0, plain=0.8),
        "text": text_graph({}, "4"),
        "hook": hook_graph(1.0, negative=False),
    }
    nodes_of_graph, name = graphs[kind], "7" if kind == "hook" else "2"
    more = {
        "20": node("Mix", a=["9", 0], b=["3", 0], share=share),
        "21": sampler("5", "5"),
    }
    watched = watch()
    for prompt_id, seed in ("a", 1), ("b", 1), ("c", 2):
        more["21"]["inputs"] |= {"latent_image": ["20", 0], "seed": seed}
        verdict = verdict_of(watched.run({**nodes_of_graph, **more}, prompt_id), name)
        assert verdict["effective"] is acts
        assert ("nothing may be left of what was sampled" in verdict["says"]) is (acts is None)
    assert watched.off() == {}


def test_of_a_latent_on_very_many_ways_each_node_is_asked_once() -> None:
    """Each of sixty nodes takes the one before twice: there are 2 to the 60 ways to the sampler that forgets the latent."""
    graph: Graph = {
        str(number): node("Blend", one=[str(number - 1), 0], other=[str(number - 1), 0])
        for number in range(2, 62)
    }
    graph |= {"1": node("KSampler"), "62": node("KSampler", latent_image=["61", 0])}
    counts = conditionings.Sampled({frozenset(): True}, conditionings.Origin(frozenset()), True)
    found = conditionings.without_forgotten({"1": counts, "62": counts._replace(forgets=True)}, graph, {})
    assert (found["1"].is_forgotten, found["62"].is_forgotten) == (True, False)


@pytest.mark.parametrize("kind", ["model", "text"])
def test_a_hook_whose_node_was_kept_did_in_this_prompt_what_its_samplers_do_in_it(
    watch: Watch, sampling: Host, kind: str
) -> None:
    """What a sampler did with it earlier is no more, where that makes no step now; and is there again, where it is kept."""
    sampling.nodes["Idle"] = Node(("LATENT",), lambda **_: (latent(),))
    nodes_of_graph = hook_graph(1.0, negative=False) if kind == "model" else text_hook_graph()
    name = "7" if kind == "model" else "2"
    idle = {**nodes_of_graph, "9": {**nodes_of_graph["9"], "class_type": "Idle"}}
    idle["9"]["inputs"] = {**idle["9"]["inputs"], "steps": 0}
    watched = watch()
    for prompt_id, one, acts in (
        ("a", idle, False), ("b", nodes_of_graph, True), ("c", nodes_of_graph, True), ("d", idle, False),
        ("e", nodes_of_graph, True),
    ):  # fmt: skip
        assert verdict_of(watched.run(one, prompt_id), name)["effective"] is acts, prompt_id


@pytest.mark.parametrize(("share", "acts"), [(0.5, True), (0.0, None)])
def test_so_it_is_where_a_blend_of_pictures_leaves_nothing(
    watch: Watch, sampling: Host, share: float, acts: bool | None
) -> None:
    more = {
        "20": node("Decode", x=["9", 0]),
        "21": node("Decode", x=["3", 0]),
        "22": node("Blend", a=["20", 0], b=["21", 0], share=share),
        "23": node("Code", x=["22", 0]),
        "24": sampler("5", "5", latent_image=["23", 0]),
    }
    assert verdict_of(watch().run({**hook_graph(0.0, plain=0.8), **more}))["effective"] is acts


def test_a_hook_on_a_text_encoder_does_nothing_where_the_noise_mask_leaves_nothing(
    watch: Watch, sampling: Host
) -> None:
    nodes_of_graph = text_hook_graph()
    watched = watch()
    for prompt_id, weight, acts in ("a", 0.0, False), ("b", 1.0, True), ("c", 0.0, False):
        nodes_of_graph["9"]["inputs"]["noise_mask"] = MASK * weight
        assert verdict_of(watched.run(nodes_of_graph, prompt_id))["effective"] is acts


@pytest.mark.parametrize("kind", ["model", "text", "hook", "text hook"])
def test_a_lora_whose_sampler_was_kept_acts_as_far_as_its_latent_is_used_now(
    watch: Watch, sampling: Host, kind: str
) -> None:
    graphs = {
        "model": hook_graph(0.0, plain=0.8),
        "text": text_graph({}, "4"),
        "hook": hook_graph(1.0, negative=False),
        "text hook": text_hook_graph(),
    }
    watched = watch()
    for prompt_id, share, acts in ("a", 0.0, None), ("b", 0.5, True), ("c", 0.0, None), ("d", 1.0, True):
        mix = node("Mix", a=["9", 0], b=["3", 0], share=share)
        more = {"20": mix, "21": sampler("5", "5", latent_image=["20", 0])}
        verdict = verdict_of(watched.run({**graphs[kind], **more}, prompt_id), "7" if kind == "hook" else "2")
        assert verdict["effective"] is acts


@pytest.mark.parametrize(
    ("is_read", "acts", "says"),
    [
        pytest.param(True, False, "its schedule has strength 0", id="off by its schedule"),
        pytest.param(False, None, "cannot be compared", id="weights that are not read"),
    ],
)
def test_of_a_hook_of_which_all_was_kept_is_said_what_was_said_when_it_ran(
    watch: Watch, sampling: Host, monkeypatch: pytest.MonkeyPatch, is_read: bool, acts: bool | None, says: str
) -> None:
    if not is_read:
        monkeypatch.setattr(hook_lora, "_is_changed", lambda *_, **__: None)
    make = sampling.nodes["Hook"].run

    def make_hook(**given: Any) -> Any:
        (group,) = make(**given)
        group.hooks[0].strength = float(not is_read)
        return (group,)

    sampling.nodes["Hook"] = Node(("HOOKS",), make_hook)
    nodes_of_graph = hook_graph(1.0, negative=False)
    watched = watch()
    first, again = (verdict_of(watched.run(nodes_of_graph, prompt_id), "7") for prompt_id in ("a", "b"))
    assert first["effective"] is again["effective"] is acts
    assert says in first["says"]
    assert (first["why"], first["reason"]) == (again["why"], again["reason"])


@pytest.mark.parametrize("kind", ["model", "text"])
def test_of_a_hook_that_the_second_of_two_samplers_takes_and_fails_nobody_knows_what_it_does(
    watch: Watch, sampling: Host, kind: str
) -> None:
    sample = sampling.nodes["Sampler"].run

    def in_steps(**given: Any) -> Any:
        sampling.step_through(2)
        return sample(**given)

    def fail(**given: Any) -> Any:
        sample(**given)
        raise ValueError("planted")

    sampling.nodes |= {"Sampler": Node(("LATENT",), in_steps), "Failing": Node(("LATENT",), fail)}
    nodes_of_graph = hook_graph(1.0, negative=False) if kind == "model" else text_hook_graph()
    nodes_of_graph["20"] = {**nodes_of_graph["9"], "class_type": "Failing"}
    nodes_of_graph["9"] = sampler("5", "5")
    nodes_of_graph["20"]["inputs"]["latent_image"] = ["9", 0]
    verdict = verdict_of(watch().run(nodes_of_graph), "7" if kind == "model" else "2")
    assert verdict["effective"] is None
    assert "the prompt ended before a step was made with it" in verdict["says"]


LORA, SAME = lora_adapter(), lora_adapter()
OTHER = lora_adapter(seed=5)
OFT = type("OFTAdapter", (LoRAAdapter,), {"name": "oft"})(set(), (torch.zeros(2, 4, 4), None, None, None))


def entry(strength: float, change: Any, before: float = 1.0) -> tuple[Any, ...]:
    return (strength, change, before, None, None)


def merged(*patches: Any) -> list[Any]:
    """What ComfyUI makes of a model's weight to merge it into another: the weight, and the patches upon it."""
    return [(BaseModel().get_parameter(Q), None), *patches]


A = entry(0.8, LORA)


@pytest.mark.parametrize(
    ("patches", "cancelled"),
    [
        pytest.param([entry(1.0, merged(A, entry(-1.0, merged(A), 1.0)), 1.0)], {0}, id="base + (a - a)"),
        pytest.param([entry(1.0, merged(A, entry(-1.0, merged(), 1.0)), 1.0)], set(), id="base + (a - base)"),
        pytest.param([A, entry(0.5, merged(entry(-0.8, SAME)), 0.5)], {0, 1}, id="half of a, half of -a"),
        pytest.param([A, entry(0.3, merged(entry(-0.8, SAME)), 0.7)], set(), id="0.7 of a, 0.3 of -a"),
        pytest.param([A, entry(-1.0, merged(A, entry(-1.0, merged(), 1.0)), 1.0)], {0}, id="a - (a - base)"),
        pytest.param([A, entry(0.5, merged(entry(-0.8, OTHER)), 0.5)], set(), id="half of another"),
        pytest.param(
            [A, entry(0.5, merged(entry(-0.8, SAME), entry(1.0, OFT)), 0.5)], set(), id="beside an OFT"
        ),
    ],
)
def test_models_merged_with_each_other_cancel_what_sums_to_0(patches: list[Any], cancelled: set[int]) -> None:
    """`cancelled` numbers the LoRA's patches in the order in which they stand there."""
    patcher = ModelPatcher(BaseModel())
    patcher.patches = {Q: patches}
    leaves: list[Any] = []

    def walk(held: list[Any]) -> None:
        for one in held:
            if isinstance(one[1], list):
                walk(one[1][1:])
            elif isinstance(one[1], LoRAAdapter) and id(one) not in map(id, leaves):
                leaves.append(one)

    walk(patches)
    assert _cancelled_in(patcher).keys() == {id(leaves[number]) for number in cancelled}


def test_what_a_conditioning_weighs_is_looked_at_once(
    watch: Watch, sampling: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has ten microseconds for the watch."""
    watched = watch()
    instrument = next(one for one in watched.session.instruments if one.name == "conditionings")
    heard: list[object] = []
    wrap = instrument.wraps[0]
    weighed = wrap._after

    def hear(call: Any, *more: Any) -> None:
        heard.append(call.get("conds")["uuid"])
        weighed(call, *more)  # type: ignore[misc]

    monkeypatch.setattr(wrap, "_after", hear)
    more = {"7": node("Mask", c=C, weight=0.0)}
    graph = text_graph(more, "7")
    graph["9"]["inputs"]["steps"] = 10
    assert verdict_of(watched.run(graph))["effective"] is False
    assert len(heard) == len({*heard}) == 2  # each side once


def test_what_fails_where_it_is_asked_whether_to_listen_stops_the_instrument_alone(
    watch: Watch, sampling: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch()
    instrument = next(one for one in watched.session.instruments if one.name == "conditionings")

    def fail(_call: object) -> bool:
        raise RuntimeError("planted")

    monkeypatch.setattr(instrument.wraps[0], "_wants", fail)
    run = watched.run(text_graph({}, "4"))
    assert run.facts["comfyui"]["success"] is True
    assert "planted" in str(watched.off()["conditionings"])
