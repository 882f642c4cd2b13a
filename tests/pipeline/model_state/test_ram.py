from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sigmascope import encode_latents
from sigmascope.errors import EveryStrategyFailedError
from sigmascope.pipeline import encode_decode as attempts
from sigmascope.pipeline import model_state as out_of_memory
from sigmascope.pipeline.model_state import Ram, free_ram, why_not_enough

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample

MIB = 2**20


def _group(folder: Path, limit: str, used: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 0\n")
    return folder


def test_a_container_has_what_its_limit_leaves_and_what_it_merely_caches(tmp_path: Path) -> None:
    assert free_ram(_group(tmp_path, str(9 * MIB), 5 * MIB, 2 * MIB)) == Ram(6 * MIB, "this container")


@pytest.mark.parametrize("limit", ["max", str(2**60)])
def test_a_container_without_a_limit_of_its_own_has_the_machines(tmp_path: Path, limit: str) -> None:
    assert free_ram(_group(tmp_path, limit, 0, 0)).whose == "this machine"


def test_no_container_has_the_machines(tmp_path: Path) -> None:
    assert free_ram(tmp_path).free_bytes is not None


def test_a_refusal_has_its_numbers() -> None:
    assert why_not_enough(3 * MIB, Ram(2 * MIB)) == (
        "it takes about 3 MB of RAM, and this machine has 2 MB free"
    )
    assert why_not_enough(2 * MIB, Ram(2 * MIB)) is None
    assert why_not_enough(2 * MIB, Ram(None)) is None


def _leave(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    for module in (out_of_memory, attempts):
        monkeypatch.setattr(module, "free_ram", lambda: Ram(nbytes))


def test_the_cpu_is_refused_with_numbers_before_anything_is_moved(
    kl: "Sample", monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave(monkeypatch, 100)
    with pytest.raises(EveryStrategyFailedError) as caught:
        encode_latents(kl.vae, kl.pixels, strategies="cpu")
    attempt = caught.value.record.attempts[0]
    assert (attempt.outcome, attempt.seconds) == ("skipped", None)
    assert "only 0 MB of RAM are free" in (attempt.reason or "")


def test_the_cpu_cuts_tiles_where_ram_holds_no_more(kl: "Sample", monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = kl.pixels[:1].repeat(1, 1, 8, 8)
    _, whole = encode_latents(kl.vae, pixels, strategies="cpu")
    expected = whole.attempts[0].predicted_peak_bytes
    assert expected is not None
    _leave(monkeypatch, expected)
    _, record = encode_latents(kl.vae, pixels, strategies="cpu")
    assert record.attempts[0].tile is not None


def test_auto_passes_over_what_does_not_fit(kl: "Sample", monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = kl.pixels[:1].repeat(1, 1, 8, 8)
    _, whole = encode_latents(kl.vae, pixels, strategies="direct")
    expected: Any = whole.attempts[0].predicted_peak_bytes
    _leave(monkeypatch, expected)
    _, record = encode_latents(kl.vae, pixels, strategies="auto")
    assert [(one.name, one.outcome) for one in record.attempts] == [
        ("direct", "skipped"),
        ("tiled", "succeeded"),
    ]
    assert "A peak of " in (record.attempts[0].reason or "")
