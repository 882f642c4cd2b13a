"""Text encoding: `encode_prompt` of a pipeline, text encoders outside of it, and how many tokens prompts became.

The analysis is made from what the host itself did. Tokens are counted as the host's own tokenizers were seen to
make them. They are not asked again: a fast tokenizer refuses the host while somebody else, in another thread, uses
it. It gives what it cut off beside what it kept, however, and there that is read.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from torch import Tensor

from sigmascope.integrations.diffusers.denoising import end_finished
from sigmascope.integrations.diffusers.hooks import (
    After,
    Arguments,
    Instrument,
    Keywords,
    Parts,
    forget_others,
    hook_calls,
    reference_to,
)
from sigmascope.integrations.diffusers.watch_session import Activity, Session, current_activity
from sigmascope.monitor.recorder import LiveStage
from sigmascope.probes.models import components_of
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.stages.prompt_facts import TokenCount
from sigmascope.stages.text_encoding import analyze_text_encoding_results, capture_text_encoding_baseline

MOST_RUNS: Final = 32
"""An encoder that writes a text token by token is called hundreds of times; so many of its calls have a stage."""
ENCODING_STAGE: Final = "text_encoding"
_ON_THE_STAGE: Final = frozenset({"baseline", "current_memory", "memory_impact", "peak_memory"})
"""What of the analysis the stage holds already."""
WORDS_UNKNOWN: Final = "the tokenizer was watched and not asked which words did not fit"
NOT_SEEN: Final = "no tokenizer was seen to read this prompt as it is; pipelines put some into a template"
FULL: Final = "the tokenizer's limit is reached, and it was not seen to read the prompt without one"
_NO_LIMIT: Final = 1_000_000
"""A tokenizer's limit from here on says that it has none."""


class Reading(NamedTuple):
    """One text that a tokenizer read: how long it became, special tokens included, and its limit if it had one.

    `rest` is how many tokens it cut off, where it tells.
    """

    tokenizer: str
    text: str
    length: int
    special: int
    limit: int | None
    rest: int | None = None


@dataclass(slots=True)
class Encoding:
    """One call of `encode_prompt` while it goes on.

    Attributes:
        prompt: What it was called with.
        negative_prompt: Likewise.
        baseline: The text encoders and memory before it.
        readings: What tokenizers were seen to read.
    """

    prompt: object
    negative_prompt: object
    baseline: Mapping[str, Any] | None
    readings: list[Reading] = field(default_factory=list)


class TextEncoding(Instrument):
    """A stage for each encoding of prompts."""

    name: ClassVar[str] = "text_encoding"

    def __init__(self, session: Session) -> None:
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

    def forget_gone(self) -> None:
        """Let go of pipelines and tokenizers too."""
        super().forget_gone()
        self.session.forget_others(self._encoders)
        forget_others(self._tokenizers, self._targets)

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
        kind = _kind_of_embedding(other, prompt, accepts_negative=accepts_negative)
        if kind is not None:
            named[kind if kind not in named else f"negative_{kind}"] = other
    return {name: one for name, one in named.items() if isinstance(one, Tensor)}


def _kind_of_embedding(other: object, prompt: object, *, accepts_negative: bool) -> str | None:
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


def begun(arguments: Mapping[str, Any], encoders: Mapping[str, object]) -> Encoding:
    """Take what is known before the encoding.

    Args:
        arguments: The call's, by name.
        encoders: The pipeline's text encoders, by name. Their weights are not read.
    """
    baseline = capture_text_encoding_baseline(None, dict(encoders) or None)
    return Encoding(arguments.get("prompt"), arguments.get("negative_prompt"), baseline)


def tell(
    stage: LiveStage,
    encoding: Encoding,
    named: Mapping[str, object],
    privacy: PromptPrivacy,
    error: BaseException | None,
) -> None:
    """Put the analysis on the stage, which is over. Nothing waits for an accelerator.

    Args:
        stage: The encoding's.
        encoding: What was seen of it.
        named: The embeddings that it gave, by name.
        privacy: What is kept of prompts.
        error: What it raised.
    """
    record = stage.record()
    analysis = analyze_text_encoding_results(
        encoding.baseline,
        _conditioning(named, ""),
        _conditioning(named, "negative_"),
        encoding.prompt,
        encoding.negative_prompt,
        record.seconds,
        peak_memory=record.peak,
        error=error,
        prompt_privacy=privacy,
        tokens_seen=functools.partial(counts_seen, encoding.readings),
    )
    stage.fact(ENCODING_STAGE, {name: value for name, value in analysis.items() if name not in _ON_THE_STAGE})


def _conditioning(named: Mapping[str, object], which: str) -> object:
    """The embeddings and the pooled ones of one prompt; None without any."""
    found = [named.get(f"{which}{name}") for name in ("prompt_embeds", "pooled_prompt_embeds")]
    given = tuple(one for one in found if one is not None)
    return given or None


def readings_of(
    name: str, tokenizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Reading]:
    """What a call of a tokenizer says of each of its texts. Nothing for pairs, or where no mask is given.

    Args:
        name: The pipeline's component.
        tokenizer: Itself.
        args: The call's.
        kwargs: Those by name.
        result: What it gave.
    """
    given = args[0] if args else kwargs.get("text")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return []
    lengths = list(_lengths(result["attention_mask"]))
    if len(lengths) != len(texts):
        return []
    rests = list(map(_rest, getattr(result, "encodings", None) or ()))
    if len(rests) != len(texts):
        rests = [None] * len(texts)
    limit = kwargs.get("max_length") or getattr(tokenizer, "model_max_length", None)
    is_cut = kwargs.get("truncation") not in (None, False, "do_not_truncate")
    is_limit = is_cut and isinstance(limit, int) and limit < _NO_LIMIT
    special = tokenizer.num_special_tokens_to_add() if kwargs.get("add_special_tokens", True) else 0
    return [
        Reading(name, text, length, special, limit if is_limit else None, rest)
        for text, length, rest in zip(texts, lengths, rests, strict=True)
    ]


def _rest(encoding: Any) -> int | None:
    """How many of a text's tokens a fast tokenizer cut off; None where it keeps no pieces, as older ones do."""
    pieces = getattr(encoding, "overflowing", None)
    return None if pieces is None else sum(piece.special_tokens_mask.count(0) for piece in pieces)


def _lengths(mask: Any) -> Iterator[int]:
    """The sums of the mask's rows; a mask that is one row is that of one text."""
    rows = mask.tolist() if hasattr(mask, "tolist") else mask
    for row in rows if rows and isinstance(rows[0], list) else [rows]:
        yield int(sum(row))


def counts_seen(readings: Sequence[Reading], texts: Sequence[str]) -> tuple[list[TokenCount], str | None]:
    """What each tokenizer made of the texts of a batch, and why there is nothing when there is nothing.

    Args:
        readings: All that were seen in the encoding.
        texts: A prompt's.
    """
    counts = []
    for name in dict.fromkeys(reading.tokenizer for reading in readings):
        found = [
            [
                reading
                for reading in readings
                if reading.tokenizer == name and reading.text.strip() == text.strip()
            ]
            for text in texts
        ]
        if all(found):
            counts.append(_token_count(name, found))
    return counts, None if counts else NOT_SEEN


def _token_count(name: str, found: Sequence[Sequence[Reading]]) -> TokenCount:
    whole = [
        max(one.length + (one.rest or 0) for one in readings) - readings[0].special for readings in found
    ]
    limit = next((one.limit - one.special for one in found[0] if one.limit is not None), None)
    cut = [_tokens_cut_off(readings) for readings in found]
    known = [one for one in cut if one is not None]
    is_known = len(known) == len(cut)
    unavailable = {} if is_known and not sum(known) else {"truncated_words": WORDS_UNKNOWN}
    if not is_known:
        unavailable["truncated_tokens"] = FULL
    if limit is None:
        unavailable["token_limit"] = "no limit was given to the tokenizer"
    return TokenCount(
        name,
        sum(whole),
        sum(known) if is_known else None,
        words_known=is_known and not sum(known),
        limit=limit,
        unavailable=unavailable,
    )


def _tokens_cut_off(readings: Sequence[Reading]) -> int | None:
    """How many tokens did not fit; None where only a full sequence was seen, which may have been longer."""
    kept = [one for one in readings if one.limit is not None]
    if not kept:
        return 0
    rests = [one.rest for one in kept if one.rest is not None]
    if rests:
        return max(rests)
    if len(kept) < len(readings):
        return max(0, max(one.length for one in readings) - min(one.length for one in kept))
    return 0 if all(one.length < (one.limit or 0) for one in kept) else None
