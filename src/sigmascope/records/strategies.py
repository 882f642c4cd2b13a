"""The four ways of encoding and decoding with a VAE, in the order in which they are tried (SPEC section 5)."""

from collections.abc import Mapping
from typing import Literal

Strategy = Literal["direct", "tiled", "cpu", "dummy"]
Outcome = Literal["succeeded", "failed", "skipped"]
Direction = Literal["encoding", "decoding"]

STRATEGIES: tuple[Strategy, ...] = ("direct", "tiled", "cpu", "dummy")

_LABELS: Mapping[Direction, Mapping[Strategy, str]] = {
    "encoding": {
        "direct": "Direct VAE Encoding",
        "tiled": "Tiled VAE Encoding",
        "cpu": "CPU Fallback Encoding",
        "dummy": "Emergency Dummy Latents",
    },
    "decoding": {
        "direct": "Direct VAE Decoding",
        "tiled": "Tiled VAE Decoding",
        "cpu": "CPU Fallback Decoding",
        "dummy": "Emergency Dummy Frames",
    },
}


def strategy_label(strategy: Strategy, direction: Direction = "encoding") -> str:
    """The name that SPEC section 5 gives a strategy, such as "Direct VAE Encoding"."""
    return _LABELS[direction][strategy]


def strategy_number(strategy: Strategy) -> int:
    """1 to 4, as the summary counts them."""
    return STRATEGIES.index(strategy) + 1


def attempt_stage(strategy: Strategy, direction: Direction = "encoding") -> str:
    """The name of the stage, inside `latent_encoding` or `latent_decoding`, in which a strategy is tried."""
    return f"{strategy}_{direction}"
