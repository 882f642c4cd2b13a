import pytest
import typer
from typer.testing import CliRunner

from sigmascope.cli.options import RankChoice, RankFlags, option_groups, rank_choice
from sigmascope.errors import ConfigError
from sigmascope.lora.budget import Budget
from sigmascope.lora.ranks import FULL_RANK, FixedRank, MethodRank, RankRules


def test_nothing_asked_for_is_the_command_s_own_rank() -> None:
    assert rank_choice(RankFlags()) == RankChoice(RankRules(FixedRank(32, 16)), None)
    assert rank_choice(RankFlags(), rank=8, conv_rank=4).rules == RankRules(FixedRank(8, 4))


def test_fixed_ranks() -> None:
    assert rank_choice(RankFlags(rank=64)).rules == RankRules(FixedRank(64, 16))
    assert rank_choice(RankFlags(rank=64, conv_rank=9999)).rules == RankRules(FixedRank(64, 9999))


def test_a_method_with_limits() -> None:
    flags = RankFlags(rank_method="sv_fro:90%,conv=0.8", max_rank=64, max_conv_rank=32, min_rank=2)
    assert rank_choice(flags).rules == RankRules(MethodRank("sv_fro", 0.9, 0.8, 64, 32, 2))


def test_kohya_s_dynamic_methods_take_the_rank_as_their_limit() -> None:
    flags = RankFlags(dynamic_method="sv_ratio", dynamic_param=20.0, rank=32, conv_rank=8)
    assert rank_choice(flags).rules == RankRules(MethodRank("sv_ratio", 20.0, max_rank=32, max_conv_rank=8))


def test_a_method_that_is_a_rank_after_all() -> None:
    assert rank_choice(RankFlags(rank_method="full")).rules == RankRules(FixedRank(FULL_RANK, FULL_RANK))


def test_budgets() -> None:
    size = rank_choice(RankFlags(max_size="100MB", weight_for=["mid_block=2"], max_rank=128))
    assert size.budget == Budget(max_bytes=100 * 2**20, weights=(("mid_block", 2.0),), max_rank=128)
    error = rank_choice(RankFlags(max_error="5%", min_rank=1))
    assert error.budget == Budget(max_error=0.05, min_rank=1)


def test_overrides_and_exclusions_stand_beside_any_way() -> None:
    flags = RankFlags(
        max_size="1GB", rank_for=["attn1=64", "conv=energy:0.9"], exclude=["time_emb", "conv_out"]
    )
    rules = rank_choice(flags).rules
    assert rules.overrides == (("attn1", FixedRank(64, 64)), ("conv", MethodRank("energy", 0.9)))
    assert rules.excluded == ("time_emb", "conv_out")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (RankFlags(max_size="1MB", max_error="5%"), "--max_size and --max_error cannot be used together"),
        (
            RankFlags(max_size="1MB", rank_method="full"),
            "--max_size and --rank_method cannot be used together",
        ),
        (RankFlags(max_size="1MB", rank=4), "--rank and --max_size cannot be used together"),
        (
            RankFlags(rank_method="energy:0.9", conv_rank=4),
            "--conv_rank and --rank_method cannot be used together",
        ),
        (RankFlags(dynamic_method="sv_fro"), "--dynamic_param is missing"),
        (RankFlags(dynamic_param=0.9), "--dynamic_method is missing"),
        (RankFlags(dynamic_method="sv_knee", dynamic_param=1.0), "--dynamic_method sv_knee:1.0: sv_knee"),
        (
            RankFlags(dynamic_method="sv_fro", dynamic_param=0.9, rank=8, max_rank=4),
            "--rank and --max_rank set the same limit",
        ),
        (RankFlags(dynamic_method="sv_fro", dynamic_param=0.9, max_rank=0), "max_rank 0 keeps nothing"),
        (RankFlags(weight_for=["mid=2"]), "--weight_for is for --max_size"),
        (RankFlags(rank=4, max_rank=8), "--max_rank has no effect on a fixed rank"),
        (RankFlags(rank_method="fixed:4", min_rank=8), "--min_rank has no effect on a fixed rank"),
        (RankFlags(rank_method=""), "--rank_method : nothing is not a rank method"),
        (RankFlags(max_size="much"), "--max_size much is not a size"),
        (RankFlags(max_error="5"), "--max_error 5 is not a share"),
        (RankFlags(max_error="0%"), "--max_error 0% is not a limit"),
        (RankFlags(rank=0), "rank 0 keeps nothing"),
        (RankFlags(rank_for=["attn1"]), "--rank_for attn1 has no value"),
        (RankFlags(exclude=["("]), r"--exclude '\(' is not a valid regular expression"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_name(flags: RankFlags, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        rank_choice(flags)
    assert refused.value.hint


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer(rich_markup_mode="rich")

    @made.command()
    @option_groups
    def make(flags: RankFlags) -> None:
        typer.echo(flags)

    return made


def test_every_flag_reaches_its_place(app: typer.Typer) -> None:
    typed = {
        "rank": 1,
        "conv_rank": 2,
        "max_size": "3MB",
        "max_error": "4%",
        "weight_for": ["a=5", "b=6"],
        "rank_method": "full",
        "dynamic_method": "sv_fro",
        "dynamic_param": 0.7,
        "max_rank": 8,
        "max_conv_rank": 9,
        "min_rank": 10,
        "rank_for": ["c=11", "d=12"],
        "exclude": ["e", "f"],
    }
    arguments = [
        text
        for name, value in typed.items()
        for one in (value if isinstance(value, list) else [value])
        for text in (f"--{name}", str(one))
    ]
    assert CliRunner().invoke(app, arguments).output.strip() == str(RankFlags(**typed))  # type: ignore[arg-type]


def test_the_help_fits_80_columns(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert max(map(len, shown.splitlines())) <= 80
    assert "up_blocks.*attn1=64" in shown
