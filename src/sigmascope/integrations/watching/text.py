"""Text encoding: `encode_prompt` of a pipeline, and text encoders that run outside of it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch import Tensor

from sigmascope.integrations.watching.activity import Activity, current
from sigmascope.integrations.watching.encoding_analysis import STAGE, Encoding, begun, tell
from sigmascope.integrations.watching.instrument import Instrument, reference_to
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords
from sigmascope.integrations.watching.module_calls import hook_calls
from sigmascope.integrations.watching.parts import Parts
from sigmascope.integrations.watching.token_counts import readings_of
from sigmascope.probes.modules import components_of

if TYPE_CHECKING:
    from sigmascope.integrations.watching.session import Session

MOST_RUNS: Final = 32
"""An encoder that writes a text token by token is called hundreds of times; so many of its calls have a stage."""


class TextEncoding(Instrument):
    """A stage for each encoding of prompts."""

    name: ClassVar[str] = "text_encoding"

    def __init__(self, session: "Session") -> None:
        super().__init__(session)
        self._encoders: dict[int, tuple[str, ...]] = {}
        self._tokenizers: dict[int, str] = {}

    def attach_class(self, kind: type) -> None:
        """Hear `encode_prompt`."""
        self.tap_class(kind, "encode_prompt", self._before_prompt)

    def attach(self, parts: Parts) -> None:
        """Hear every text encoder, tokenizer and image encoder."""
        for name, tokenizer in parts.of_role("tokenizer"):
            self._tokenizers[id(tokenizer)] = name
            self.tap_method(tokenizer, "__call__", self._before_tokenizer)
        encoders = list(parts.of_role("text_encoder"))
        self._encoders[id(parts.pipeline)] = tuple(name for name, _ in encoders)
        for name, encoder in encoders:
            self._hook(STAGE, name, encoder)
        for name, encoder in parts.of_role("image_encoder"):
            self._hook("image_encoding", name, encoder)

    def _hook(self, stage: str, name: str, encoder: object) -> None:
        hook_calls(self, encoder, functools.partial(self._before_encoder, stage, name, reference_to(encoder)))

    def _before_prompt(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        activity = self.session.here(pipeline)
        if activity is None or activity.is_in(STAGE):
            return None
        signature = inspect.signature(type(pipeline).encode_prompt)  # type: ignore[attr-defined]
        accepts_negative = "negative_prompt" in signature.parameters
        guard, privacy = self.session.guard, self.session.choices.prompts
        encoding, _ = guard.read("watch.text", lambda: self._begun(pipeline, signature, args, kwargs))
        stage = activity.enter(STAGE)
        activity.encoding = encoding

        def after(result: object, error: BaseException | None) -> None:
            activity.encoding = None
            activity.leave(stage, error)
            named = embeddings(result, accepts_negative)
            for name, tensor in named.items():
                stage.tensor(name, tensor)
            if encoding is not None:
                guard.read("watch.text", lambda: tell(stage, encoding, named, privacy, error))

        return after

    def _begun(
        self, pipeline: object, signature: inspect.Signature, args: Arguments, kwargs: Keywords
    ) -> Encoding:
        components = components_of(pipeline)
        names = self._encoders.get(id(pipeline), ())
        encoders = {name: components[name] for name in names if name in components}
        return begun(signature.bind_partial(pipeline, *args, **kwargs).arguments, encoders)

    def _before_tokenizer(self, tokenizer: object, args: Arguments, kwargs: Keywords) -> After | None:
        activity = current(self.session)
        encoding = None if activity is None else activity.encoding
        if encoding is None:
            return None
        name = self._tokenizers[id(tokenizer)]

        def after(result: object, error: BaseException | None) -> None:
            if error is None:
                read = lambda: readings_of(name, tokenizer, args, kwargs, result)  # noqa: E731
                encoding.readings.extend(self.session.guard.read("watch.tokens", read)[0] or ())

        return after

    def _before_encoder(
        self, stage: str, name: str, encoder: Callable[[], object], *_: object
    ) -> After | None:
        activity = self.session.here()
        return None if activity is None else _within(activity, stage, name, encoder())


def _within(activity: Activity, name: str, encoder: str, module: object) -> After | None:
    """A stage for an encoder's call: of this name, or of the encoder's inside such a stage."""
    open_calls = activity.session.open_calls
    open_calls.close_broken(activity, entering=module)
    if activity.is_in(encoder):
        return None
    is_inside = activity.is_in(name)
    if is_inside and activity.runs[encoder] >= MOST_RUNS:
        return None
    activity.runs[encoder] += 1
    stage = activity.enter(encoder if is_inside else name)
    call = open_calls.begin(activity, stage, module)

    def after(result: object, error: BaseException | None) -> None:
        open_calls.end(call)
        activity.leave(stage, error)
        stage.fact("component", encoder)

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
