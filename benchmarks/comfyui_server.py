"""A real ComfyUI with and without the watch: how long its prompts take, and whether it grows.

    SIGMASCOPE_COMFYUI=… PYTHONPATH=. python benchmarks/comfyui_server.py pace [--prompts 20]
    SIGMASCOPE_COMFYUI=… PYTHONPATH=. python benchmarks/comfyui_server.py growth [--prompts 500]

`pace` runs each prompt three times in one process: twice unwatched and once watched, in turn. What lies between the medians
of the first two is the spread of equals; the watched median is told beside it. `growth` runs prompts with new seeds,
and with a LoRA applied anew in each tenth, and prints the server's resident size on the way.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from tests.integrations.comfyui.graphs import Graph, family, graph
from tests.integrations.comfyui.server import Server, make_base, serving


def seconds(server: Server, nodes: Graph) -> float:
    """From posting a graph until ComfyUI's history has it, which it has once the watch is done with it too."""
    began = time.perf_counter()
    prompt_id = server.post(nodes)
    while prompt_id not in server.ask(f"/history/{prompt_id}"):
        time.sleep(0.002)
    return time.perf_counter() - began


def pace(server: Server, prompts: int) -> None:
    """Print the medians."""
    ways = {"unwatched": "end", "unwatched again": "end", "watched": "begin"}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, prompts):  # the first is not counted
        order = list(ways)[number % 3 :] + list(ways)[: number % 3]
        for place, way in enumerate(order):
            server.watch(ways[way])
            nodes = graph(seed=100 + 3 * number + place)
            nodes["6"]["inputs"]["steps"] = 8
            took = seconds(server, nodes)
            if number >= 0:
                taken[way].append(took)
    for way, all_seconds in taken.items():
        quartiles = statistics.quantiles(all_seconds, n=4)
        print(f"{way:16} median {quartiles[1]:.4f} s, quartiles {quartiles[0]:.4f} and {quartiles[2]:.4f}")


def growth(server: Server, prompts: int) -> None:
    """Print the resident size, and what there is of ours, each fifty prompts."""
    process = psutil.Process(server.process_id)
    for number in range(1, prompts + 1):
        server.prompt(family("sd3", seed=number, strength=0.5 + (number // 10) / 1000))
        if number % 50 == 0 or number == 10:
            known = server.watch("look")
            ours = ", ".join(f"{known[name]} {name}" for name in ("handlers", "wraps", "threads", "ours"))
            records = len(list(server.records.glob("sigmascope-prompt-*.json")))
            size = process.memory_info().rss / 1e6
            print(f"{number:4} prompts: {size:.1f} MB resident, {records} records, {ours}", flush=True)


def main() -> None:
    """Measure one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["pace", "growth"])
    parser.add_argument("--prompts", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        make_base(base)
        with serving(base) as server:
            if options.what == "pace":
                pace(server, options.prompts or 20)
            else:
                growth(server, options.prompts or 500)


if __name__ == "__main__":
    main()
