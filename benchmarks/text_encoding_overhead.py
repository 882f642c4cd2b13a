"""What watching costs one encoding of a prompt.

    python benchmarks/text_encoding_overhead.py [--repeats 51] [--layers 2]

A CLIP text encoder of CLIP-L's width (768, 77 tokens, random weights; `--layers 12` is all of it) encodes a prompt.
Each part that the monitor adds is timed by itself, in turn with the others, as medians of wall time; the table
gives each as a share of the encoding. "start, end" is all that happens while the step's clock runs or right
around it; baseline and analysis come before and after, and do not count as the step's time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import CLIPTextConfig, CLIPTextModel

from sigmascope.monitor.workflow import WorkflowMonitor

PROMPT = "a red fox jumps over the lazy dog, highly detailed, 4k"


class Words:
    """A tokenizer of one token a word, so that the table does not depend on a vocabulary."""

    model_max_length = 77

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Count the words."""
        return {"input_ids": [len(word) for word in text.split()]}

    def tokenize(self, text: str) -> list[str]:
        """Split at white space."""
        return text.split()


def make_encoder(layers: int) -> CLIPTextModel:
    """A CLIP-L of that many layers."""
    config = CLIPTextConfig(
        num_hidden_layers=layers,
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        bos_token_id=0,
        eos_token_id=1,
    )
    return CLIPTextModel(config).eval()


def parts(encoder: CLIPTextModel) -> dict[str, Callable[[], Any]]:
    """What to time, by name."""
    monitor = WorkflowMonitor(verbose=False, sample_hz=None)
    ids = torch.zeros(1, 77, dtype=torch.long)
    baseline = monitor.capture_text_encoding_baseline(None, encoder, tokenizer=Words())
    with torch.no_grad():
        output = encoder(ids)

    def encode() -> None:
        with torch.no_grad():
            encoder(ids)

    def start_and_end() -> float:
        fresh = WorkflowMonitor(verbose=False, sample_hz=None)
        began = time.perf_counter()
        fresh.start_monitoring("text_encoding")
        fresh.end_monitoring("text_encoding")
        return time.perf_counter() - began

    def analyse(conditioning: object) -> Callable[[], Any]:
        return lambda: monitor.analyze_text_encoding_results(
            baseline, conditioning, conditioning, PROMPT, "blurry", 0.1
        )

    return {
        "the encoding itself": encode,
        "start, end": start_and_end,
        "update_peak_memory": monitor.update_peak_memory,
        "capture the baseline": lambda: monitor.capture_text_encoding_baseline(
            None, encoder, tokenizer=Words()
        ),
        "analyse both prompts": analyse(output),
    }


def seconds_of(part: Callable[[], Any]) -> float:
    """Wall time of one call; a part that gives a float has measured itself."""
    began = time.perf_counter()
    own = part()
    elapsed = time.perf_counter() - began
    return own if isinstance(own, float) else elapsed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--layers", type=int, default=2, help="12 is the whole of CLIP-L")
    options = parser.parse_args()
    ways = parts(make_encoder(options.layers))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 3):
        for name, part in ways.items():
            elapsed = seconds_of(part)
            if repeat >= 3:  # the first calls warm up
                times[name].append(elapsed)
    encoding = statistics.median(times["the encoding itself"])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.layers} layers; ", end="")
    print(f"medians over {options.repeats} repeats")
    print(f"{'':28}{'ms':>10}{'% of the encoding':>20}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:28}{1e3 * median:10.3f}{100 * median / encoding:20.2f}")


if __name__ == "__main__":
    main()
