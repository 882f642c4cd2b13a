"""What a LoRA does through conditionings, hooks and merges, on a real server: held to the latent without the LoRA."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.integrations.comfyui.graphs import Graph, graph
from tests.integrations.comfyui.server import Server, node
from tests.integrations.comfyui.test_checkout_reports import latent_of, lora_loader, saved

from sigmascope.records.run import Run

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
Nodes = dict[str, dict[str, Any]]


def made(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def base(lora: str = "good") -> Graph:
    """The LoRA on model and positive text; "12" is a text without it, which the sampler has for its negative."""
    nodes = graph(seed=301, lora=lora)
    nodes["12"] = made("CLIPTextEncode", clip=["1", 1], text="ugly")
    nodes["6"]["inputs"]["negative"] = ["12", 0]
    return nodes


def without(nodes: Graph, *loaders: str) -> Graph:
    """The same without LoRA loaders and hooks."""
    left: Graph = {name: {**one, "inputs": dict(one["inputs"])} for name, one in nodes.items()}
    for name in loaders:
        gone = left.pop(name)["inputs"]
        sources = [gone.get("model"), gone.get("clip")]
        for one in left.values():
            for key, value in [*one["inputs"].items()]:
                if isinstance(value, list) and value[0] == name:
                    if sources[value[1]] is None:
                        del one["inputs"][key]
                    else:
                        one["inputs"][key] = sources[value[1]]
    return left


def hooked(strength: float, *, plain: bool = True, negative: bool = True, **on: Any) -> Graph:
    """A hook on the positive conditioning and the negative one, with a LoRA on the model or not."""
    nodes = base() if plain else without(base(), "2")
    nodes["20"] = made(
        "CreateHookLora", lora_name="good.safetensors", strength_model=strength, strength_clip=0.0
    )
    nodes["30"] = made("SolidMask", value=0.0, width=64, height=64)
    for name, side in (("21", "positive"), *([("22", "negative")] if negative else [])):
        given = {"cond_NEW": nodes["6"]["inputs"][side], "strength": 1.0, "set_cond_area": "default"}
        nodes[name] = made("ConditioningSetProperties", **given, hooks=["20", 0], **on)
        nodes["6"]["inputs"][side] = [name, 0]
    return nodes


def combined(nodes: Graph, name: str) -> Graph:
    """A conditioning beside the one that has no LoRA."""
    nodes["40"] = made("CLIPTextEncode", clip=["1", 1], text="a dog")
    nodes["42"] = made("ConditioningCombine", conditioning_1=[name, 0], conditioning_2=["40", 0])
    nodes["6"]["inputs"]["positive"] = ["42", 0]
    return nodes


def text(change: Callable[[Graph], Any], positive: str = "41", **settings: Any) -> Graph:
    """A LoRA on the text encoder alone, whose conditioning is "3"."""
    nodes = base("text")
    nodes["40"] = made("CLIPTextEncode", clip=["1", 1], text="a dog")
    nodes["41"] = change(nodes)
    nodes["6"]["inputs"] |= {"positive": [positive, 0], **settings}
    return nodes


def average(share: float) -> Graph:
    given = {"conditioning_to": ["40", 0], "conditioning_from": ["3", 0], "conditioning_to_strength": share}
    return text(lambda _: made("ConditioningAverage", **given))


def merge(*steps: tuple[str, str, str, dict[str, Any]], more: Nodes | None = None) -> Graph:
    nodes = base() | (more or {})
    for number, (kind, first, second, settings) in enumerate(steps, 10):
        nodes[str(number)] = made(kind, model1=[first, 0], model2=[second, 0], **settings)
    nodes["6"]["inputs"]["model"] = [str(9 + len(steps)), 0]
    nodes["3"]["inputs"]["clip"] = ["1", 1]
    return nodes


def taken_out_of_one() -> Graph:
    """A hook on both conditionings, and one against it on the positive one."""
    nodes = hooked(0.8, plain=False)
    given = {"lora_name": "good.safetensors", "strength_model": -0.8, "strength_clip": 0.0}
    nodes["25"] = made("CreateHookLora", **given)
    nodes["26"] = made("CombineHooks2", hooks_A=["20", 0], hooks_B=["25", 0])
    nodes["21"]["inputs"]["hooks"] = ["26", 0]
    return nodes


def noise_masked(sampler: str = "euler") -> Graph:
    nodes = base()
    nodes["30"] = made("SolidMask", value=0.0, width=64, height=64)
    nodes["31"] = made("SetLatentNoiseMask", samples=["5", 0], mask=["30", 0])
    nodes["6"]["inputs"] |= {"latent_image": ["31", 0], "sampler_name": sampler}
    return nodes


def until_half(sampler: str) -> Graph:
    """No conditioning is there for the last steps."""
    nodes = base()
    for name, side in (("21", "positive"), ("22", "negative")):
        given = {"conditioning": nodes["6"]["inputs"][side], "start": 0.0, "end": 0.5}
        nodes[name] = made("ConditioningSetTimestepRange", **given)
        nodes["6"]["inputs"][side] = [name, 0]
    nodes["6"]["inputs"]["sampler_name"] = sampler
    return nodes


def clip_skip(last: int, *, is_hook: bool = False) -> Graph:
    """A LoRA on the text encoder's last layer, of which CLIPSetLastLayer takes the text from this one."""
    nodes = base("last")
    nodes["13"] = made("CLIPSetLastLayer", clip=["2", 1], stop_at_clip_layer=last)
    nodes["3"]["inputs"]["clip"] = ["13", 0]
    if is_hook:
        strengths = {"strength_model": 0.0, "strength_clip": 0.8}
        nodes["2"] = made("CreateHookLora", lora_name="last.safetensors", **strengths)
        on_clip = {"apply_to_conds": False, "schedule_clip": False, "hooks": ["2", 0]}
        nodes["4"] = made("SetClipHooks", clip=["1", 1], **on_clip)
        nodes["13"]["inputs"]["clip"] = ["4", 0]
        nodes["6"]["inputs"]["model"] = ["1", 0]
    return nodes


def multiplied(lora: str = "good", kind: str = "Self", **factors: float) -> Graph:
    """The LoRA is on queries of self attention, "a2k" on keys of cross attention."""
    nodes = base(lora)
    given = {"q": 1.0, "k": 1.0, "v": 1.0, "out": 1.0, **factors}
    nodes["9"] = made(f"UNet{kind}AttentionMultiply", model=["2", 0], **given)
    nodes["6"]["inputs"]["model"] = ["9", 0]
    return nodes


def before(kind: str, **given: Any) -> Graph:
    """A sampler with the LoRA, a node that takes its latent "11", and the sampler "6" after it without a LoRA."""
    nodes = base()
    nodes["11"] = {"class_type": "KSampler", "inputs": dict(nodes["6"]["inputs"])}
    nodes["14"] = made(kind, **given)
    nodes["6"]["inputs"] |= {"model": ["1", 0], "positive": ["12", 0], "latent_image": ["14", 0]}
    return nodes


def blended(share: float) -> Graph:
    return before("LatentBlend", samples1=["11", 0], samples2=["5", 0], blend_factor=share)


SUBTRACT, NEGATIVE = {"multiplier": 1.0}, {"9": lora_loader("1", "good", -0.8)}


@pytest.mark.parametrize(
    ("nodes", "acts"),
    [
        pytest.param(hooked(-0.8), {"2": False, "20": False}, id="hook against the model's"),
        pytest.param(hooked(-0.8, negative=False), {"2": True, "20": True}, id="on one conditioning"),
        pytest.param(hooked(-0.3), {"2": True, "20": True}, id="not all of it"),
        pytest.param(hooked(0.8, plain=False, mask=["30", 0]), {"20": False}, id="hook with a mask of zeros"),
        pytest.param(
            combined(hooked(0.8, plain=False, negative=False, mask=["30", 0]), "21"), {"20": False},
            id="beside another conditioning",
        ),
        pytest.param(combined(hooked(0.8, plain=False, negative=False), "21"), {"20": True}, id="without a mask"),
        pytest.param(text(lambda _: made("ConditioningZeroOut", conditioning=["3", 0])), {"2": False}, id="zeroed"),
        pytest.param(average(1.0), {"2": False}, id="averaged with weight 0"),
        pytest.param(average(0.5), {"2": True}, id="averaged"),
        pytest.param(
            text(lambda _: made("ConditioningConcat", conditioning_to=["40", 0], conditioning_from=["3", 0])),
            {"2": True}, id="concatenated",
        ),
        pytest.param(
            text(lambda _: made("ConditioningZeroOut", conditioning=["3", 0]), "3", cfg=0.0), {"2": False}, id="cfg 0"
        ),
        pytest.param(
            text(lambda _: made("PreviewAny", source=["3", 0]), "3", cfg=0.0, sampler_name="euler_cfg_pp"), {"2": None},
            id="cfg 0 by a sampler that takes both conditionings itself",
        ),
        pytest.param(noise_masked(), {"2": False}, id="noise mask of zeros"),
        pytest.param(noise_masked("euler_cfg_pp"), {"2": None}, id="by a sampler that takes more than it leaves"),
        pytest.param(until_half("euler_ancestral"), {"2": None}, id="no conditioning in the last step"),
        pytest.param(taken_out_of_one(), {"20": True, "25": True}, id="hook against another on one conditioning"),
        pytest.param(text(lambda _: made("PreviewAny", source=["3", 0]), "40"), {"2": False}, id="to no sampler"),
        pytest.param(
            merge(("ModelMergeSubtract", "2", "2", SUBTRACT), ("ModelMergeAdd", "1", "10", {})), {"2": False},
            id="base + (lora - lora)",
        ),
        pytest.param(
            merge(("ModelMergeSubtract", "2", "1", SUBTRACT), ("ModelMergeAdd", "1", "10", {})), {"2": True},
            id="base + (lora - base)",
        ),
        pytest.param(multiplied(k=0.0), {"2": None}, id="queries beside keys of 0"),
        pytest.param(multiplied(out=0.0), {"2": None}, id="queries of an attention whose output is 0"),
        pytest.param(multiplied(k=0.5), {"2": True}, id="beside half the keys"),
        pytest.param(multiplied(kind="Cross", q=0.0), {"2": True}, id="of another attention"),
        pytest.param(before("LatentMultiply", samples=["11", 0], multiplier=0.0), {"2": None}, id="its latent times 0"),
        pytest.param(before("LatentMultiply", samples=["11", 0], multiplier=0.5), {"2": True}, id="its latent times 0.5"),
        pytest.param(blended(0.0), {"2": None}, id="nothing of its latent in a blend"),
        pytest.param(blended(0.5), {"2": True}, id="half of its latent in a blend"),
        pytest.param(
            merge(("ModelMergeSimple", "2", "9", {"ratio": 0.5}), more=NEGATIVE), {"2": False, "9": False},
            id="merged with its negative",
        ),
    ],
)  # fmt: skip
def test_a_lora_is_said_to_act_where_the_latent_is_another_one_without_it(
    server: Server, nodes: Graph, acts: dict[str, bool | None]
) -> None:
    """A latent that rounding alone moved counts as the one without the LoRA."""
    told = verdicts_of(server.run(latent_of(nodes)))
    bare = saved(server, without(nodes, *acts))
    moved = float((saved(server, nodes) - bare).norm() / bare.norm())
    assert {name: told[name]["effective"] for name in acts} == acts, told
    assert (moved > 2e-4) is any(acts.values())


@pytest.mark.parametrize("is_hook", [False, True])
@pytest.mark.parametrize(("last", "acts"), [(-1, True), (-2, None)])
def test_of_a_lora_on_layers_that_clip_skip_leaves_out_it_is_not_known_whether_it_acts(
    server: Server, last: int, is_hook: bool, acts: bool | None
) -> None:
    """Stable Diffusion 1.5 takes no pooled output."""
    nodes = clip_skip(last, is_hook=is_hook)
    verdict = verdicts_of(server.run(latent_of(nodes)))["2"]
    bare = clip_skip(last)
    bare["13"]["inputs"]["clip"], bare["6"]["inputs"]["model"] = ["1", 1], ["1", 0]
    del bare["2"]
    assert verdict["effective"] is acts
    assert ("clip skip" in verdict["says"]) is (acts is None)
    assert bool((saved(server, nodes) != saved(server, bare)).any()) is bool(acts)


def with_two_models(positive: str, negative: str) -> Graph:
    """A guider that takes a model for each side."""
    nodes = without(base(), "2") | {"2": base()["2"]}
    given = {"positive": ["3", 0], "negative": ["12", 0], "cfg": 4.0}
    nodes["53"] = made("DualModelGuider", model=[positive, 0], model_negative=[negative, 0], **given)
    nodes["50"] = made("RandomNoise", noise_seed=1)
    nodes["51"] = made("KSamplerSelect", sampler_name="euler")
    nodes["52"] = made("BasicScheduler", model=["1", 0], scheduler="normal", steps=2, denoise=1.0)
    links = {"noise": "50", "guider": "53", "sampler": "51", "sigmas": "52", "latent_image": "5"}
    nodes["6"] = made("SamplerCustomAdvanced", **{name: [node, 0] for name, node in links.items()})
    return nodes


@pytest.mark.parametrize(("models", "acts"), [(("1", "2"), False), (("2", "1"), True)])
def test_of_two_models_with_the_same_weights_the_lora_of_the_one_that_was_loaded_last_acts(
    server: Server, models: tuple[str, str], acts: bool
) -> None:
    if "DualModelGuider" not in server.ask("/object_info"):
        pytest.skip("this ComfyUI has no such guider")
    nodes = with_two_models(*models)
    bare = without(nodes, "2")
    verdict = verdicts_of(server.run(latent_of(nodes)))["2"]
    assert verdict["effective"] is acts
    assert acts or "one set of weights for both models of the node" in verdict["says"]
    assert bool((saved(server, nodes) != saved(server, bare)).any()) is acts


def test_a_lora_on_a_model_whose_weights_are_multiplied_is_said_to_act_and_no_more(server: Server) -> None:
    nodes = base()
    nodes["9"] = made("UNetSelfAttentionMultiply", model=["1", 0], q=0.5, k=1.0, v=1.0, out=1.0)
    nodes["2"]["inputs"]["model"] = ["9", 0]
    (verdict,) = node(server.run(latent_of(nodes)), "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["why"]) == (True, 7, None)


def verdicts_of(run: Run) -> dict[str, dict[str, Any]]:
    """By node, of one that ran or that ComfyUI kept."""
    kept = {one["node"]: one for one in run.facts["comfyui"].get("loras_kept", ())}
    ran = [stage.facts["node"]["id"] for stage in run.walk() if "lora_verdicts" in stage.facts]
    return kept | {name: node(run, name).facts["lora_verdicts"][0] for name in ran}
