"""The VAE's encoding and decoding: a stage for each, analysed from what the host itself did."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from torch import Tensor

from sigmascope.integrations.diffusers.denoising import end_complete_denoising, is_final_decode
from sigmascope.integrations.diffusers.hooks import After, Arguments, Keywords, forget_others, holder_of
from sigmascope.integrations.diffusers.watch_session import (
    Observer,
    Session,
    WatchedParts,
    beside_the_stage,
    current_stack,
)
from sigmascope.monitor.recorder import LiveStage
from sigmascope.probes.models import unwrap
from sigmascope.records.latents import Direction
from sigmascope.stages.latent_encoding import (
    analyze_latent_decoding_results,
    analyze_latent_generation_results,
    capture_latent_decoding_baseline,
    capture_latent_generation_baseline,
)

STAGES: Final[Mapping[Direction, str]] = {"encoding": "latent_encoding", "decoding": "latent_decoding"}


class VaeObserver(Observer):
    """A stage for each `encode` and `decode`; one that is called by another is part of it."""

    name: ClassVar[str] = "vae"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._names: dict[int, str] = {}

    def attach(self, parts: WatchedParts) -> None:
        """Hear both of every VAE, also of one that is wrapped."""
        for name, vae in parts.of_role("vae"):
            holders = (holder_of(vae, way) for way in ("encode", "decode"))
            for thing in {
                id(holder): holder for holder in (vae, unwrap(vae), *holders) if holder is not None
            }.values():
                self.hook_method(thing, "encode", functools.partial(self._before, "encoding"))
                self.hook_method(thing, "decode", functools.partial(self._before, "decoding"))
                for method in ("tiled_encode", "tiled_decode"):
                    self.hook_method(thing, method, self._before_tiles)
                self._names[id(unwrap(thing) or thing)] = name

    def forget_gone(self) -> None:
        """Let go of VAEs' names too."""
        super().forget_gone()
        forget_others(self._names, self._targets)

    def _before(self, way: Direction, vae: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self.session.stack_here()
        if stack is None or stack.is_in(*STAGES.values()):
            return None
        if way == "decoding" and is_final_decode(stack):
            stack.end_denoising()
        elif way == "encoding":
            end_complete_denoising(stack)
        input_tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        guard = self.guard
        baseline, _ = guard.read("watch.latents", lambda: capture_baseline(way, vae, input_tensor))
        component = self._names.get(id(unwrap(vae) or vae))
        stack.is_tiled = False
        stage = stack.enter(STAGES[way])

        def after(result: object, error: BaseException | None) -> None:
            strategy = "Tiled" if stack.is_tiled else "Direct"
            stack.leave(stage, error)
            stage.fact("component", component)
            output = first_tensor(result)
            guard.read(
                "watch.latents", lambda: record_analysis(stage, way, baseline, output, strategy, error)
            )
            latent, picture = (output, input_tensor) if way == "encoding" else (input_tensor, output)
            for name, tensor in (("latent", latent), ("picture", picture)):
                if tensor is not None:
                    stage.tensor(name, tensor)
            if way == "decoding" and picture is not None and picture.dim() >= 4:
                stack.size = (int(picture.shape[-2]), int(picture.shape[-1]))

        return after

    def _before_tiles(self, _vae: object, _args: Arguments, _kwargs: Keywords) -> After | None:
        stack = current_stack(self.session)
        if stack is not None:
            stack.is_tiled = True
        return None


def capture_baseline(direction: Direction, vae: object, input_tensor: Tensor | None) -> Mapping[str, Any]:
    """The VAE, memory and shapes before it works. Values of tensors are not read here: the stage has those.

    Args:
        direction: What the VAE does.
        vae: Itself.
        input_tensor: What goes in.
    """
    capture = (
        capture_latent_generation_baseline if direction == "encoding" else capture_latent_decoding_baseline
    )
    return capture(vae, input_tensor, statistics=False)


def record_analysis(
    stage: LiveStage,
    direction: Direction,
    baseline: Mapping[str, Any] | None,
    output: Tensor | None,
    strategy: str,
    error: BaseException | None,
) -> None:
    """Put the analysis on the stage, which is over.

    Args:
        stage: The encoding's or decoding's.
        direction: Which of them.
        baseline: What `capture_baseline` gave.
        output: What came out; None if nothing did.
        strategy: "Direct" or "Tiled", as the VAE was seen to work.
        error: What it raised.
    """
    record = stage.record()
    seen: dict[str, Any] = {"peak_memory": record.peak, "error": error, "statistics": False}
    analyze: Callable[..., Mapping[str, Any]] = analyze_latent_decoding_results
    if direction == "encoding":
        analyze, seen["may_wait"] = analyze_latent_generation_results, False
    analysis = analyze(
        baseline, output, record.seconds, f"{strategy} VAE {direction.title()}", record.memory, **seen
    )
    stage.fact(STAGES[direction], beside_the_stage(analysis))


def first_tensor(result: object) -> Tensor | None:
    """The tensor in what a VAE gives: bare, in a tuple, an output's `sample`, or the mean of its distribution."""
    if isinstance(result, Tensor):
        return result
    for name in ("sample", "latent_dist", "latents", "latent", "mean"):
        held = getattr(result, name, None)
        if isinstance(held, Tensor):
            return held
        if name == "latent_dist" and held is not None:
            return first_tensor(getattr(held, "mean", None))
    if isinstance(result, tuple | list) and result:
        return first_tensor(result[0])
    return None
