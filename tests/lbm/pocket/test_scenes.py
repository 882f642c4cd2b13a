import hashlib

import numpy as np
import pytest

from sigmascope.lbm.pocket.scenes import (
    COOL,
    SOLIDS,
    WARM,
    Light,
    Surfaces,
    make_scene,
    relighting_pair,
    shade,
)

BLACK, WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def flat(normal: tuple[float, float, float], albedo: float = 0.5) -> Surfaces:
    """One pixel of a matt grey surface."""
    return Surfaces(
        np.array([[normal]], np.float32), np.full((1, 1, 3), albedo, np.float32), np.zeros((1, 1), np.float32)
    )


@pytest.mark.parametrize("number", range(12))
def test_normals_are_unit_vectors_towards_the_camera(number: int) -> None:
    normals = make_scene(number, 64).normals
    np.testing.assert_allclose(np.linalg.norm(normals, axis=-1), 1, atol=1e-5)
    assert normals[..., 2].min() > -1e-6


def test_the_same_number_is_the_same_scene() -> None:
    first, second = relighting_pair(3, WARM, 32), relighting_pair(3, WARM, 32)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_other_numbers_are_other_scenes() -> None:
    pictures = {hashlib.sha256(relighting_pair(n, WARM, 32)[0].tobytes()).hexdigest() for n in range(20)}
    assert len(pictures) == 20


def test_shading_follows_lamberts_cosine() -> None:
    # Albedo 0.5, light colour 1 at 60 degrees: 0.5 * cos 60 = 0.25, and 255 * 0.25 ** (1 / 2.2) = 135.8.
    light = Light(direction=(3**0.5 / 2, 0.0, 0.5), colour=WHITE, ambient=BLACK)
    assert shade(flat((0, 0, 1)), light).tolist() == [[[136, 136, 136]]]


def test_a_surface_that_faces_away_has_ambient_light_only() -> None:
    light = Light(direction=(-1.0, 0.0, 0.0), colour=WHITE, ambient=(0.5, 0.5, 0.5))
    # 255 * (0.5 * 0.5) ** (1 / 2.2) = 135.8
    assert shade(flat((1, 0, 0)), light).tolist() == [[[136, 136, 136]]]


def test_the_sky_lights_what_faces_up() -> None:
    light = Light(direction=(0.0, 0.0, 1.0), colour=BLACK, ambient=BLACK, sky=WHITE)
    up, down = (int(shade(flat((0, y, 0)), light)[0, 0, 0]) for y in (1, -1))
    # 255 * 0.5 ** (1 / 2.2) = 186.1
    assert (up, down) == (186, 0)


@pytest.mark.parametrize("solid", SOLIDS, ids=lambda solid: solid.__name__.strip("_"))
def test_the_normals_of_a_solid_are_those_of_its_heights(solid) -> None:  # type: ignore[no-untyped-def]
    size = 400
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    x, y = np.meshgrid(axis, axis)
    height, normal = solid(np.random.default_rng(5), x, y)
    slope_y, slope_x = np.gradient(np.where(np.isfinite(height), height, np.nan), 2 / size)
    expected = np.stack([-slope_x, -slope_y, np.ones_like(slope_x)], -1)
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    cosine = (expected * normal).sum(-1)
    # Finite differences are wrong across an edge and at the rim; nearly all other pixels must agree.
    assert np.nanquantile(cosine, 0.1) > 0.99


def test_the_two_lights_are_far_apart() -> None:
    errors = [
        np.mean((relighting_pair(n, WARM)[1] / 255.0 - relighting_pair(n, COOL)[1] / 255.0) ** 2)
        for n in range(8)
    ]
    assert -10 * np.log10(np.mean(errors)) < 12
