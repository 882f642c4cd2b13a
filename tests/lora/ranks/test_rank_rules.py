import pytest

from sigmascope.errors import ConfigError
from sigmascope.lora.layer_names import nearest_layers
from sigmascope.lora.ranks import FixedRank, MethodRank, RankRules, parse_overrides, split_patterns

LAYERS = [
    "denoiser.conv_in",
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "denoiser.mid_block.resnets.0.conv1",
    "denoiser.up_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
    "denoiser.up_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q",
]
CONV_IN, DOWN_ATTN1, MID_CONV, UP_ATTN1, UP_ATTN2 = LAYERS
DEFAULT, OTHER, THIRD = FixedRank(32, 16), FixedRank(64, 64), MethodRank("energy", 0.9)


def test_without_overrides_every_layer_gets_the_default() -> None:
    assert {RankRules(DEFAULT).policy_for(layer, (8, 8)) for layer in LAYERS} == {DEFAULT}


def test_an_override_holds_for_the_layers_that_its_pattern_is_found_in() -> None:
    rules = RankRules(DEFAULT, (("up_blocks.*attn1", OTHER),))
    assert rules.policy_for(UP_ATTN1, (8, 8)) == OTHER
    assert rules.policy_for(UP_ATTN2, (8, 8)) == DEFAULT
    assert rules.policy_for(DOWN_ATTN1, (8, 8)) == DEFAULT


def test_the_last_override_that_matches_wins() -> None:
    rules = RankRules(DEFAULT, (("up_blocks", OTHER), ("attn1", THIRD)))
    assert rules.policy_for(UP_ATTN1, (8, 8)) == THIRD
    assert rules.policy_for(UP_ATTN2, (8, 8)) == OTHER


def test_an_excluded_layer_has_no_policy_whatever_the_overrides_say() -> None:
    rules = RankRules(DEFAULT, (("attn2", OTHER),), ("attn2$|to_q$",))
    assert rules.policy_for(UP_ATTN2, (8, 8)) is None
    assert rules.policy_for(CONV_IN, (8, 8, 3, 3)) == DEFAULT


def test_only_overridden_layers_have_an_override() -> None:
    rules = RankRules(DEFAULT, (("attn1", OTHER),))
    assert rules.override_for(UP_ATTN1) == OTHER
    assert rules.override_for(CONV_IN) is None


def test_patterns_that_match_are_accepted() -> None:
    RankRules(DEFAULT, (("attn1", OTHER),), ("conv",)).check(LAYERS)


@pytest.mark.parametrize(
    ("rules", "flag"),
    [
        (RankRules(DEFAULT, (("up_blocks.*atn2", OTHER),)), "--rank_for"),
        (RankRules(DEFAULT, (), ("up_block.*atn2",)), "--exclude"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_layer(
    rules: RankRules, flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"{flag} .* matches none of the 5 layers") as refused:
        rules.check(LAYERS)
    assert (refused.value.hint or "").startswith(f"The nearest layers are {UP_ATTN2}")


def test_the_nearest_layers_have_the_pieces_most_like_the_pattern() -> None:
    assert nearest_layers("midblock.*conv", LAYERS)[0] == MID_CONV
    assert nearest_layers("conv-in", LAYERS)[0] == CONV_IN


@pytest.mark.parametrize("pattern", ["attn1(", "*conv", ""])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--rank_for"):
        RankRules(DEFAULT, ((pattern, OTHER),))
    with pytest.raises(ConfigError, match="--exclude"):
        RankRules(DEFAULT, (), (pattern,))


def test_overrides_are_read() -> None:
    assert parse_overrides(["up_blocks.*attn1=64", "conv=energy:0.9"]) == (
        ("up_blocks.*attn1", FixedRank(64, 64)),
        ("conv", MethodRank("energy", 0.9)),
    )


def test_patterns_may_hold_equal_signs_and_policies_settings() -> None:
    assert split_patterns(["up(?=_blocks)=fixed:3,conv=4", "a=b=2"], "--rank_for") == [
        ("up(?=_blocks)", "fixed:3,conv=4"),
        ("a=b", "2"),
    ]


@pytest.mark.parametrize("text", ["attn1", "attn1=", "=64", ""])
def test_an_override_without_pattern_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no value"):
        parse_overrides([text])


def test_rules_without_patterns_say_their_default() -> None:
    assert RankRules(DEFAULT).describe() == "fixed:32,conv=16"


def test_rules_that_differ_say_different_things() -> None:
    rules = [
        RankRules(DEFAULT),
        RankRules(OTHER),
        RankRules(DEFAULT, (("a", OTHER),)),
        RankRules(DEFAULT, (("a", THIRD),)),
        RankRules(DEFAULT, (("a", OTHER), ("b", OTHER))),
        RankRules(DEFAULT, (("b", OTHER), ("a", OTHER))),
        RankRules(DEFAULT, (), ("a",)),
        RankRules(DEFAULT, (), ("a", "b")),
        RankRules(DEFAULT, (), ('a", "b',)),
    ]
    assert len({one.describe() for one in rules}) == len(rules)
