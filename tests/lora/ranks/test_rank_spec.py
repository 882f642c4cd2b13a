import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmascope.errors import ConfigError
from sigmascope.lora.ranks import FULL_RANK, METHODS, FixedRank, MethodRank, RankPolicy, parse_policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("64", FixedRank(64, 64)),
        ("fixed:32,conv=16", FixedRank(32, 16)),
        ("fixed:32", FixedRank(32, 32)),
        ("standard:8", FixedRank(8, 8)),  # KJNodes' name for it
        ("full", FixedRank(FULL_RANK, FULL_RANK)),
        ("energy:0.95", MethodRank("energy", 0.95)),
        ("energy:95%", MethodRank("energy", 0.95)),
        ("sv_fro:0.9,max=64", MethodRank("sv_fro", 0.9, max_rank=64)),
        (
            "quantile:0.9,conv=0.8,max=64,max_conv=32,min=0",
            MethodRank("quantile", 0.9, 0.8, max_rank=64, max_conv_rank=32, min_rank=0),
        ),
        (" sv_ratio:20 ", MethodRank("sv_ratio", 20.0)),
        ("threshold:1e-3", MethodRank("threshold", 1e-3)),
    ],
)
def test_policies_are_read(text: str, policy: RankPolicy) -> None:
    assert parse_policy(text) == policy


fixed = st.builds(FixedRank, rank=st.integers(1, 10_000), conv_rank=st.integers(1, 10_000))
limits = st.none() | st.integers(4, 500)
methods = st.builds(
    MethodRank,
    name=st.sampled_from([name for name in METHODS if name != "sv_ratio"]),
    parameter=st.floats(0.0, 1.0),
    conv_parameter=st.none() | st.floats(0.0, 1.0),
    max_rank=limits,
    max_conv_rank=limits,
    min_rank=st.integers(0, 4),
)


@given(fixed | methods)
@settings(deadline=None)
def test_what_a_policy_says_of_itself_reads_back_as_it(policy: RankPolicy) -> None:
    assert parse_policy(policy.describe()) == policy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "nothing is not a rank method"),
        ("sv_knee:1", "sv_knee is not a rank method"),
        ("energy", "energy needs a number"),
        ("energy:much", "energy needs a number"),
        ("energy:95", r"energy does not take 95.*energy:90%"),
        ("fixed:2.5", "must be a whole number"),
        ("fixed:", "must be a whole number"),
        ("0", "keeps nothing"),
        ("-4", "not a rank method"),
        ("full:3", "full is not a rank method"),
        ("energy:0.9,top=3", "top is not known"),
        ("energy:0.9,max=3,max=4", "given twice"),
        ("energy:0.9,max=ten", "max must be a whole number"),
        ("fixed:4,max=8", "a fixed rank has no limits"),
    ],
)
def test_what_makes_no_sense_is_refused_with_flag_and_text(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        parse_policy(text, "--rank_for")
    assert refused.value.message.startswith(f"--rank_for {text}:")
    assert refused.value.hint
