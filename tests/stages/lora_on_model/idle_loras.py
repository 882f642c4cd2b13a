"""A hundred LoRAs that do nothing, or nothing of use, each for a known reason, in files, in PEFT and in ComfyUI."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import lora_adapter, lora_tuple
from tests.comfy_shapes.modules import BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP, EarlyModelPatcher, NamedModelPatcher, OldModelPatcher
from tests.families import FAMILIES, make_pipeline
from tests.families.loras import State, as_kohya, lora_state, modules_of
from torch import Tensor, nn

from sigmascope.lora.compatibility import judge_lora
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

Findings = list[Mapping[str, Any]]
VERSIONS = (OldModelPatcher, EarlyModelPatcher, NamedModelPatcher, ModelPatcher)


class Plant(NamedTuple):
    """A LoRA that does nothing.

    Attributes:
        reason: The id of the finding that must come first.
        phrase: What its first sentence must contain.
        variation: What makes it differ from others of the same reason.
        findings: Makes it, and gives what is found, the first thing first; takes an empty folder.
    """

    reason: str
    phrase: str
    variation: str
    findings: Callable[[Path], Findings]


@cache
def state_of(family: str, part: str = "") -> State:
    return lora_state(make_pipeline(family), (part or FAMILIES[family].denoiser,))


@cache
def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    """The weights of a family's denoiser."""
    part = FAMILIES[family].denoiser
    weights = getattr(make_pipeline(family), part).state_dict()
    return {f"{part}.{key}": tuple(weight.shape) for key, weight in weights.items()}


def in_file(edit: Callable[[State], State], made_for: str, into: str, folder: Path) -> Findings:
    """What is found in a file beside a model."""
    save_file(
        {key: t.contiguous() for key, t in edit(state_of(made_for)).items()}, folder / "lora.safetensors"
    )
    verdict = judge_lora(folder / "lora.safetensors", shapes_of(into))
    return [
        {"id": finding.id, "message": finding.message, "evidence": finding.evidence}
        for finding in verdict.findings
    ]


def times(state: State, factor: float, ends: tuple[str, ...]) -> State:
    return {key: value * factor if any(end in key for end in ends) else value for key, value in state.items()}


def with_value(state: State, value: float, end: str, every: int) -> State:
    keys = [key for key in state if end in key][::every]
    return state | {key: torch.full_like(state[key], value) for key in keys}


def kohya(edit: Callable[[State], State]) -> Callable[[State], State]:
    return lambda state: edit(as_kohya(state))


def with_alpha_0(state: State) -> State:
    names = {key.partition(".lora_")[0] for key in state}
    return state | {f"{name}.alpha": torch.tensor(0.0) for name in names}


def renamed(old: str, new: str) -> Callable[[State], State]:
    return lambda state: {key.replace(old, new): value for key, value in state.items()}


def only_moved(old: str, new: str, state: State) -> State:
    """A file with only the modules of one block, under another block's name."""
    return renamed(old, new)({key: value for key, value in state.items() if old in key})


def doubled(end: str, axis: int) -> Callable[[State], State]:
    return lambda state: {
        key: torch.cat([value, value], axis) if end in key else value for key, value in state.items()
    }


def without_pair(end: str) -> Callable[[State], State]:
    """The rank of one factor is no longer that of the other."""

    def edit(state: State) -> State:
        key = next(key for key in state if end in key)
        axis = 0 if "lora_A" in end or "down" in end else 1
        return state | {key: torch.cat([state[key], state[key], state[key]], axis)}

    return edit


def of_rank_0(state: State) -> State:
    return {
        key: value[:0] if "lora_A" in key or "down" in key.rpartition(".lora_")[2] else value[:, :0]
        for key, value in state.items()
    }


def swapped(state: State) -> State:
    """Both factors transposed and exchanged: the change is (in, out)."""
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return {
        key.replace(end, other[end]): value.mT
        for key, value in only_rectangular(state).items()
        for end in other
        if end in key and value.dim() == 2
    }


def only_rectangular(state: State) -> State:
    """Matrices that are not square, for which transposing shows."""
    names = [
        name
        for name in modules_of(state)
        if state[f"{name}.lora_A.weight"].shape[1] != state[f"{name}.lora_B.weight"].shape[0]
    ]
    return {key: value for key, value in state.items() if key.partition(".lora_")[0] in names}


def replaced(state: State) -> Callable[[State], State]:
    return lambda _: state


def file_plants() -> Iterator[Plant]:
    ups = {"peft": "lora_B", "kohya": "lora_up"}
    downs = {"peft": "lora_A", "kohya": "lora_down"}
    for family in ("sd15", "flux"):
        shapes = f"{family} "
        forms = ("peft", "kohya") if family == "sd15" else ("peft",)
        for form in forms:
            wrap = kohya if form == "kohya" else lambda edit: edit
            up, down = ups[form], downs[form]
            here = partial(partial, in_file)

            def plant(
                reason: str,
                phrase: str,
                variation: str,
                edit: Callable[[State], State],
                *,
                wrap: Any = wrap,
                here: Any = here,
                family: str = family,
                form: str = form,
            ) -> Plant:
                return Plant(reason, phrase, f"{family} {form} {variation}", here(wrap(edit), family, family))

            for ends in ((up,), (down,), (up, down)):
                yield plant("lora_is_zero", "zero", f"zero {ends}", partial(times, factor=0.0, ends=ends))
            for value, end, every in (
                (torch.nan, up, 10**6),
                (torch.inf, down, 10**6),
                (torch.nan, down, 1),
            ):
                edit = partial(with_value, value=value, end=end, every=every)
                yield plant("lora_not_finite", "NaN or Inf", f"{value} in {end}, one of {every}", edit)
            yield plant("lora_other_shape", "another shape", "inner", doubled(down, 1))
            yield plant("lora_other_shape", "another shape", "outer", doubled(up, 0))
            yield plant("lora_broken", "of ranks 6 and 2", "rank of up", without_pair(up))
            yield plant("lora_unreadable", "of rank 0", "no rank", of_rank_0)
            yield plant("lora_broken", "of ranks 2 and 6", "rank of down", without_pair(down))
        if family == "sd15":
            yield plant("lora_alpha_zero", "alpha 0", shapes, with_alpha_0)
            yield plant(
                "lora_alpha_zero",
                "alpha 0",
                "larger",
                lambda s: with_alpha_0({k: v * 9 for k, v in s.items()}),
            )
            half = lambda s: with_alpha_0(dict(list(s.items())[: 2 * (len(s) // 4)]))  # noqa: E731
            yield plant("lora_alpha_zero", "alpha 0", "half of the modules", half)
    for made_for, into, title in (
        ("flux", "sd15", "FLUX"),
        ("sd15", "flux", "Stable Diffusion 1.5|U-Net"),
        ("wan", "flux", "WAN"),
        ("wan", "sd15", "WAN"),
        ("qwen_image", "sd15", "Qwen-Image"),
        ("sdxl", "flux", "SDXL|U-Net"),
        ("sdxl", "sd15", "SDXL"),
        ("flux", "wan", "FLUX"),
    ):
        yield Plant(
            "lora_other_architecture",
            title,
            f"{made_for} into {into}",
            partial(in_file, dict, made_for, into),
        )
    for family, old, new in (
        ("flux", "transformer.", "transformer.shadow_"),
        ("sd15", "unet.", "unet.shadow_"),
        ("sd15", "unet.", "my_"),
        ("flux", "transformer.", "my_"),
    ):
        yield Plant(
            "lora_unknown",
            "names that the model does not have",
            f"{family} {new}",
            partial(in_file, renamed(old, new), family, family),
        )
    for family in ("sd15", "flux"):
        yield Plant("lora_transposed", "transposed", family, partial(in_file, swapped, family, family))
    for name, phrase, state in (
        ("empty", "no tensors", {}),
        (
            "a checkpoint",
            "no known LoRA format",
            {"conv_in.weight": torch.zeros(4, 4, 3, 3), "conv_in.bias": torch.zeros(4)},
        ),
        (
            "an optimizer",
            "no known LoRA format",
            {"state.0.exp_avg": torch.zeros(4), "state.0.step": torch.zeros(1)},
        ),
        ("an embedding", "it is a textual inversion", {"emb_params": torch.zeros(2, 8)}),
        ("alphas", "it holds alphas and no factors", {"lora_unet_conv_in.alpha": torch.tensor(4.0)}),
        (
            "magnitudes",
            "it holds DoRA's magnitudes and no factors",
            {"lora_unet_conv_in.dora_scale": torch.ones(8, 1)},
        ),
    ):
        yield Plant("lora_unreadable", phrase, name, partial(in_file, replaced(state), "sd15", "sd15"))
    for family, old, new in (
        ("flux", "single_transformer_blocks.1.", "single_transformer_blocks.9."),
        ("sd15", "down_blocks.0.", "down_blocks.9."),
    ):
        moved = partial(in_file, partial(only_moved, old, new), family, family)
        yield Plant("lora_block_missing", "blocks that the model does not have", family, moved)
    encoder = partial(in_file, lambda _: state_of("sd15", "text_encoder"), "sd15", "sd15")
    yield Plant("lora_text_encoder_missing", "text encoder", "sd15", encoder)


def applied_in_comfyui(
    patches: Callable[[], dict[str, Any]],
    version: type[ModelPatcher],
    folder: Path,
    *,
    strength: float = 1.0,
    load: bool = False,
    lowvram: bool = False,
    dtype: torch.dtype = torch.float32,
    again: float | None = None,
) -> Findings:
    unet = version(BaseModel().to(dtype))
    baseline = capture_lora_baseline(unet, None)
    changed = unet.clone()
    changed.add_patches(patches(), strength)
    if again is not None:
        changed.add_patches(patches(), again)
    if load:
        changed.load(lowvram=lowvram)
    return found(analyze_lora_application_results(baseline, changed, None, (changed, None)))


def found(analysis: Any) -> Findings:
    return list(analysis["findings"])


def given_back(version: type[ModelPatcher], which: str, folder: Path) -> Findings:
    unet, clip = version(BaseModel()), CLIP(version(SDClipModel()))
    models = unet if "unet" in which else None, clip if "clip" in which else None
    baseline = capture_lora_baseline(*models)
    return found(analyze_lora_application_results(baseline, *models, models))


def by_hook(form: str, folder: Path) -> Findings:
    """ComfyUI's `CreateHookLora`: the models stay, the conditioning has the hooks."""
    hook = type("WeightHook", (), {"strength_model": 1.0})()
    group = type("HookGroup", (), {"hooks": [hook]})()
    unet, clip = ModelPatcher(BaseModel()), CLIP(ModelPatcher(SDClipModel()))
    baseline = capture_lora_baseline(unet, clip)
    result: Any = {
        "hooks": (group,),
        "conditioning": ([[torch.zeros(1, 4, 8), {"hooks": group, "pooled_output": None}]],),
        "two": ([[torch.zeros(1, 4, 8), {"hooks": group}]], [[torch.zeros(1, 4, 8), {}]]),
    }[form]
    return found(analyze_lora_application_results(baseline, unet, clip, result))


def matrix(make: Callable[..., Any], **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {Q: make(**options)}


def with_number(value: float, factor: int) -> Callable[[], dict[str, Any]]:
    def patches() -> dict[str, Any]:
        adapter = lora_adapter()
        adapter.weights[factor][:] = value
        return {Q: adapter}

    return patches


def tiny() -> dict[str, Any]:
    adapter = lora_adapter()
    adapter.weights[0].mul_(1e-7)
    return {Q: adapter}


def comfyui_plants() -> Iterator[Plant]:
    for version in VERSIONS:
        name = version.__name__

        def plant(
            reason: str,
            phrase: str,
            what: str,
            patches: Any,
            *,
            version: Any = version,
            name: str = name,
            **how: Any,
        ) -> Plant:
            return Plant(
                reason, phrase, f"{name} {what}", partial(applied_in_comfyui, patches, version, **how)
            )

        yield plant("lora_strength_zero", "strength 0", "", matrix(lora_adapter), strength=0.0)
        yield plant("lora_registered_only", "registered", "", matrix(lora_tuple))
        misfit = matrix(lora_adapter, out=6)
        yield plant("lora_changes_failed", "6×8, the weight 8×8", "", misfit, load=True)
        yield plant("lora_is_zero", "zero", "", with_number(0.0, 0), load=True)
        yield plant(
            "lora_lost_in_rounding", "rounding|half a step", "", tiny, load=True, dtype=torch.bfloat16
        )
        both: dict[str, Any] = {"strength": 0.8, "again": -0.8}
        ways: tuple[tuple[str, dict[str, Any]], ...] = (
            ("registered", {}),
            ("merged", {"load": True}),
            ("low VRAM", {"load": True, "lowvram": True}),
        )
        for what, how in ways:
            yield plant("lora_cancelled", "change nothing.*cancel", what, matrix(lora_adapter), **both, **how)
        yield plant("lora_not_applied", "no change was registered", "", dict)
        yield Plant(
            "lora_left_off", "given back|unchanged", f"{name} both", partial(given_back, version, "unet clip")
        )
    yield plant("lora_strength_zero", "strength 0", "loaded", matrix(lora_adapter), strength=0.0, load=True)
    yield plant("lora_lost_in_rounding", "rounding|half a step", "fp16", tiny, load=True, dtype=torch.float16)
    for value, factor in ((torch.nan, 0), (torch.inf, 1)):
        yield plant("lora_not_finite", "NaN or Inf", f"{value}", with_number(value, factor))
    for form in ("hooks", "conditioning", "two"):
        yield Plant("lora_in_conditioning", "conditioning", form, partial(by_hook, form))


def in_peft(change: Callable[[Any], None], folder: Path, **how: Any) -> Findings:
    """A file that is loaded into a small module through PEFT, and what is done to it before the analysis."""
    import peft

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)).to(how.get("dtype", torch.float32))
    baseline = capture_lora_baseline(model, None)
    config = peft.LoraConfig(r=2, lora_alpha=how.get("alpha", 2), target_modules=["0", "1"])
    peft.inject_adapter_in_model(config, model, "style")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=how.get("size", 0.1))
    if how.get("before"):
        change(model)
        baseline = capture_lora_baseline(model, None)
    else:
        change(model)
    return found(analyze_lora_application_results(baseline, model, None, (model, None)))


def unlike_its_file(zero: bool, folder: Path) -> Findings:
    """An adapter whose factors never came from the file, as where a loader ignores that no key matched."""
    import peft

    torch.manual_seed(0)
    model = nn.ModuleDict({"to_q": nn.Linear(8, 8)})
    factors = {"unet.to_q.lora_A.weight": torch.randn(2, 8), "unet.to_q.lora_B.weight": torch.randn(8, 2)}
    save_file(factors, folder / "lora.safetensors")
    baseline = capture_lora_baseline(model, None, folder / "lora.safetensors")
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=zero)
    peft.inject_adapter_in_model(config, model, "style")
    if not zero:
        model["to_q"].set_scale("style", 0.0)  # type: ignore[operator]
    return found(analyze_lora_application_results(baseline, model, None, (model, None)))


def layers(model: nn.Module) -> list[Any]:
    return [model[0], model[1]]  # type: ignore[index]


def on_layers(method: str, *arguments: Any) -> Callable[[Any], None]:
    def change(model: nn.Module) -> None:
        for layer in layers(model):
            getattr(layer, method)(*arguments)

    return change


def set_nan(model: nn.Module) -> None:
    with torch.no_grad():
        tensor: Tensor = layers(model)[0].lora_B["style"].weight
        tensor[0] = torch.nan


def set_scale_to_nan(model: nn.Module) -> None:
    """As diffusers makes of an alpha that is NaN."""
    for layer in layers(model):
        layer.scaling["style"] = float("nan")


def half_of_each(model: nn.Module) -> None:
    """Neither factor is zero, and their product is."""
    with torch.no_grad():
        for layer in layers(model):
            layer.lora_A["style"].weight[0] = 0.0
            layer.lora_B["style"].weight[:, 1:] = 0.0


def peft_plants() -> Iterator[Plant]:
    ways: tuple[dict[str, Any], ...] = ({"size": 0.1}, {"size": 5.0}, {"before": True})
    for how in ways:
        for reason, phrase, change in (
            ("lora_strength_zero", "strength 0", on_layers("set_scale", "style", 0.0)),
            ("lora_disabled", "switched off|disabled", on_layers("enable_adapters", False)),
            ("lora_not_active", "not active|no adapter is active", on_layers("set_adapter", [])),
        ):
            yield Plant(reason, phrase, f"PEFT {how}", partial(in_peft, change, **how))
    for zero in (True, False):
        ignored = partial(unlike_its_file, zero)
        yield Plant("lora_not_loaded", "None of the file's 1 module is on the model", f"zero {zero}", ignored)
    merge = on_layers("merge")
    yield Plant(
        "lora_as_before", "had the same changes before", "PEFT merged", partial(in_peft, merge, before=True)
    )
    yield Plant(
        "lora_as_before", "had the same changes before", "PEFT", partial(in_peft, lambda _: None, before=True)
    )
    yield Plant("lora_alpha_zero", "alpha 0", "PEFT", partial(in_peft, lambda _: None, alpha=0))
    yield Plant("lora_not_finite", "NaN or Inf", "PEFT", partial(in_peft, set_nan))
    yield Plant("lora_not_finite", "NaN or Inf", "PEFT alpha", partial(in_peft, set_scale_to_nan))
    yield Plant("lora_is_zero", "zero", "PEFT", partial(in_peft, lambda _: None, size=0.0))
    yield Plant("lora_is_zero", "zero", "PEFT product", partial(in_peft, half_of_each))
    for dtype in (torch.bfloat16, torch.float16):
        how = {"size": 1e-9 if dtype is torch.bfloat16 else 1e-7, "dtype": dtype}
        yield Plant(
            "lora_lost_in_rounding",
            "rounding|half a step",
            f"PEFT {dtype}",
            partial(in_peft, merge, **how),
        )


PLANTS: tuple[Plant, ...] = (*file_plants(), *comfyui_plants(), *peft_plants())
