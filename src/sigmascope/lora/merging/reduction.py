"""Lower the rank of many changes, each by a policy or all by one budget, one change in memory at a time."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lora.extraction.layer_pool import Result, run_layers_in_order
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.merging.reduced_module import LeftOut, ReducedModule
from sigmascope.lora.merging.reducible_change import CutChange, ReducibleChange
from sigmascope.lora.ranking.budget import Budget
from sigmascope.lora.ranking.rank_rules import RankRules
from sigmascope.lora.ranking.spectrum import Spectrum
from sigmascope.lora.ranking.storage_cost import StorageCost
from sigmascope.lora.ranks import FixedRank, RankPolicy
from sigmascope.lora.shapes import max_rank
from sigmascope.progress import Progress

Load = Callable[[str, int], ReducibleChange]
"""Read a module; told how many of its singular values are likely to be asked for."""


class RankPlan(NamedTuple):
    """How much rank there is.

    Attributes:
        rules: The policy of every module. With a budget, only its overrides and exclusions count.
        budget: What all modules share, if any.
    """

    rules: RankRules
    budget: Budget | None = None

    def describe(self) -> str:
        """Canonical text, for reports and headers."""
        if self.budget is None:
            return self.rules.describe()
        asked = json.loads(self.budget.describe()) | self.rules.describe_patterns()
        return json.dumps(asked, ensure_ascii=False)


@dataclass(frozen=True)
class Reduction:
    """A set of changes and how they are to be reduced.

    Attributes:
        shapes: Of the changed weights, by module, in the order of the file.
        old_ranks: By module; None where it has none.
        load: Reads one module; safe to call from threads.
        plan: How much rank there is.
        storage: What a module takes in the file that is written.
    """

    shapes: Mapping[str, tuple[int, ...]]
    old_ranks: Mapping[str, int | None]
    load: Load
    plan: RankPlan
    storage: StorageCost

    def run(self, progress: Progress) -> Iterator[tuple[ReducedModule, LoraFactors | None]]:
        """Reduce every module, in order, on all cores.

        Yields:
            What became of it, and its factors, None where it is left out.

        Raises:
            ConfigError: A pattern of the rules matches no module, or the budget cannot be met.
            NonFiniteError: Factors do not fit the storage dtype.
        """
        names = list(self.shapes)
        self.plan.rules.check(names)
        with _one_thread_here():
            yield from self._run(names, progress)

    def _run(
        self, names: list[str], progress: Progress
    ) -> Iterator[tuple[ReducedModule, LoraFactors | None]]:
        ranks = None if self.plan.budget is None else self._within(self.plan.budget, progress)
        work = self._run_over(names, lambda name: self._reduce(name, ranks))
        for done, (name, result) in enumerate(work, start=1):
            progress(done, len(names), name)
            yield result

    def _within(self, budget: Budget, progress: Progress) -> dict[str, int]:
        """The rank of every module that is not excluded, under a budget."""
        rules = self.plan.rules
        shapes = {name: shape for name, shape in self.shapes.items() if not rules.is_excluded(name)}
        budget.check(list(shapes))
        wanted = budget.first_guess(shapes, self.storage)
        spectra: dict[str, Spectrum] = {}
        pinned: dict[str, int] = {}
        while wanted:
            work = partial(self._spectrum, wanted)
            for name, (spectrum, rank) in self._run_over(list(wanted), work):
                spectra[name] = spectrum
                if rank is not None:
                    pinned[name] = rank
                progress(len(spectra), len(shapes), name)
            allocation = budget.allocate(spectra, self.storage, pinned)
            wanted = allocation.wanted
        return allocation.ranks

    def _spectrum(self, wanted: Mapping[str, int], name: str) -> tuple[Spectrum, int | None]:
        change = self.load(name, wanted[name])
        policy = self.plan.rules.override_for(name)
        rank = None if policy is None else _rank_by(policy, change)
        return change.spectrum(max(wanted[name], rank or 1)), rank

    def _reduce(self, name: str, ranks: Mapping[str, int] | None) -> tuple[ReducedModule, LoraFactors | None]:
        shape = self.shapes[name]
        policy = self.plan.rules.policy_for(name, shape)
        guess = policy.first_guess(shape) if policy is not None and ranks is None else 1
        change = self.load(name, guess if ranks is None else ranks.get(name, 1))
        if policy is None:
            return self._left_out(name, change, "excluded"), None
        rank = _rank_by(policy, change) if ranks is None else ranks[name]
        cut = _cut(name, change, rank) if rank > 0 else None  # before the norm, which then costs nothing
        if change.norm == 0.0:
            return self._left_out(name, change, "no_change"), None
        if cut is None:
            return self._left_out(name, change, "rank_0"), None
        return self._kept(name, change, cut), cut.factors

    def _kept(self, name: str, change: ReducibleChange, cut: CutChange) -> ReducedModule:
        return ReducedModule(
            name=name,
            shape=self.shapes[name],
            old_rank=self.old_ranks[name],
            rank=cut.factors.rank,
            norm=change.norm,
            error_norm=cut.error_norm,
            kept_energy=cut.kept_energy,
        )

    def _left_out(self, name: str, change: ReducibleChange, why: LeftOut) -> ReducedModule:
        return ReducedModule(
            name, self.shapes[name], self.old_ranks[name], 0, change.norm, change.norm, 0.0, why
        )

    def _run_over(self, names: list[str], work: Callable[[str], Result]) -> Iterator[tuple[str, Result]]:
        return run_layers_in_order({name: self._size(name) for name in names}, work)

    def _size(self, name: str) -> int:
        out, *inner = self.shapes[name]
        rank = self.old_ranks[name]
        columns = 1
        for size in inner:
            columns *= size
        return out * columns if rank is None else rank * (out + columns)


@contextmanager
def _one_thread_here() -> Iterator[None]:
    """Let what the caller does with each result (checks, conversions) not wait for cores that are at work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cut(name: str, change: ReducibleChange, rank: int) -> CutChange:
    try:
        return change.cut(rank)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error.message}", hint=error.hint) from error


def _rank_by(policy: RankPolicy, change: ReducibleChange) -> int:
    """Ask a policy, with more singular values until it knows."""
    if isinstance(policy, FixedRank):
        return policy.rank_for(change.weight_shape)  # needs none
    largest = max_rank(change.weight_shape)
    wanted = policy.first_guess(change.weight_shape)
    while (rank := policy.choose(change.spectrum(wanted))) is None:
        wanted = min(2 * wanted, largest)
    return rank


def require_modules(modules: Sequence[ReducedModule], plan: RankPlan) -> None:
    """Refuse, by a ConfigError, to write a LoRA of which nothing is left."""
    reasons = {module.left_out for module in modules}
    if reasons == {"no_change"}:
        raise ConfigError(
            f"all {len(modules)} changes are zero.", hint="Check the LoRAs and their --weights."
        )
    if modules and None not in reasons:
        raise ConfigError(
            f"{plan.describe()} leaves out all {len(modules)} modules.",
            hint="Allow more rank, or exclude less.",
        )
