"""The analysis of a watched encoding or decoding by a VAE (SPEC section 5), from what the host itself did."""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from sigmascope.monitor.live import LiveStage
from sigmascope.records.latents import Direction
from sigmascope.stages.latent_decoding import (
    analyze_latent_decoding_results,
    capture_latent_decoding_baseline,
)
from sigmascope.stages.latent_encoding import (
    analyze_latent_generation_results,
    capture_latent_generation_baseline,
)

STAGES: Final[Mapping[Direction, str]] = {"encoding": "latent_encoding", "decoding": "latent_decoding"}
_ON_THE_STAGE: Final = frozenset({"baseline", "current_memory", "memory_impact", "peak_memory"})


def known_before(direction: Direction, vae: object, given: Tensor | None) -> Mapping[str, Any]:
    """The VAE, memory and shapes before it works. Values of tensors are not read here: the stage has those.

    Args:
        direction: What the VAE does.
        vae: Itself.
        given: What goes in.
    """
    capture = (
        capture_latent_generation_baseline if direction == "encoding" else capture_latent_decoding_baseline
    )
    return capture(vae, given, statistics=False)


def tell(
    stage: LiveStage,
    direction: Direction,
    baseline: Mapping[str, Any] | None,
    made: Tensor | None,
    strategy: str,
    error: BaseException | None,
) -> None:
    """Put the analysis on the stage, which is over.

    Args:
        stage: The encoding's or decoding's.
        direction: Which of them.
        baseline: What `known_before` gave.
        made: What came out; None if nothing did.
        strategy: "Direct" or "Tiled", as the VAE was seen to work.
        error: What it raised.
    """
    record = stage.record()
    seen: dict[str, Any] = {"peak_memory": record.peak, "error": error, "statistics": False}
    analyze = (
        analyze_latent_generation_results if direction == "encoding" else analyze_latent_decoding_results
    )
    analysis = analyze(
        baseline, made, record.seconds, f"{strategy} VAE {direction.title()}", record.memory, **seen
    )
    kept = {name: value for name, value in analysis.items() if name not in _ON_THE_STAGE}
    stage.fact(STAGES[direction], kept)
