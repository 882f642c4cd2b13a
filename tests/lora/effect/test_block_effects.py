import pytest

from sigmascope.lora.effect import Effect, by_block

EFFECTS = {
    "unet.up_blocks.1.attentions.0.proj_in.weight": Effect(3.0, 0.3, 10.0),
    "unet.down_blocks.0.resnets.0.conv1.weight": Effect(5.0, 0.5, 10.0),
    "unet.up_blocks.1.attentions.0.proj_out.weight": Effect(4.0, 0.2, 20.0),
    "text_encoder.text_model.encoder.layers.3.self_attn.q_proj.weight": Effect(
        None, None, 1.0, unavailable={"delta_norm": "NaN"}
    ),
}


def test_blocks_come_in_the_order_of_the_model() -> None:
    assert [block.name for block in by_block(EFFECTS)] == ["text_encoder.3", "down_blocks.0", "up_blocks.1"]


def test_a_block_is_as_strong_as_its_weights_together() -> None:
    block = by_block(EFFECTS)[-1]
    assert block.delta_norm == pytest.approx(5.0)  # √(9 + 16)
    assert block.relative_change == pytest.approx(5.0 / 500.0**0.5)
    assert block.share == pytest.approx(0.5)


def test_a_block_without_figures_says_why() -> None:
    block = by_block(EFFECTS)[0]
    assert block.delta_norm is None
    assert block.unavailable == {"delta_norm": "missing for 1 of 1 weights: NaN"}


def test_no_effects_are_no_blocks() -> None:
    assert by_block({}) == ()
