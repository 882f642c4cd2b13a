"""Rendered scenes with exact normals, so that relighting has a ground truth.

A scene is a few shaded solids before a wavy wall, seen by an orthographic camera looking along -z:
x to the right, y up, both in [-1, 1]. Every surface is a height field or a convex solid, so depth and
normals are closed-form. Shading is Lambert with an ambient term and a Blinn highlight, in linear light,
and is encoded with gamma 2.2.

Everything follows from the scene's number: the same number gives the same pixels on every machine with
the same NumPy.

`render_pair` gives a scene as PNG files in memory.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Vector = tuple[float, float, float]
Array = NDArray[np.floating[Any]]
"""Computed in float32 where NumPy keeps to it and in float64 where a parameter is one; stored as float32."""
Solid = Callable[[np.random.Generator, Array, Array], tuple[Array, Array]]
"""Takes a generator and x, y around the solid's centre; gives height (-inf outside) and normals."""


@dataclass(frozen=True, slots=True)
class Light:
    """A directional light and the ambient light beside it.

    `direction` points from the surface to the light and need not be of unit length. `sky` is added in
    proportion to how far a surface faces upwards, as outdoors.
    """

    direction: Vector
    colour: Vector
    ambient: Vector
    sky: Vector = (0.0, 0.0, 0.0)


WARM = Light(direction=(-0.65, 0.40, 0.65), colour=(1.10, 0.76, 0.42), ambient=(0.12, 0.08, 0.09))
"""The light of the pocket model `base`: low evening sun from the left."""
COOL = Light(direction=(0.70, 0.15, 0.65), colour=(0.32, 0.60, 1.10), ambient=(0.04, 0.07, 0.14))
"""The light of the pocket model `tuned`: a blue lamp from the right."""


def relighting_pair(
    number: int, light: Light, size: int = 128
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Render one scene under its own soft light and under `light`.

    Args:
        number: The scene's number; the same number is the same scene.
        light: The light to relight it with.
        size: Height and width in pixels.

    Returns:
        Source and target picture, each (size, size, 3) uint8.
    """
    surfaces = make_scene(number, size)
    return shade(surfaces, scene_source_light(number)), shade(surfaces, light)


@dataclass(frozen=True, slots=True)
class Surfaces:
    """What the camera sees at each pixel: (height, width, 3) normals and albedo, (height, width) gloss."""

    normals: Array
    albedo: Array
    gloss: Array


def make_scene(number: int, size: int = 128) -> Surfaces:
    """Build scene `number`: a wall and three to six solids."""
    rng = np.random.default_rng([number, 0])
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    x, y = np.meshgrid(axis, -axis)
    depth = np.full((size, size), -10, np.float32)
    normals = _wall_normals(rng, x, y)
    albedo = _texture(rng, x, y)
    gloss = np.zeros((size, size), np.float32)
    for _ in range(int(rng.integers(3, 7))):
        solid = SOLIDS[int(rng.integers(len(SOLIDS)))]
        centre = rng.uniform(-0.8, 0.8, size=2).astype(np.float32)
        near = float(rng.uniform(0, 2))
        height, normal = solid(rng, x - centre[0], y - centre[1])
        colour, shine = _texture(rng, x - centre[0], y - centre[1]), float(rng.choice([0, 0, 0.25, 0.5]))
        seen = np.isfinite(height) & (height + near > depth)
        depth = np.where(seen, height + near, depth)
        normals = np.where(seen[..., None], normal, normals)
        albedo = np.where(seen[..., None], colour, albedo)
        gloss = np.where(seen, np.float32(shine), gloss)
    return Surfaces(normals.astype(np.float32), albedo.astype(np.float32), gloss.astype(np.float32))


def _wall_normals(rng: np.random.Generator, x: Array, y: Array) -> Array:
    """Return normals of a sum of four plane waves: h = sum a_i sin(k_i . p + phase_i)."""
    slope_x, slope_y = np.zeros_like(x), np.zeros_like(y)
    for _ in range(4):
        angle, frequency = rng.uniform(0, 2 * np.pi), rng.uniform(2, 7)
        kx, ky = frequency * np.cos(angle), frequency * np.sin(angle)
        wave = rng.uniform(0.10, 0.30) * np.cos(kx * x + ky * y + rng.uniform(0, 2 * np.pi))
        slope_x, slope_y = slope_x + wave * np.cos(angle), slope_y + wave * np.sin(angle)
    return normals_from_slopes(slope_x.astype(np.float32), slope_y.astype(np.float32))


def normals_from_slopes(slope_x: Array, slope_y: Array) -> Array:
    """(height, width, 3) unit normals of a height field with these slopes along x and y."""
    return unit(np.stack([-slope_x, -slope_y, np.ones_like(slope_x)], axis=-1))


def unit(vectors: Array) -> Array:
    """Vectors of the last axis at length 1; zeros stay zeros."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-9), np.float32)


def _texture(rng: np.random.Generator, x: Array, y: Array) -> Array:
    """Return (height, width, 3) albedo: plain (half of all), stripes, checks or soft spots of two colours."""
    first, second = _colour(rng), _colour(rng)
    u, v, _, _ = turned(rng, x, y)
    frequency = rng.uniform(4, 9)
    kind = int(rng.integers(6))
    if kind == 0:
        share = 0.5 + 0.5 * np.sin(frequency * 1.5 * u)
    elif kind == 1:
        share = (np.sin(frequency * u) * np.sin(frequency * v) > 0).astype(np.float32)
    elif kind == 2:
        share = np.clip(np.sin(frequency * u) * np.sin(frequency * v) * 3 - 0.5, 0, 1)
    else:
        share = np.zeros_like(x)
    share = np.asarray(share, np.float32)[..., None] * np.float32(rng.uniform(0.4, 1))
    return first * (1 - share) + second * share


def _colour(rng: np.random.Generator) -> Array:
    """Return an albedo between 0.25 and 0.95, from grey to fairly saturated."""
    tint = rng.uniform(0, 1, 3)
    grey = tint.mean()
    mixed = grey + (tint - grey) * rng.uniform(0.3, 1.0)
    return np.asarray(0.25 + 0.70 * mixed, np.float32)


def turned(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array, float, float]:
    """Coordinates in axes turned by a random angle, with the angle's cosine and sine."""
    angle = float(rng.uniform(0, 2 * np.pi))
    c, s = float(np.cos(angle)), float(np.sin(angle))
    return c * x + s * y, c * y - s * x, c, s


def _ellipsoid(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array]:
    a, b = rng.uniform(0.25, 0.55, 2)
    depth = rng.uniform(0.25, 0.55)
    u, v, c, s = turned(rng, x, y)
    inside = 1 - (u / a) ** 2 - (v / b) ** 2
    w = np.sqrt(np.clip(inside, 0, None))
    nu, nv, nz = u / a**2, v / b**2, w / depth
    normal = unit(np.stack([c * nu - s * nv, s * nu + c * nv, nz], axis=-1))
    return np.where(inside > 0, depth * w, -np.inf), normal


def _sphere(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array]:
    radius = rng.uniform(0.22, 0.5)
    inside = radius**2 - x**2 - y**2
    z = np.sqrt(np.clip(inside, 0, None))
    return np.where(inside > 0, z, -np.inf), unit(np.stack([x, y, z], axis=-1))


def _cylinder(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array]:
    radius, half_length = rng.uniform(0.15, 0.32), rng.uniform(0.3, 0.65)
    u, v, c, s = turned(rng, x, y)
    inside = radius**2 - v**2
    z = np.sqrt(np.clip(inside, 0, None))
    normal = unit(np.stack([-s * v, c * v, z], axis=-1))
    return np.where((inside > 0) & (np.abs(u) < half_length), z, -np.inf), normal


def _torus(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array]:
    ring, tube = rng.uniform(0.28, 0.42), rng.uniform(0.1, 0.17)
    distance = np.hypot(x, y)
    t = distance - ring
    inside = tube**2 - t**2
    z = np.sqrt(np.clip(inside, 0, None))
    outward = t / np.maximum(distance, 1e-6)
    return np.where(inside > 0, z, -np.inf), unit(np.stack([outward * x, outward * y, z], axis=-1))


def _cone(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array]:
    radius, height = rng.uniform(0.3, 0.55), rng.uniform(0.3, 0.6)
    distance = np.hypot(x, y)
    slope = -height / radius / np.maximum(distance, 1e-6)
    z = height * (1 - distance / radius)
    return np.where(distance < radius, z, -np.inf), normals_from_slopes(slope * x, slope * y)


def _box(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array]:
    """A box turned in space: the nearest of the planes that face the camera bounds it from the front."""
    axes = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    half = rng.uniform(0.2, 0.4, 3)
    planes = np.concatenate([axes, -axes]).astype(np.float32)
    offsets = np.concatenate([half, half]).astype(np.float32)
    front, back = np.full_like(x, np.inf), np.full_like(x, -np.inf)
    normal = np.zeros((*x.shape, 3), np.float32)
    for plane, offset in zip(planes, offsets, strict=True):
        if abs(plane[2]) < 1e-6:
            continue
        z = (offset - plane[0] * x - plane[1] * y) / plane[2]
        if plane[2] > 0:
            normal = np.where((z < front)[..., None], plane, normal)
            front = np.minimum(front, z)
        else:
            back = np.maximum(back, z)
    return np.where(front > back, front, -np.inf), normal


SOLIDS: tuple[Solid, ...] = (_sphere, _ellipsoid, _cylinder, _torus, _cone, _box)


def shade(surfaces: Surfaces, light: Light) -> NDArray[np.uint8]:
    """Light a scene.

    Returns:
        (height, width, 3) sRGB-like picture, 8 bits a channel.
    """
    to_light = unit(np.asarray(light.direction, np.float32))
    half = unit(to_light + np.array([0, 0, 1], np.float32))
    lambert = np.clip(surfaces.normals @ to_light, 0, None)[..., None]
    upward = (0.5 + 0.5 * surfaces.normals[..., 1])[..., None]
    highlight = np.clip(surfaces.normals @ half, 0, None) ** 24 * surfaces.gloss * (lambert[..., 0] > 0)
    colour = np.asarray(light.colour, np.float32)
    diffuse = np.asarray(light.ambient, np.float32) + np.asarray(light.sky, np.float32) * upward
    linear = surfaces.albedo * (diffuse + colour * lambert) + highlight[..., None] * colour
    encoded = np.clip(linear, 0, 1) ** np.float32(1 / 2.2)
    return np.asarray(encoded * 255 + 0.5, np.uint8)


def scene_source_light(number: int) -> Light:
    """Return the soft light that scene `number` is photographed under."""
    return source_light(np.random.default_rng([number, 1]))


def source_light(rng: np.random.Generator) -> Light:
    """Return the soft light of a source picture: blue sky above, and a pale sun from the upper right.

    Two lights of different colour and direction, so that shading tells which way a surface faces.
    """
    jitter = rng.uniform(-0.1, 0.1, size=2)
    level = float(rng.uniform(0.50, 0.62))
    return Light(
        direction=(0.45 + float(jitter[0]), 0.35 + float(jitter[1]), 0.80),
        colour=(level, 0.92 * level, 0.78 * level),
        ambient=(0.17, 0.17, 0.18),
        sky=(0.20, 0.27, 0.40),
    )


def render_pair(number: int, light: Light, size: int) -> tuple[str, dict[str, bytes]]:
    """Render a scene.

    Args:
        number: Of the scene.
        light: Of the target.
        size: Height and width in pixels.

    Returns:
        The scene's name, and PNG files as `source.png` (soft light) and `target.png`.
    """
    source, target = relighting_pair(number, light, size)
    members = {"source.png": source, "target.png": target}
    files = {}
    for name, pixels in members.items():
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        files[name] = buffer.getvalue()
    return f"scene-{number:06d}", files
