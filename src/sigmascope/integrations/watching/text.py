"""Text encoding: `encode_prompt` of a pipeline, and text encoders that run outside of it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch import Tensor

from sigmascope.integrations.watching.activity import Activity, current_activity
from sigmascope.integrations.watching.encoding_analysis import ENCODING_STAGE, Encoding, begun, tell
from sigmascope.integrations.watching.endings import end_finished
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
            self._hook(ENCODING_STAGE, name, encoder)
        for name, encoder in parts.of_role("image_encoder"):
            self._hook("image_encoding", name, encoder)

    def _hook(self, stage: str, name: str, encoder: object) -> None:
        hook_calls(self, encoder, functools.partial(self._before_encoder, stage, name, reference_to(encoder)))

    def _before_prompt(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        activity = self.session.here(pipeline)
        if activity is None or activity.is_in(ENCODING_STAGE):
            return None
        end_finished(activity)
        signature = inspect.signature(type(pipeline).encode_prompt)  # type: ignore[attr-defined]
        accepts_negative = "negative_prompt" in signature.parameters
        guard, privacy = self.session.guard, self.session.choices.prompts
        encoding, _ = guard.read("watch.text", lambda: self._begun(pipeline, signature, args, kwargs))
        stage = activity.enter(ENCODING_STAGE)
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
        activity = current_activity(self.session)
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
    if not is_inside:
        end_finished(activity)
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
        result: What it gave: the prompt's first; of each kind the negative prompt's comes after the prompt's.
        accepts_negative: Whether it takes a negative prompt.
    """
    if isinstance(result, Mapping):
        return {str(name): one for name, one in result.items() if isinstance(one, Tensor)}
    given: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    prompt, *rest = given
    named: dict[str, object] = {"prompt_embeds": prompt}
    for other in rest:
        kind = _kind(other, prompt, accepts_negative=accepts_negative)
        if kind is not None:
            named[kind if kind not in named else f"negative_{kind}"] = other
    return {name: one for name, one in named.items() if isinstance(one, Tensor)}


def _kind(other: object, prompt: object, *, accepts_negative: bool) -> str | None:
    """What a tensor beside the prompt's embeddings is, by its shape: pipelines order them in several ways.

    Embeddings of the negative prompt are as wide; a mask has a number for each token, and a pooled output one row for
    each prompt; the rest are positions and the like.
    """
    if not isinstance(other, Tensor):
        return None
    if not isinstance(prompt, Tensor):
        return "text_ids"
    is_floating = other.is_floating_point()
    if accepts_negative and is_floating and other.dim() == prompt.dim() and _width(other) == _width(prompt):
        return "prompt_embeds"
    if other.dim() != 2:
        return "text_ids"
    if not is_floating or (prompt.dim() == 3 and other.shape == prompt.shape[:2]):
        return "prompt_embeds_mask"
    return "pooled_prompt_embeds" if other.shape[0] == prompt.shape[0] else "text_ids"


def _width(embeddings: Tensor) -> int:
    return embeddings.shape[-1] if embeddings.dim() else 0
