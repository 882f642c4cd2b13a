import numpy as np
import pytest
import torch
from tests.pocket_pipelines import KINDS, WEIGHTS, load_pocket, prompts
from tests.pocket_pipelines.solids import draw_solid, is_held_out, solid_of

from sigmascope.lbm.pocket.scenes import COOL, WARM

LIGHTS = {"base": WARM, "tuned": COOL}


def test_no_prompt_is_both_trained_and_held_out() -> None:
    assert not set(prompts(held_out=True)) & set(prompts(held_out=False))
    assert len({*prompts(held_out=True), *prompts(held_out=False)}) == 2 * 6 * 6 * 5


def test_no_file_of_weights_is_above_two_megabytes() -> None:
    sizes = {path.name: path.stat().st_size for path in WEIGHTS.glob("*.safetensors")}
    assert set(sizes) == {
        f"{kind}-{part}.safetensors" for kind in KINDS for part in ("base", "tuned", "text")
    }
    assert max(sizes.values()) <= 2_000_000


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_word_is_a_token(kind: str) -> None:
    tokenizer = load_pocket(kind, "base").tokenizer
    for prompt in (*prompts(held_out=True), *prompts(held_out=False)):
        assert len(tokenizer(prompt).input_ids) == len(prompt.split()) + 2 <= tokenizer.model_max_length


@pytest.mark.slow
@pytest.mark.parametrize("look", list(LIGHTS))
def test_walls_are_lit_as_the_look_says(kind: str, look: str) -> None:
    """In nine of ten pictures at least: now and then a wall has not the colour that the prompt asks for."""
    numbers = [number for number in range(120) if is_held_out(number)]
    solids = [solid_of(number) for number in numbers]
    made = load_pocket(kind, look)(
        [solid.prompt for solid in solids],
        num_inference_steps=12,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(0),
    ).images
    lit = []
    for solid, number, picture in zip(solids, numbers, made, strict=True):
        distance = {}
        for name, light in LIGHTS.items():
            drawn = draw_solid(solid, number, light)[:8, :8].astype(float)
            distance[name] = np.square(drawn.mean((0, 1)) - np.asarray(picture)[:8, :8].mean((0, 1))).sum()
        lit.append(min(distance, key=lambda name: distance[name]) == look)
    assert np.mean(lit) >= 0.9
