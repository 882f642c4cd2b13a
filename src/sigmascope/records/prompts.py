"""Prompts are private: what is kept of one is its text, its hash or nothing, as configured.

Records on this machine keep the text by default: `watch`, `WorkflowMonitor`, the ASGI middleware. What is made to be sent
on has the hash: HTML, Markdown, traces, tensor dumps.

Texts that are kept beside a prompt may quote it, in part or in another spelling: `quoting` tells which do.
What leaves to be read elsewhere passes `without_texts` as a run, and then `cleaner` as plain values, before anything of it is
shortened: prompts, what stages raised, and the folders of files stay here.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from sigmascope.errors import ConfigError
from sigmascope.files import short_paths
from sigmascope.records.failures import cause_in_words, members_in_words, raised_in, trace_without_words
from sigmascope.records.run import ExceptionDetails, Run, Stage
from sigmascope.records.run import PromptPrivacy as PromptPrivacy


@dataclass(frozen=True, slots=True)
class Privacy:
    """What a level keeps.

    Attributes:
        name: As a user gives it.
        keeps_text: Prompts as they are.
        keeps_hash: The SHA-256 of prompts.
        keeps_words: Other texts, which may quote a prompt: what stages raised, arguments, paths of requests.
        kept: What is kept of prompts, in words.
    """

    name: PromptPrivacy
    keeps_text: bool
    keeps_hash: bool
    keeps_words: bool
    kept: str


PRIVACIES: Final[Mapping[str, Privacy]] = {
    privacy.name: privacy
    for privacy in (
        Privacy("full", keeps_text=True, keeps_hash=True, keeps_words=True, kept="their text"),
        Privacy("hash", keeps_text=False, keeps_hash=True, keeps_words=False, kept="their hashes"),
        Privacy("none", keeps_text=False, keeps_hash=False, keeps_words=False, kept="nothing"),
    )
}

Prompts = str | Sequence[str] | Mapping[str, str] | None
"""One prompt, one for each item of a batch, or some by name (`positive`, `negative`)."""

HIDDEN: Final = "<text>"
"""Stands where a text was that may quote a prompt."""

_UNSPACED: Final = (
    "[\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u31ff"
    "\u3400-\u4dbf\u4e00-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U0001b000-\U0001b16f"
    "\U00020000-\U0003ffff]"
)
"""A letter of a script that puts no spaces between words, or whose words have a letter or two: Thai, Lao, Tibetan,
Burmese, Khmer, Hangul, kana, Han, Yi."""
_WORD = re.compile(rf"{_UNSPACED}|(?:(?!{_UNSPACED})\w){{3,}}")
_HAS_UNSPACED = re.compile(_UNSPACED)
_WHOLE_WORDS_BELOW = 8  # characters; "cat" must not be found in "category"

TEXTLESS_OPTIONS: Final = frozenset(
    {
        "output_type",
        "callback_on_step_end_tensor_inputs",
        "prior_callback_on_step_end_tensor_inputs",
        "resample_method_input",
        "resample_method_output",
        "sampling_method",
        "cache_implementation",
        "condition_video_keep",
        "mode",
        "task_type",
    }
)
"""Arguments of a pipeline's call that choose among words of the pipeline's own. Every other text of a call is a prompt."""
_CHOICE = re.compile(r"[A-Za-z0-9_.+-]{0,32}")
_PICTURE = r"[0-9]+×[0-9]+ [\w;]{1,8} [0-9a-f]{16}"
_PICTURES = re.compile(rf"{_PICTURE}(?:, {_PICTURE})*")  # as records tell pictures apart

_DEEPEST_TEXT: Final = 4  # levels of lists and dicts in an argument

# Where a run's facts hold prompts, for `cleaner` and `without_texts`.
_RECIPE, _ARGUMENTS = "recipe", "arguments"
_GIVEN, _NOTHING_GIVEN = "given", "none"
"""In a recipe, the arguments in words of ours: of a `negative_prompt` that was not given, "none"."""
_PROMPT_KEY = re.compile(r"(?:positive_|negative_)?prompts?(?:_?\d+)?|text_content")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PRIVACY = "privacy"
OWN_NAME: Final = re.compile(r"[A-Za-z0-9_.:$-]*")
"""Keys and stages of ours read so; a prompt of one word may, too, and is no reason to change them."""
_TEXT, _HASH, _TEXT_HASH = "text", "sha256", "text_sha256"

# What exceptions say in the stages of a run, for `without_words`.
_ERROR, _DETAILS = "error", "exception_details"
_TYPE = re.compile(r"[^\W\d][\w.]*(?=: |$)")


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """What is kept of one prompt: its text, or only the hash of it."""

    sha256: str
    text: str | None = None


def stored_prompts(prompts: Prompts, privacy: PromptPrivacy) -> dict[str, StoredPrompt]:
    """What `privacy` lets a file keep of the prompts, by name; nothing for `none`.

    Raises:
        ConfigError: `privacy` is not one of the three, or a prompt is not text.
    """
    kept = privacy_of(privacy)
    named = named_prompts(prompts)
    if not kept.keeps_hash:
        return {}
    return {
        name: StoredPrompt(prompt_sha256(text), text if kept.keeps_text else None)
        for name, text in named.items()
    }


def privacy_of(name: str, given: str | None = None) -> Privacy:
    """The row of a privacy level. An unknown level is refused, so that nothing is kept by mistake.

    Args:
        name: Of the privacy.
        given: How the user gave it, for the error; None: as `prompt_privacy`.

    Raises:
        ConfigError: There is no privacy of this name.
    """
    if name not in PRIVACIES:
        *others, last = map(repr, PRIVACIES)
        raise ConfigError(
            f"{given or f'prompt_privacy={name!r}'} does not exist.",
            hint=f"Choose {', '.join(others)} or {last}.",
        )
    return PRIVACIES[name]


def named_prompts(prompts: Prompts) -> dict[str, str]:
    """Prompts by name: one is `prompt`, those of a batch are `prompt.0`, `prompt.1`, ….

    Raises:
        ConfigError: A prompt is not text.
    """
    if prompts is None:
        return {}
    if isinstance(prompts, str):
        named: dict[str, Any] = {"prompt": prompts}
    elif isinstance(prompts, Mapping):
        named = {str(name): text for name, text in prompts.items()}
    else:
        named = {f"prompt.{index}": text for index, text in enumerate(prompts)}
    for name, text in named.items():
        if not isinstance(text, str):
            raise ConfigError(
                f"The prompt {name!r} is a {type(text).__name__}, not text.", hint="Give prompts as str."
            )
    return named


def prompt_sha256(text: str) -> str:
    """SHA-256 of a prompt in UTF-8, as 64 hexadecimal digits; lone surrogates are hashed as such.

    A hash tells whether two prompts are the same. Whoever guesses a prompt can confirm the guess with it.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def quoting(prompts: Prompts, privacy: PromptPrivacy) -> Callable[[str], bool]:
    """A function that tells whether a text may quote one of the prompts, and must not be kept.

    It may if it contains a word of theirs, even inside another word, in capitals, in other forms of the same letters,
    in hexadecimal, percent-encoded or with escapes. Words are runs of three letters or more, and each letter of a
    script without spaces; of a prompt without any, the prompt itself.

    Raises:
        ConfigError: As for `stored_prompts`.
    """
    if privacy_of(privacy).keeps_text:
        return lambda text: False
    words = {word for prompt in named_prompts(prompts).values() for word in _words(_folded(prompt))}
    encoded = {word.encode("utf-8", "surrogatepass").hex() for word in words}
    encoded |= {quote(word, errors="surrogatepass").lower() for word in words}
    encoded |= {ascii(word)[1:-1] for word in words}

    def quotes(text: str) -> bool:
        folded = _folded(text)
        return any(word in folded for word in words | encoded)

    return quotes


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _words(prompt: str) -> list[str]:
    return _WORD.findall(prompt) or [prompt.strip()] if prompt.strip() else []


def redactor(prompts: Prompts, privacy: PromptPrivacy) -> Callable[[str], str]:
    """A function that takes the prompts out of other texts, where they are repeated as they were given.

    Each occurrence becomes `<prompt sha256:…>`, or `<prompt>` where not even the hash may be kept; so do those with the
    escapes of Python or JSON. Prompts below 8 characters are found as whole words only, where their script has such.

    Raises:
        ConfigError: As for `stored_prompts`.
    """
    kept = privacy_of(privacy)
    if kept.keeps_text:
        return lambda text: text
    longest_first = sorted({text for text in named_prompts(prompts).values() if text}, key=len, reverse=True)
    whole = frozenset(spelling for text in longest_first for spelling in _spellings(text))
    replacements = [_replacement(text, _placeholder(text, kept), whole) for text in longest_first]

    def redact(text: str) -> str:
        for replacement in replacements:
            text = replacement(text)
        return text

    return redact


def _spellings(prompt: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((prompt, repr(prompt)[1:-1], json.dumps(prompt)[1:-1], ascii(prompt)[1:-1])))


def _replacement(prompt: str, placeholder: str, whole: Collection[str]) -> Callable[[str], str]:
    """What takes one prompt out; a text may also end with another of the `whole` ones, which begins as this does."""
    spellings = _spellings(prompt)
    if len(prompt) < _WHOLE_WORDS_BELOW and not _HAS_UNSPACED.search(prompt):
        words = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, spellings))})(?!\w)")
        return lambda text: words.sub(placeholder, text)

    def replace(text: str) -> str:
        for spelling in spellings:
            text = text.replace(spelling, placeholder)
            # A text that was cut, or of which the first line was kept, may end within the prompt.
            begin = text.rfind(spelling[:_WHOLE_WORDS_BELOW])
            end = text[begin:].rstrip("…")
            if begin >= 0 and end not in whole and spelling.startswith(end):
                text = f"{text[:begin]}{placeholder}…"
        return text

    return replace


def _placeholder(prompt: str, privacy: Privacy) -> str:
    return f"<prompt sha256:{prompt_sha256(prompt)}>" if privacy.keeps_hash else "<prompt>"


def without_texts(run: Run, privacy: PromptPrivacy) -> Run:
    """The run without what `privacy` keeps nothing of: texts of prompts, their hashes, and words of what was raised.

    Raises:
        ConfigError: There is no such privacy.
    """
    kept = privacy_of(privacy)
    if kept.keeps_text:
        return run

    def hidden(stage: Stage) -> Stage:
        return replace(
            stage,
            facts=_without_stored(stage.facts, kept.keeps_hash),
            children=tuple(map(hidden, stage.children)),
        )

    shown = run if kept.keeps_words else without_words(run)
    return replace(
        shown,
        facts=_without_stored(shown.facts, kept.keeps_hash),
        stages=tuple(map(hidden, shown.stages)),
    )


def _without_stored(value: Any, keeps_hash: bool) -> Any:
    """Facts without the texts of prompts that they store, and without those that then say nothing."""
    if isinstance(value, list | tuple):
        return [_without_stored(item, keeps_hash) for item in value]
    if not isinstance(value, Mapping):
        return value
    left = {}
    for key, item in value.items():
        if key == _TEXT_HASH and not keeps_hash:
            continue
        is_stored = isinstance(item, Mapping) and _PROMPT_KEY.fullmatch(str(key)) is not None
        told = dict(_left_of_stored(item, keeps_hash)) if is_stored else item
        if told or not is_stored:
            left[key] = _without_stored(told, keeps_hash)
    return left


def _left_of_stored(prompts: Mapping[str, Any], keeps_hash: bool) -> Iterator[tuple[str, Any]]:
    for name, prompt in prompts.items():
        if not (isinstance(prompt, Mapping) and _HASH in prompt):
            yield name, prompt
        elif keeps_hash:
            yield name, {key: item for key, item in prompt.items() if key != _TEXT}


def without_words(run: Run) -> Run:
    """The run without the words of what its stages raised, which may quote a prompt.

    Types, places, and what is known of such a failure (`cause_in_words`) stay.
    """
    return replace(run, stages=tuple(map(_without_words, run.stages)))


def _without_words(stage: Stage) -> Stage:
    error, details = stage.error, stage.exception_details
    if error is not None:
        told = _TYPE.match(error)
        message = error[told.end() :] if told is not None else ""
        kind = details.type if details is not None else told[0] if told is not None else "an error"
        raised = [] if details is None else raised_in(details)
        cause = cause_in_words(details.message if details is not None else message) or members_in_words(
            raised
        )
        place = f" ({raised[-1].frames[-1]})" if raised and raised[-1].frames else ""
        error = f"{kind}{f': {cause}' if cause else ''}{place}"
        if details is not None:
            details = ExceptionDetails(details.type, cause or "", trace_without_words(raised))
    return replace(
        stage,
        error=error,
        exception_details=details,
        facts=_without_errors(stage.facts),
        children=tuple(map(_without_words, stage.children)),
    )


def _without_errors(value: Any) -> Any:
    """What an analysis says without what was raised."""
    if isinstance(value, Mapping):
        return {
            key: _without_errors(item)
            for key, item in value.items()
            if key != _DETAILS and not (key == _ERROR and isinstance(item, str))
        }
    return [_without_errors(item) for item in value] if isinstance(value, list | tuple) else value


def cleaner(run: Run, privacy: PromptPrivacy) -> Callable[[Any], Any]:
    """A function that takes the prompts of a run out of whole texts among plain values, and the folders out of paths.

    Folders go at every privacy, prompts as `privacy` says, wherever they are repeated. Keys that read like a name of
    ours stay, whatever a prompt says.

    Raises:
        ConfigError: There is no such privacy.
    """
    texts = {text for facts in _all_facts(run) for text in _prompts(facts)}
    hashes = {text for text in texts if _SHA256.fullmatch(text)}
    prompts = texts - hashes
    if not privacy_of(privacy).keeps_hash:
        prompts |= hashes | {prompt_sha256(text) for text in prompts}
    redact = redactor(sorted(prompts), privacy)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return short_paths(redact(value))
        if isinstance(value, Mapping):
            keys = _distinct(key if OWN_NAME.fullmatch(str(key)) else clean(key) for key in value)
            return dict(zip(keys, map(clean, value.values()), strict=True))
        return [clean(item) for item in value] if isinstance(value, list) else value

    return clean


def _distinct(keys: Iterable[Any]) -> Iterator[Any]:
    """The keys, those that came out alike numbered: `<prompt>`, `<prompt> (2)`."""
    counts: Counter[Any] = Counter()
    for key in keys:
        counts[key] += 1
        yield key if counts[key] == 1 else f"{key} ({counts[key]})"


def _all_facts(run: Run) -> Iterator[Mapping[str, Any]]:
    yield run.facts
    for stage in run.walk():
        yield stage.facts


def texts_of_call(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Every text of a call that counts as a prompt, by the argument's name: `lyrics`; those inside as `prompt.0`, ….

    Empty ones count only where a prompt may stand.
    """
    return {
        place: text
        for name, value in arguments.items()
        for place, text in _texts_within(str(name), value, _DEEPEST_TEXT)
        if (text or "prompt" in place) and not (is_choice(name, text) or _PICTURES.fullmatch(text))
    }


def is_choice(name: str, value: object) -> bool:
    """Whether an argument of a call is a text that was chosen among the pipeline's own words."""
    return isinstance(value, str) and name in TEXTLESS_OPTIONS and _CHOICE.fullmatch(value) is not None


def _texts_within(place: str, value: object, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif depth and isinstance(value, Mapping):
        yield from _texts_within(place, list(value.values()), depth)  # a key may be a word of the prompt
    elif depth and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts_within(f"{place}.{number}", item, depth - 1)


def _prompts(value: Any) -> Iterator[str]:
    """What lies under the name of a prompt, at any depth, and every text among a call's arguments."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == _RECIPE and isinstance(item, Mapping) and isinstance(item.get(_ARGUMENTS), Mapping):
                yield from texts_of_call(item[_ARGUMENTS]).values()
            if key == _GIVEN and isinstance(item, Mapping):
                item = {name: given for name, given in item.items() if given != _NOTHING_GIVEN}
            yield from _texts(item) if _PROMPT_KEY.fullmatch(str(key)) else _prompts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _prompts(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != _PRIVACY:
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
