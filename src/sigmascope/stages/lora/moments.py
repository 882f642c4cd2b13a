"""Two moments of a model: its names at both, and old contents where anybody still has them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sigmascope.probes.fingerprints import fingerprint
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.applied import Applied, original_of
from sigmascope.stages.lora.captured import CapturedModel
from sigmascope.stages.lora.capturing import capture_model
from sigmascope.stages.lora.weights import weights_in


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Two moments of a model, and the model itself. It holds the host's tensors.

    Attributes:
        before: The original.
        after: What came of it.
        model: As it is now.
        applied: The changes on it now.
    """

    before: CapturedModel
    after: CapturedModel
    model: object
    applied: Applied

    def samples_of_changed(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The elements that were taken of each weight at both moments, where its content is another now."""
        before, after = self.before, self.after
        return {
            key: (sample, after.samples[key])
            for key, sample in before.samples.items()
            if key in after.samples and before.fingerprints.get(key) != after.fingerprints.get(key)
        }


def moments_of(before: CapturedModel, model: object, model_type: str, applied: Applied) -> Moments:
    """Look at a model as it is now, at the same weights as before."""
    keys = None if not before.fingerprints else set(before.fingerprints)
    contents = before.fingerprint_seconds is not None
    after = capture_model(model, model_type, keys=keys, contents=contents)
    return Moments(before, after, model, applied)


class KeysOfBoth:
    """Names in both models; nothing is said of a model whose names are not known."""

    def __init__(self, before: CapturedModel, after: CapturedModel) -> None:
        self._before, self._after = before, after
        self._known = all("weights" not in one.unavailable for one in (before, after))

    def only_in(self, one: CapturedModel, other: CapturedModel) -> list[str]:
        """Names that one moment has and the other has not."""
        there = set(other.keys)
        return [key for key in one.keys if key not in there] if self._known else []

    def in_both(self) -> list[str]:
        """Names at both moments."""
        there = set(self._after.keys)
        return [key for key in self._before.keys if key in there]

    def count(self, one: CapturedModel) -> int | None:
        """How many names there are; None if they are not known."""
        return None if "weights" in one.unavailable else len(one.keys)


class Originals:
    """The weights as they were, where anybody still has them apart from those of now."""

    def __init__(self, moments: Moments, now: Mapping[str, Tensor]) -> None:
        self._moments = moments
        self._now = now
        original = moments.before.model()
        apart = original is not None and original is not moments.model
        self._live: Mapping[str, Tensor] = {}
        if apart:
            kind = moments.before.model_type
            found = read_host(lambda: weights_in(original, kind)).value
            self._live = {} if found is None else found.base

    def of(self, key: str) -> Tensor | None:
        """The old content, proved by its fingerprint where the baseline has one."""
        moments = self._moments
        kept = read_host(lambda: original_of(moments.model, moments.after.model_type, key)).value
        for candidate in (kept, self._live.get(key)):
            if (
                candidate is not None
                and not _same_memory(candidate, self._now[key])
                and self._is_old(key, candidate)
            ):
                return candidate
        return None

    def _is_old(self, key: str, candidate: Tensor) -> bool:
        known = self._moments.before.fingerprints.get(key)
        return known is None or fingerprint(candidate).value == known


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return one.device == other.device and one.data_ptr() == other.data_ptr() != 0
