"""What the watch of ComfyUI costs its server: processor time a node and a sampling step, of our own code.

    PYTHONPATH=. python benchmarks/comfyui_cost.py [--count 500] [--repeats 5]

A stand-in of the server runs a prompt of many nodes that do nothing, then a prompt of one sampler with many steps, with
and without the watch. The difference is told, the least of the repeats, between a prompt with many and one with few nodes
or steps. Nodes hand on a text; those with a latent have the look for NaN beside that, which is a row of its own. What the
record costs once ComfyUI has told of the prompt's end is a row too. Writing it happens on another thread.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from tests.integrations.comfyui.host import Graph, Host, Node, latent

from sigmascope.integrations.comfyui.session import Session

Make = Callable[[int, str], Graph]
TEXT, LATENT = torch.randn(1, 77, 8), torch.randn(1, 4, 8, 8)


def a_host() -> Host:
    """The stand-in, with nodes that hand on what they get, and one that tells of steps."""
    host = Host()
    sys.modules.update(host.modules)

    def sample(latent_image: Any, steps: int, **_: Any) -> Any:
        host.step_through(steps)
        return (latent_image,)

    def sample_with_two(latent_image: Any, steps: int, **_: Any) -> Any:
        sides = {
            side: [{"uuid": uuid4(), "strength": 1.0, "cross_attn": TEXT}]
            for side in ("positive", "negative")
        }
        bar = host.module("comfy.utils").ProgressBar(steps)
        guider = host.module("comfy.samplers").CFGGuider(None, sides, 5.0)
        for step in range(steps):
            guider.outer_predict_noise(LATENT, step)
            bar.update_absolute(step + 1, steps)
        return (latent_image,)

    host.nodes = {
        "Text": Node(("STRING",), lambda x: (x,)),
        "Empty": Node(("LATENT",), lambda x: (latent(),)),
        "Latent": Node(("LATENT",), lambda x: (x,)),
        "Sampler": Node(("LATENT",), sample),
        "Sampler of two": Node(("LATENT",), sample_with_two),
    }
    return host


def texts(count: int, seed: str) -> Graph:
    """A chain of nodes that hand on a text."""
    return {
        str(node): {"class_type": "Text", "inputs": {"x": [str(node - 1), 0] if node else seed}}
        for node in range(count)
    }


def latents(count: int, seed: str) -> Graph:
    """A chain of nodes that hand on a latent."""
    return {
        str(node): {
            "class_type": "Latent" if node else "Empty",
            "inputs": {"x": [str(node - 1), 0] if node else seed},
        }
        for node in range(count)
    }


def steps(count: int, seed: str, sampler: str = "Sampler") -> Graph:
    """One sampler."""
    inputs = {"latent_image": seed, "steps": count, "sampler_name": "euler"}
    return {"0": {"class_type": sampler, "inputs": inputs}}


def microseconds(host: Host, make: Make, count: int, repeats: int) -> tuple[float, float]:
    """Processor time of this thread for each node or step: while the prompt runs, and once it is over; the least."""
    taken: dict[int, list[tuple[int, int]]] = {count // 5: [], count: []}
    for repeat in range(repeats + 1):
        for size, times in taken.items():
            host.cache.clear()
            graph = make(size, str(repeat))
            over: list[int] = []
            host.told = lambda over=over: over.append(time.thread_time_ns())  # type: ignore[misc]
            began = time.thread_time_ns()
            host.prompt(graph)
            times.append((over[0] - began, time.thread_time_ns() - over[0]))
    few, many = ([min(column) for column in zip(*times[1:], strict=True)] for times in taken.values())
    inside, after = ((more - less) / (count - count // 5) / 1e3 for less, more in zip(few, many, strict=True))
    return inside, after


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="nodes and steps of a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    host, session = a_host(), Session(None)
    ways: dict[str, Make] = {
        "a node": texts,
        "a node, with the look for NaN": latents,
        "a sampling step": steps,
        "a step with two conditionings": partial(steps, sampler="Sampler of two"),
    }
    bare = {name: microseconds(host, make, options.count, options.repeats)[0] for name, make in ways.items()}
    session.start()
    print(f"{'µs of processor time':32} {'bare':>8} {'watched':>8} {'the watch':>10} {'afterwards':>10}")
    for name, make in ways.items():
        watched, after = microseconds(host, make, options.count, options.repeats)
        print(f"{name:32} {bare[name]:8.1f} {watched:8.1f} {watched - bare[name]:10.1f} {after:10.1f}")
    session.stop()


if __name__ == "__main__":
    main()
