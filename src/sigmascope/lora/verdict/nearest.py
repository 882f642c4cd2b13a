"""The layers of a model whose names are nearest to one that it does not have."""

import re
from collections import Counter
from collections.abc import Iterable
from math import log

import numpy as np
from numpy.typing import NDArray

_WORDS = re.compile(r"[^._]+")


class NearestNames:
    """Names compared by their words, dots and underscores alike, rare words counting for more.

    Args:
        names: Of the model's layers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        counts = [Counter(_WORDS.findall(name)) for name in self._names]
        self._times: dict[str, NDArray[np.float64]] = {}
        for index, words in enumerate(counts):
            for word, times in words.items():
                self._times.setdefault(word, np.zeros(len(self._names)))[index] = times
        # Of two names that share as much the shorter is nearer.
        self._lengths = np.array([sum(words.values()) or 1 for words in counts], dtype=np.float64) ** 0.25

    def nearest(self, name: str, count: int = 3) -> tuple[str, ...]:
        """Up to `count` names, the nearest first; none that shares no word."""
        scores = np.zeros(len(self._names))
        for word, times in Counter(_WORDS.findall(name)).items():
            having = self._times.get(word)
            if having is not None:
                rarity = log(1.0 + len(self._names) / np.count_nonzero(having))
                scores += rarity * np.minimum(having, times)
        scores /= self._lengths
        best = np.argsort(-scores, kind="stable")[:count]
        return tuple(self._names[index] for index in best if scores[index] > 0.0)
