"""What goes wrong on the way: failures half-way, weights that others changed, hooks that others put on."""

from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import CPU, optimizer

from sigmascope.errors import OptimizationError
from sigmascope.pipeline import apply_undo
from sigmascope.pipeline.optimization_plan import Choice
from sigmascope.pipeline.optimizer import OptimizationConfig, PipelineOptimizer
from sigmascope.records.memory import MemorySnapshot


@pytest.fixture
def flux() -> Any:
    pipeline = make_pipeline("flux")
    generate(pipeline, "flux")
    return pipeline


def test_a_plan_that_fails_half_way_leaves_the_pipeline_as_it_was(flux: Any) -> None:
    plan = optimizer(dtype="bfloat16", fuse_qkv=True, attention_backend="flash").plan(flux)
    before = deep_snapshot(flux)
    with pytest.raises(OptimizationError, match=r"attention of transformer failed: RuntimeError.*flash-attn"):
        optimizer().apply(flux, plan)
    assert differences(before, deep_snapshot(flux)) == []


def test_a_choice_that_fails_half_way_leaves_the_pipeline_as_it_was(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = deep_snapshot(flux)
    count = 0

    def fails_in_the_middle(module: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError("no more")
        torch.nn.Module.compile(module, *args, **kwargs)

    blocks = type(flux.transformer.transformer_blocks[0]), type(flux.transformer.single_transformer_blocks[0])
    for block in blocks:
        monkeypatch.setattr(block, "compile", fails_in_the_middle, raising=False)
    with pytest.raises(OptimizationError, match="no more"):
        optimizer(compile=True, compile_backend="eager").apply(flux)
    assert differences(before, deep_snapshot(flux)) == []


def test_ctrl_c_while_weights_are_cast_passes_and_puts_them_back(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = deep_snapshot(flux)
    plan = optimizer(dtype="bfloat16", layerwise_casting=True).plan(flux)
    hooks = "diffusers.hooks.layerwise_casting.LayerwiseCastingHook.initialize_hook"
    original = _layerwise_hook().initialize_hook
    count = 0

    def interrupted(hook: Any, module: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return original(hook, module)

    monkeypatch.setattr(hooks, interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer().apply(flux, plan)
    assert differences(before, deep_snapshot(flux)) == []


def _layerwise_hook() -> Any:
    from diffusers.hooks.layerwise_casting import LayerwiseCastingHook

    return LayerwiseCastingHook


def test_weights_are_put_back_after_a_generation_that_broke_off_inside_a_layer(flux: Any) -> None:
    before, first = deep_snapshot(flux), generate(flux, "flux")
    tool = optimizer(layerwise_casting=True)
    tool.apply(flux)
    layer = flux.transformer.transformer_blocks[1].attn.to_q
    handle = layer.register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="broke off"):
        generate(flux, "flux")
    handle.remove()
    flux._current_timestep = None  # the pipeline's own, which it leaves set
    assert tool.undo() == []
    assert differences(before, deep_snapshot(flux)) == []
    assert torch.equal(generate(flux, "flux"), first)


def _fail(*args: object) -> None:
    raise RuntimeError("broke off")


def test_what_a_fused_lora_made_of_weights_stays_and_is_named() -> None:
    pipeline = make_pipeline("sd15")
    tool = optimizer(dtype="bfloat16")
    tool.apply(pipeline)
    state = lora_state(pipeline, ["unet"], only="mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
    pipeline.load_lora_weights({key: value.bfloat16() for key, value in state.items()})
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    fused = pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight.float()
    assert tool.undo() == ["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"]
    assert torch.equal(pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight, fused)


def test_a_lora_that_was_loaded_meanwhile_stays_loaded() -> None:
    pipeline = make_pipeline("sd15")
    tool = optimizer(dtype="bfloat16", channels_last=True)
    tool.apply(pipeline)
    pipeline.load_lora_weights(lora_state(pipeline, ["unet"], only="attn1.to_q"))
    tool.undo()
    assert pipeline.get_active_adapters() == ["default_0"]
    weight = pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.base_layer.weight
    assert weight.dtype == torch.float32


def test_hooks_of_others_are_named_before_anything_is_undone(flux: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    tool = optimizer(layerwise_casting=True)
    tool.apply(flux)
    flux.transformer.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(OptimizationError, match=r"hooks were added since \(fbc_"):
        tool.undo()
    flux.transformer.disable_cache()
    assert tool.undo() == []


def test_without_originals_undo_refuses(flux: Any) -> None:
    config = OptimizationConfig.nothing(dtype="bfloat16", keep_originals=False)
    tool = PipelineOptimizer(config, hardware=CPU)
    tool.apply(flux)
    with pytest.raises(OptimizationError, match="original weights were not kept"):
        tool.undo()
    assert flux.transformer.dtype == torch.bfloat16


def test_originals_that_ram_has_no_room_for_are_refused_with_their_size(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_undo, "memory_snapshot", lambda: MemorySnapshot(ram_available_bytes=1024))
    with pytest.raises(OptimizationError, match=r"takes 0\.\d+ MB of RAM") as raised:
        optimizer(dtype="bfloat16").apply(flux)
    assert "keep_originals=False" in str(raised.value)
    assert flux.transformer.dtype == torch.float32


def test_nothing_to_undo_is_said(flux: Any) -> None:
    with pytest.raises(OptimizationError, match="nothing to undo"):
        optimizer().undo(flux)


def test_a_kind_that_does_not_exist_is_refused(flux: Any) -> None:
    choice = Choice("magic", "transformer", "", "", "", "speed", "none")
    with pytest.raises(OptimizationError, match="no kind of choice called 'magic'"):
        optimizer().apply_choice(flux, choice)


def test_the_context_undoes_also_when_its_block_fails(flux: Any) -> None:
    before = deep_snapshot(flux)
    with pytest.raises(ZeroDivisionError), optimizer(dtype="bfloat16").applied(flux):
        _ = 1 / 0
    assert differences(before, deep_snapshot(flux)) == []


def test_processors_that_the_user_set_meanwhile_stay() -> None:
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    class Own(AttnProcessor2_0):  # type: ignore[misc]
        """One of the user's."""

    pipeline = make_pipeline("sd15")
    pipeline.unet.set_attn_processor(AttnProcessor())
    tool = PipelineOptimizer(hardware=CPU)
    tool.apply(pipeline)
    (first, *_) = pipeline.unet.attn_processors
    pipeline.unet.get_submodule(first.removesuffix(".processor")).set_processor(Own())
    tool.undo()
    kinds = {name: type(one) for name, one in pipeline.unet.attn_processors.items()}
    assert kinds.pop(first) is Own
    assert set(kinds.values()) == {AttnProcessor}
