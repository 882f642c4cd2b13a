"""Damaged files of every format, opened as users open them: a clear error, or a result that is right.

Right is what an independent reader says: safetensors, `torch.load(weights_only=True)`, the gguf package, Pillow, PyYAML,
the JSON module, or the products of the factors worked out in `openers`.
"""

import contextlib
import hashlib
import shutil
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from PIL import Image
from tests.chaos.made_files import Specimen, make_specimens
from tests.chaos.mutations import mutated
from tests.chaos.openers import OPENERS, Refused, Trial, check_message
from tests.chaos.tries import MB, Case, Kind

from sigmascope.errors import SigmascopeError


def attempt(case: Case) -> str:
    rng = case.random
    specimens: dict[str, list[Specimen]] = case.prepared
    families = list(specimens)
    (family,) = rng.choices(families, [len(OPENERS[family]) for family in families])
    specimen = rng.choice(specimens[family])
    shutil.copytree(specimen.folder, case.folder, dirs_exist_ok=True)
    file, marker = Path(specimen.file), case.folder / "payload-ran"
    other = rng.choice(specimens[rng.choice(families)])
    spliced = (other.folder / other.file).read_bytes()
    data, how = mutated(file.name, file.read_bytes(), rng, other=spliced, marker=str(marker))
    file.write_bytes(data)
    if rng.random() < 0.05 and file.suffix not in (".gguf", ".json", ".yaml", ".jsonl"):
        file = file.rename(
            f"in{rng.choice(('.safetensors', '.ckpt', '.bin', '.gguf', ''))}"
        )  # named as what it is not
    opener = rng.choice(OPENERS[family])
    print(f"{family}: {specimen.folder.name}, {how}, {opener.__name__.strip('_')}")  # noqa: T201
    before = _contents()
    try:
        with _no_warnings():
            made = set(opener(Trial(file, rng)) or ())
        outcome = "right"
    except SigmascopeError as error:
        check_message(str(error), file)
        made, outcome = set(), "refused"
    except Refused:
        made, outcome = set(), "refused"
    finally:
        assert not marker.exists(), "the payload was run"
    after = _contents()
    assert before.items() <= after.items(), "an input was changed"
    left = {name for name in after if name not in before} - made
    assert not left, f"left behind: {sorted(left)}"
    return f"{family}: {outcome}"


def _contents() -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path().rglob("*")
        if path.is_file()
    }


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """NumPy's warnings of numbers that overflow mean that somebody goes on with them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        yield


def _prepare(folder: Path) -> dict[str, list[Specimen]]:
    Image.init()
    for name in ("run_comparison", "tensor_comparison"):  # here, and not anew in each child
        import_module(f"sigmascope.analysis.{name}")
    import_module("sigmascope.lbm.training.train")
    families: dict[str, list[Specimen]] = {}
    for specimen in make_specimens(folder):
        families.setdefault(specimen.family, []).append(specimen)
    return families


KIND = Kind(
    "files",
    "a damaged file gives a clear error or a right result, runs nothing and changes nothing",
    tries=10_000,
    attempt=attempt,
    prepare=_prepare,
    seconds=10.0,
    memory=1024 * MB,
)
