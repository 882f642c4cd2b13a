"""Solids as a camera that looks along -z sees them: height and normals of each pixel, in closed form."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
"""Computed in float32 where NumPy keeps to it and in float64 where a parameter is one; stored as float32."""


def unit(vectors: Array) -> Array:
    """Vectors of the last axis at length 1; zeros stay zeros."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-9), np.float32)


def normals_from_slopes(slope_x: Array, slope_y: Array) -> Array:
    """(height, width, 3) unit normals of a height field with these slopes along x and y."""
    return unit(np.stack([-slope_x, -slope_y, np.ones_like(slope_x)], axis=-1))


def turned(rng: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array, float, float]:
    """Coordinates in axes turned by a random angle, with the angle's cosine and sine."""
    angle = float(rng.uniform(0, 2 * np.pi))
    c, s = float(np.cos(angle)), float(np.sin(angle))
    return c * x + s * y, c * y - s * x, c, s


Solid = Callable[[np.random.Generator, Array, Array], tuple[Array, Array]]
"""Takes a generator and x, y around the solid's centre; gives height (-inf outside) and normals."""


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
