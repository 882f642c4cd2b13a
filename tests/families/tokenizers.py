"""The tokenizer classes of transformers, with vocabularies made here.

Only Qwen2's is trained: the trainers of the other two number their tokens in another order in each process.

transformers 4 takes vocabularies from files, and its class for T5 of this kind is another.
"""

import json
import re
import string
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.families.weights import copied

IS_TRANSFORMERS_5 = int(version("transformers").split(".")[0]) >= 5

CORPUS = (
    "a red fox jumps over the lazy dog",
    "masterpiece, best quality, highly detailed portrait of a young woman",
    "a castle on a hill at sunset, dramatic lighting, 4k",
    "blurry, low quality, watermark, text",
)
WORDS = tuple(re.findall("[a-z]+", " ".join(CORPUS)))
VOCABULARY = 640
START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer() -> Any:
    """CLIP's: 77 tokens, every byte also as one that ends a word, and the words of the corpus."""
    return clip_tokenizer_of(WORDS, 77)


@copied
def clip_tokenizer_of(words: tuple[str, ...], length: int) -> Any:
    """CLIP's, for so many tokens, with these words in one token each."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer, CLIPTokenizerFast

    letters = sorted(ByteLevel.alphabet())
    merges = _merges_of_words(words)
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges), START, END]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if not IS_TRANSFORMERS_5:
        return _from_files(CLIPTokenizerFast, vocabulary, merges, model_max_length=length)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=length)


def _merges_of_words(words: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs to merge, so that each word becomes one token, letter by letter."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(1, len(word)):
            last = word[end] if end < len(word) - 1 else f"{word[end]}</w>"
            merges[word[:end], last] = None
    return list(merges)


@copied
def t5_tokenizer() -> Any:
    """T5's: Unigram, an end token and no start token; a word of the corpus is likelier than its letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import T5Tokenizer, T5TokenizerFast

    letters = ["▁", *string.ascii_lowercase, *string.digits, *string.punctuation]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -9.0) for letter in letters)]
    pieces += [(f"▁{word}", -5.0) for word in dict.fromkeys(WORDS)]
    if IS_TRANSFORMERS_5:
        return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return T5TokenizerFast(tokenizer_object=backend, extra_ids=0, model_max_length=512)


@copied
def qwen_tokenizer() -> Any:
    """Qwen2's: byte-level BPE, with the marks of its chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer, Qwen2TokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary, merges = _trained(backend, trainer)
    more = {
        "extra_special_tokens": {"start": "<|im_start|>", "stop": "<|im_end|>"},
        "model_max_length": 2048,
    }
    if not IS_TRANSFORMERS_5:
        return _from_files(Qwen2TokenizerFast, vocabulary, merges, **more)
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, **more)


def _from_files(kind: Any, vocabulary: dict[str, int], merges: list[tuple[str, str]], **more: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        words, pairs = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        words.write_text(json.dumps(vocabulary), encoding="utf-8")
        pairs.write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]), encoding="utf-8")
        return kind(vocab_file=str(words), merges_file=str(pairs), **more)


def _trained(backend: Any, trainer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges that the corpus gives."""
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    return dict(model["vocab"]), [tuple(pair) for pair in model["merges"]]
