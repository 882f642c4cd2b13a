"""Pairs of picture files as members of a shard, each looked at before it goes in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sigmascope.errors import DataError
from sigmascope.lbm.shards.pairs import LeftOut, Pair
from sigmascope.lbm.shards.parallel import map_ahead
from sigmascope.lbm.shards.pictures import decode_picture, same_shape
from sigmascope.lbm.shards.writing import EncodedSample
from sigmascope.progress import Progress, no_progress
from sigmascope.records.os_errors import reason_of

WORKERS = 4
AHEAD = 16


@dataclass
class PairEncoder:
    """Reads pairs, and leaves out those that training could not use.

    Attributes:
        left_out: Filled while the pairs are read.
    """

    left_out: list[LeftOut] = field(default_factory=list)

    def samples(self, pairs: Sequence[Pair], progress: Progress = no_progress) -> Iterator[EncodedSample]:
        """Give the pairs' files as they are, in their order; each picture is decoded once, as a check."""
        outcomes = map_ahead(_encode, iter(pairs), workers=WORKERS, ahead=AHEAD)
        for done, (pair, outcome) in enumerate(zip(pairs, outcomes, strict=True), start=1):
            if isinstance(outcome, str):
                self.left_out.append(LeftOut(pair.name, outcome))
            else:
                yield pair.name, outcome
            progress(done, len(pairs), pair.name)


def _encode(pair: Pair) -> dict[str, bytes] | str:
    """The members, or why they cannot be used."""
    members: dict[str, bytes] = {}
    shape: tuple[int, int] | None = None
    for key, file in pair.files.items():
        try:
            data = file.read_bytes()
            size = decode_picture(data).size
        except (OSError, DataError) as error:
            return f"{file.name} {_reason(error)}"
        shape = shape or size
        if not same_shape(shape, size):
            first = next(iter(pair.files.values()))
            return (
                f"{file.name} has another shape ({size[0]}×{size[1]}) than {first.name} "
                f"({shape[0]}×{shape[1]})"
            )
        members[f"{key.lower()}{file.suffix.lower()}"] = data
    return members


def _reason(error: OSError | DataError) -> str:
    return f"cannot be read ({reason_of(error)})" if isinstance(error, OSError) else error.message
