import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigmascope.errors import ConfigError
from sigmascope.units import format_size, parse_share, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100MB", 104_857_600),  # MB are MiB
        ("100MiB", 104_857_600),
        ("1.5 gb", 1_610_612_736),
        ("2GiB", 2_147_483_648),
        ("10kb", 10_240),
        ("7KiB", 7_168),
        (".5MB", 524_288),
        ("104857600", 104_857_600),
        ("5B", 5),
        ("12 bytes", 12),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "100TBx", "-5MB", "1e3", "0MB", "nan", "1 2MB", "99999999999GB"])
def test_what_is_no_size_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max_size .* is not a size"):
        parse_size(text, "--max_size")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, "1 byte"),
        (999, "999 bytes"),
        (104_857_600, "100 MB"),
        (1536, "1.5 KB"),
        (3 * 1024**3, "3 GB"),
        (1_047_552, "1023 KB"),
    ],
)
def test_sizes_are_written(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 2**50))
def test_a_written_size_is_read_back_nearly(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("0.05", 0.05), ("100%", 1.0), ("0", 0.0), ("1e-3", 0.001), (" 12.5 % ", 0.125)],
)
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("text", ["", "five", "-5%", "101%", "1.5", "nan", "inf"])
def test_what_is_no_share_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max_error .* is not a share"):
        parse_share(text, "--max_error")


def test_a_percentage_without_its_sign_is_asked_back() -> None:
    with pytest.raises(ConfigError, match=r"Write 5% or 0\.05"):
        parse_share("5")
