"""What the options of ranks ask for: rules for every layer, or a budget for all of them."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sigmascope.cli.lora.rank_options import RankFlags
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.lora.ranking.budget import Budget
    from sigmascope.lora.ranking.rank_rules import RankRules
    from sigmascope.lora.ranks import RankPolicy


class RankChoice(NamedTuple):
    """What the flags mean.

    Attributes:
        rules: The policy of every layer. With a budget, only its overrides and exclusions count.
        budget: What all layers share, if asked for.
    """

    rules: "RankRules"
    budget: "Budget | None"


def rank_choice(flags: RankFlags, *, rank: int = 32, conv_rank: int = 16) -> RankChoice:
    """Turn the flags into rank rules and a budget.

    Args:
        flags: As typed.
        rank: Rank of Linear layers when nothing is asked for.
        conv_rank: The same for convolutions.

    Raises:
        ConfigError: Flags that contradict each other, have no effect, or make no sense.
    """
    from sigmascope.lora.ranking.rank_rules import RankRules, parse_overrides
    from sigmascope.lora.ranks import FULL_RANK, FixedRank

    _require_one_way(flags)
    budget = _budget(flags)
    policy: RankPolicy
    if budget is not None:
        policy = FixedRank(FULL_RANK, FULL_RANK)
    elif flags.rank_method is not None or flags.dynamic_method is not None:
        policy = _method(flags)
    else:
        _refuse_limits(flags, "a fixed rank")
        policy = FixedRank(
            rank if flags.rank is None else flags.rank,
            conv_rank if flags.conv_rank is None else flags.conv_rank,
        )
    rules = RankRules(policy, parse_overrides(flags.rank_for or []), tuple(flags.exclude or []))
    return RankChoice(rules, budget)


def _require_one_way(flags: RankFlags) -> None:
    """Refuse two answers to how much rank there is, and settings of an answer that was not given."""
    ways = ("max_size", "max_error", "rank_method", "dynamic_method")
    given = [f"--{name}" for name in ways if getattr(flags, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other.", hint="Give one of them.")
    fixed = [f"--{name}" for name in ("rank", "conv_rank") if getattr(flags, name) is not None]
    if given and fixed and flags.dynamic_method is None:
        raise ConfigError(
            f"{fixed[0]} and {given[0]} exclude each other.",
            hint="Limit it with --max_rank and --max_conv_rank, or set single layers with --rank_for.",
        )
    if (flags.dynamic_method is None) != (flags.dynamic_param is None):
        missing = "--dynamic_param" if flags.dynamic_param is None else "--dynamic_method"
        raise ConfigError(
            f"{missing} is missing.", hint="Give --dynamic_method and --dynamic_param together."
        )
    for name in ("rank", "conv_rank"):
        limited = getattr(flags, name) is not None and getattr(flags, f"max_{name}") is not None
        if limited and flags.dynamic_method is not None:
            raise ConfigError(
                f"--{name} and --max_{name} are one limit of --dynamic_method.", hint="Give one of them."
            )
    if flags.weight_for and flags.max_size is None and flags.max_error is None:
        raise ConfigError(
            "--weight_for is for --max_size and --max_error only.", hint="Add one, or leave it out."
        )


def _budget(flags: RankFlags) -> "Budget | None":
    if flags.max_size is None and flags.max_error is None:
        return None
    from sigmascope.lora.ranking.budget import Budget
    from sigmascope.lora.ranking.layer_weights import parse_weights
    from sigmascope.lora.ranking.sizes import parse_share, parse_size

    return Budget(
        max_bytes=None if flags.max_size is None else parse_size(flags.max_size, "--max_size"),
        max_error=None if flags.max_error is None else parse_share(flags.max_error, "--max_error"),
        weights=parse_weights(flags.weight_for or []),
        max_rank=flags.max_rank,
        max_conv_rank=flags.max_conv_rank,
        min_rank=flags.min_rank or 0,
    )


def _method(flags: RankFlags) -> "RankPolicy":
    from sigmascope.lora.ranking.rank_methods import MethodRank
    from sigmascope.lora.ranking.rank_spec import parse_policy

    if flags.dynamic_method is not None:
        text = f"{flags.dynamic_method}:{flags.dynamic_param!r}"
        policy = parse_policy(text, "--dynamic_method")
        # kohya's tools take the rank as the limit of a dynamic method.
        max_rank = flags.rank if flags.max_rank is None else flags.max_rank
        max_conv_rank = flags.conv_rank if flags.max_conv_rank is None else flags.max_conv_rank
    else:
        policy = parse_policy(flags.rank_method or "", "--rank_method")
        max_rank, max_conv_rank = flags.max_rank, flags.max_conv_rank
    if not isinstance(policy, MethodRank):
        _refuse_limits(flags, "a fixed rank")
        return policy
    return replace(
        policy,
        max_rank=policy.max_rank if max_rank is None else max_rank,
        max_conv_rank=policy.max_conv_rank if max_conv_rank is None else max_conv_rank,
        min_rank=policy.min_rank if flags.min_rank is None else flags.min_rank,
    )


def _refuse_limits(flags: RankFlags, what: str) -> None:
    for name in ("max_rank", "max_conv_rank", "min_rank"):
        if getattr(flags, name) is not None:
            raise ConfigError(
                f"--{name} has no effect on {what}.",
                hint="Use it with --rank_method, --max_size or --max_error.",
            )
