"""One prompt of ComfyUI while it runs: a stage for the prompt, and in it one for each node, on a `Recorder`.

Nodes are told of by their ids. Several are open at once where one waits for a task of its own, or for the nodes that it
expanded into; these lie inside it. A stage is opened in a context of its own, so that nothing of ours is current in the
host's.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from sigmascope.integrations.comfyui.sampling import SAMPLING, call_facts
from sigmascope.integrations.comfyui.texts import is_prompt
from sigmascope.monitor.recorder import LiveStage, Recorder, Step
from sigmascope.records.prompts import PromptPrivacy, privacy_of, stored_prompts
from sigmascope.records.run import Run

COMFYUI: Final = "comfyui"
"""The fact of a run that holds what ComfyUI's prompt was."""
NODE: Final = "node"
"""The fact of a stage that says which node it was."""
FACTS: Final = frozenset(
    {
        NODE,
        SAMPLING,
        "files",
        "loads",
        "lora",
        "lora_verdicts",
        "odd_outputs",
        "progress",
        "text_encoding",
        "tiled",
        "vae",
    }
)
"""What instruments put on a node's stage. What is found to be amiss with a node lies beside it, under the stage's name."""
NodeState = Literal["run", "cached", "blocked", "error", "interrupted", "not run"]
_STOPPED: Final[tuple[NodeState, ...]] = ("error", "interrupted")
T = TypeVar("T")
_SEVERAL_AT_ONCE: Final = "ComfyUI told of several steps at once: some steps are the sum of several"
_NO_BEGINNING: Final = "where a step began was not seen: it is left out"
_NO_END: Final = "no end of the node was seen"
_DEEPEST: Final = 20
"""Nodes that expand within each other, as loops do, lie in each other so deep at most; deeper ones lie side by side."""


class NodeWatch:
    """One node of the prompt, from its first start to its end.

    Attributes:
        id: In the graph; a node that another expanded into has that one's id at its beginning.
        class_type: As the graph has it.
        name: Of its stage.
        state: What became of it.
        ended_ns: When it ended; None: it has not.
        facts: What instruments say of it, by the name of the fact.
        is_sampler: Whether its steps are sampling steps.
        step: What times its sampling steps, one after the other; None: there was none yet.
        room: The context in which nodes are opened that it expands into.
        depth: How many nodes it came from, one from the other.
        is_in_step: Whether time counts for a step now.
        is_between_bars: Whether the sampler's bar stands at its end, or has not moved yet.
        beyond: Where the bar's end is, if the step that time counts for begins there: some samplers go on.
        tiled_calls: Calls of a VAE that works in tiles now, whose bar is none of the sampler's.
        seen_steps: Sampling steps that have ended.
        last_tick: Where the sampler's bar stood last.
    """

    def __init__(self, id: str, class_type: str, stage: LiveStage, context: Context) -> None:
        self.id, self.class_type, self.name = id, class_type, class_type
        self.stage, self.context = stage, context
        self.room, self.depth = context, 0
        self.state: NodeState = "run"
        self.ended_ns: int | None = None
        self.facts: dict[str, Any] = {}
        self.is_sampler = False
        self.seen_steps = 0
        self.last_tick: int | float = 0
        self.step: Step | None = None
        self.is_in_step = False
        self.is_between_bars = True
        self.beyond: int | float | None = None
        self.tiled_calls = 0

    def add(self, fact: str, value: Any) -> None:
        """Add to the list that the fact is."""
        self.facts.setdefault(fact, []).append(value)


class PromptRecording:
    """What is known so far of one prompt.

    Args:
        prompt_id: ComfyUI's.
        graph: The prompt as it was posted: by node id, with `class_type` and `inputs`.
        privacy: What is kept of texts.

    Attributes:
        dynprompt: ComfyUI's own view of the graph, with expanded nodes; None: not seen.
        nodes: Those that ran, in the order of their starts.
        cached: Nodes whose outputs ComfyUI had, from earlier prompts or from a node with the same inputs.
        facts: What instruments say of the prompt as a whole.
        failure: What stopped the prompt, until it is over; None: nothing that was seen.
        started_ns: When it began to run, on `time.perf_counter_ns`.
        lock: Held while a node or step begins or ends: nodes may move their bars on threads of their own.
    """

    def __init__(self, prompt_id: str, graph: Mapping[str, Any], privacy: PromptPrivacy = "full") -> None:
        self.prompt_id, self.graph, self.privacy = prompt_id, graph, privacy
        self.dynprompt: Any = None
        self.nodes: dict[str, NodeWatch] = {}
        self.facts: dict[str, Any] = {}
        self.failure: BaseException | None = None
        self.cached: frozenset[str] = frozenset()
        self.recorder = Recorder(
            f"ComfyUI {prompt_id[:8]}",
            keeps_words=privacy_of(privacy).keeps_words,
            clock=time.perf_counter_ns,
            step_memory=False,  # a third of what a step costs; the thread that samples looks ten times a second
        )
        self.started_ns = self.recorder.clock()
        self.recorder.begin_at(self.started_ns)
        self._context = Context()
        self._context.run(self.recorder.__enter__)
        self._stage = self.recorder.stage("generation")
        self._context.run(self._stage.__enter__)
        self._until_the_end: dict[str, Any] = {}
        self.lock = threading.RLock()

    def until_the_end(self, name: str, make: Callable[[], T]) -> T:
        """What an instrument of this name keeps of this prompt until it is over; made where there is none yet."""
        if name not in self._until_the_end:
            self._until_the_end[name] = make()
        kept: T = self._until_the_end[name]
        return kept

    def info(self, node_id: str) -> Mapping[str, Any]:
        """What the graph says of a node, expanded ones included; empty: nothing."""
        known = self.graph.get(node_id)
        if known is None and self.dynprompt is not None and self.dynprompt.has_node(node_id):
            known = self.dynprompt.get_node(node_id)
        return known if isinstance(known, Mapping) else {}

    def node(self, node_id: str | None) -> NodeWatch | None:
        """The node that runs under this id; of None the one that started last and is open."""
        if node_id is not None:
            return self.nodes.get(node_id)
        # A copy, since a node's own thread may ask while the host's starts the next node.
        return next((node for node in reversed(tuple(self.nodes.values())) if node.ended_ns is None), None)

    def posted(self, node: NodeWatch | None) -> str:
        """The node of the posted graph that a node is, or that it came from; "" if there is none."""
        while node is not None and node.id not in self.graph:
            node = self.nodes.get(node.facts[NODE]["parent"])
        return "" if node is None else node.id

    def started(self, node_id: str) -> None:
        """A node begins. A second time: its first start only asked which inputs it needs, and is no part of it."""
        with self.lock:
            before = self.nodes.pop(node_id, None)
            if before is not None:
                self._close(before, None)
                before.stage.dissolve()
            self._start(node_id)

    def _start(self, node_id: str) -> None:
        info = self.info(node_id)
        class_type = str(info.get("class_type", "unknown"))
        parent_id = None if self.dynprompt is None else self.dynprompt.get_parent_node_id(node_id)
        around = None if parent_id is None else self.nodes.get(parent_id)
        room = self._context if around is None else around.room
        name = class_type if class_type not in FACTS else f"{class_type} (node)"
        node = NodeWatch(node_id, class_type, self.recorder.stage(name), room.copy())
        node.name = name
        if around is not None:
            node.depth = around.depth + 1
        if node.depth >= _DEEPEST:
            node.room = room
        node.facts[NODE] = {
            "id": node_id,
            "class_type": class_type,
            "title": _title_of(info),
            "parent": parent_id,
        }
        self.nodes[node_id] = node
        node.context.run(node.stage.__enter__)

    def step_begins(self, node: NodeWatch) -> None:
        """From now on time counts for the sampler's next step; one that had begun is not counted."""
        with self.lock:
            if node.ended_ns is None:
                self._drop_step(node)
                if node.step is None:
                    node.step = self.recorder.step()
                node.context.run(node.step.__enter__)
                node.is_in_step, node.beyond = True, None

    def ticked(self, node: NodeWatch | None, value: int | float, maximum: int | float) -> None:
        """A node's own bar moved: a sampling step has ended, or something else of which only the count is kept."""
        if node is None or node.ended_ns is not None:
            return
        if node.is_sampler and node.tiled_calls > 0:
            return
        if not node.is_sampler:
            node.facts["progress"] = {"done": min(value, maximum), "of": maximum}
            return
        with self.lock:
            self._step_ended(node, value, maximum)

    def _step_ended(self, node: NodeWatch, value: int | float, maximum: int | float) -> None:
        if value < 1:  # the bar was put at its beginning
            node.last_tick = value
            self.step_begins(node)
            return
        if value == node.last_tick and (node.is_in_step or maximum > 1):  # told again
            return
        if node.beyond is not None and (value <= node.last_tick or maximum != node.beyond):
            # Another bar: when its first step began is not known.
            self._drop_step(node)
        if value > 1 + (node.last_tick if value > node.last_tick else 0):
            node.stage.missing("steps", _SEVERAL_AT_ONCE)
        elif not node.is_in_step:
            node.stage.missing("steps", _NO_BEGINNING)
        node.last_tick = value
        node.is_between_bars = value >= maximum
        if node.is_in_step and node.step is not None:
            node.is_in_step = False
            node.context.run(node.step.__exit__, None, None, None)
            node.seen_steps += 1
        node.stage.plan_steps(node.seen_steps + max(0, int(maximum - value)))
        self.step_begins(node)
        node.beyond = maximum if value >= maximum else None

    def ended(self, node_id: str, error: BaseException | None = None) -> None:
        """A node has ended, well or by what it raised. Again does nothing."""
        with self.lock:
            node = self.nodes.get(node_id)
            if node is not None and node.ended_ns is None:
                if error is not None:
                    interrupted = type(error).__name__ == "InterruptProcessingException"
                    node.state = "interrupted" if interrupted else "error"
                    self.failure = self.failure or error
                self._close(node, error)

    def _drop_step(self, node: NodeWatch) -> None:
        if node.is_in_step and node.step is not None:
            node.is_in_step = False
            node.context.run(node.step.drop)

    def _close(self, node: NodeWatch, error: BaseException | None) -> None:
        self._drop_step(node)
        node.ended_ns = self.recorder.clock()
        node.context.run(node.stage.__exit__, *_raised(error))

    def end(self, error: BaseException | None = None) -> None:
        """The prompt is over.

        Args:
            error: What came out of ComfyUI itself. It keeps a node's own error to itself, which fails the prompt as well.
        """
        failure, self.failure = error or self.failure, None
        with self.lock:
            stopped = {
                parent
                for node in self.nodes.values()
                if node.state in _STOPPED
                for parent in self._around(node)
            }
            for node in self.nodes.values():
                if node.ended_ns is None:
                    node.stage.missing("end", _NO_END)
                    self._close(node, failure if node.id in stopped else None)
        self._context.run(self._stage.__exit__, *_raised(failure))
        self._context.run(self.recorder.__exit__, *_raised(error))
        self.facts["success"] = failure is None and all(
            node.state in ("run", "blocked") for node in self.nodes.values()
        )

    def _around(self, node: NodeWatch) -> Iterator[str]:
        """The ids of the nodes that expanded into this one."""
        parent: str | None = node.facts[NODE]["parent"]
        while parent is not None and parent in self.nodes:
            yield parent
            parent = self.nodes[parent].facts[NODE]["parent"]

    def seconds_of_no_node(self) -> float:
        """What of the prompt passed while no node was open: queue of the graph, caches, and this watch itself."""
        whole = self._stage.seconds
        covered, until = 0, 0
        for node in sorted(self.nodes.values(), key=lambda node: node.stage.started_ns):
            ended_ns = node.ended_ns or node.stage.started_ns
            covered += max(0, ended_ns - max(until, node.stage.started_ns))
            until = max(until, ended_ns)
        return max(0.0, whole - covered / 1e9)

    def table(self) -> list[dict[str, Any]]:
        """Every node of the graph, and those expanded, with what became of it, in the order of their starts."""
        ran = [
            {**node.facts[NODE], "state": node.state, "seconds": node.stage.seconds}
            for node in self.nodes.values()
        ]
        others = [
            {
                "id": node_id,
                "class_type": str(self.info(node_id).get("class_type", "unknown")),
                "title": _title_of(self.info(node_id)),
                "parent": None,
                "state": "cached" if node_id in self.cached else "not run",
                "seconds": None,
            }
            for node_id in self.graph
            if node_id not in self.nodes
        ]
        return ran + others

    def texts(self) -> dict[str, str]:
        """The prompts in the graph, by node and input."""
        return {
            f"{node_id} {name}": value
            for node_id in self.graph
            for name, value in (self.info(node_id).get("inputs") or {}).items()
            if isinstance(value, str) and is_prompt(str(self.info(node_id).get("class_type")), name)
        }

    def run(self) -> Run:
        """The record, with the facts that instruments gave."""
        for node in self.nodes.values():
            for name, value in node.facts.items():
                node.stage.fact(name, value)
        samplers = [node.facts[SAMPLING] for node in self.nodes.values() if SAMPLING in node.facts]
        if samplers:
            self._stage.fact("call", asdict(call_facts(samplers[0])))
        kept = stored_prompts(self.texts(), self.privacy)
        if kept:
            self._stage.fact("prompts", {name: asdict(prompt) for name, prompt in kept.items()})
        self.recorder.fact(
            COMFYUI,
            {
                "prompt_id": self.prompt_id,
                "nodes": self.table(),
                "seconds_of_no_node": self.seconds_of_no_node(),
                **self.facts,
            },
        )
        return self.recorder.run()


def _raised(
    error: BaseException | None,
) -> tuple[type[BaseException] | None, BaseException | None, TracebackType | None]:
    """What `__exit__` is told of an error."""
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def _title_of(info: Mapping[str, Any]) -> str | None:
    """The title that a node has in the browser; None: the prompt does not say."""
    known = info.get("_meta")
    title = known.get("title") if isinstance(known, Mapping) else None
    return title if isinstance(title, str) else None
