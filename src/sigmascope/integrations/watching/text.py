"""Text encoding: `encode_prompt` of a pipeline, and text encoders that run outside of it."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from sigmascope.integrations.watching.activity import Activity
from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords
from sigmascope.integrations.watching.module_calls import hook_calls
from sigmascope.integrations.watching.parts import Parts

STAGE = "text_encoding"


class TextEncoding(Instrument):
    """A stage for each encoding of prompts."""

    name: ClassVar[str] = "text_encoding"

    def attach_class(self, kind: type) -> None:
        """Hear `encode_prompt`."""
        self.tap_class(kind, "encode_prompt", self._before_prompt)

    def attach(self, parts: Parts) -> None:
        """Hear every text encoder and image encoder."""
        for name, encoder in parts.of_role("text_encoder"):
            hook_calls(self, encoder, functools.partial(self._before_encoder, name))
        for name, encoder in parts.of_role("image_encoder"):
            hook_calls(self, encoder, functools.partial(self._before_image, name))

    def _before_prompt(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        activity = self.session.here(pipeline)
        if activity is None or activity.is_in(STAGE):
            return None
        accepts_negative = "negative_prompt" in inspect.signature(type(pipeline).encode_prompt).parameters  # type: ignore[attr-defined]
        stage = activity.enter(STAGE)

        def after(result: object, error: BaseException | None) -> None:
            activity.leave(stage, error)
            for name, tensor in embeddings(result, accepts_negative).items():
                stage.tensor(name, tensor)

        return after

    def _before_encoder(self, name: str, *_: object) -> After | None:
        activity = self.session.here()
        if activity is None:
            return None
        return _within(activity, STAGE, name)

    def _before_image(self, name: str, *_: object) -> After | None:
        activity = self.session.here()
        return None if activity is None else _within(activity, "image_encoding", name)


def _within(activity: Activity, name: str, encoder: str) -> After | None:
    """A stage of its own for an encoder's call that lies in no such stage yet."""
    if activity.is_in(name):
        return None
    stage = activity.enter(name)

    def after(result: object, error: BaseException | None) -> None:
        activity.leave(stage, error)
        stage.fact("encoder", encoder)

    return after


def embeddings(result: object, accepts_negative: bool) -> dict[str, Tensor]:
    """The tensors that `encode_prompt` gives, by the names under which pipelines take them.

    Args:
        result: What it gave: the prompt's first, then the negative prompt's where it takes one, and the pooled ones
            in the same order.
        accepts_negative: Whether it takes a negative prompt.
    """
    if isinstance(result, Mapping):
        return {str(name): one for name, one in result.items() if isinstance(one, Tensor)}
    given: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    positive, *rest = given
    named: dict[str, object] = {"prompt_embeds": positive}
    if accepts_negative and rest:
        named["negative_prompt_embeds"], *rest = rest
    for other in rest:
        named |= _further(other, named)
    return {name: one for name, one in named.items() if isinstance(one, Tensor)}


def _further(other: object, named: Mapping[str, object]) -> dict[str, object]:
    """A pooled output is (batch, width); a mask is not floating; the rest are positions and the like."""
    if not isinstance(other, Tensor):
        return {}
    prompt = named.get("prompt_embeds")
    if other.is_floating_point() and other.dim() == 2 and _same_batch(other, prompt):
        name = "pooled_prompt_embeds"
    elif other.dim() == 2 and not other.is_floating_point():
        name = "prompt_embeds_mask"
    else:
        name = "text_ids"
    return {name if name not in named else f"negative_{name}": other}


def _same_batch(other: Tensor, prompt: object) -> bool:
    return isinstance(prompt, Tensor) and prompt.dim() > 0 and other.shape[0] == prompt.shape[0]
