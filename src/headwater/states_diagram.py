"""The page of table states as Markdown, made from the one table of transitions. docs/table-states.md is it; a test says so.

`python -m headwater.states_diagram docs/table-states.md` writes it again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from headwater.states import AFTER_CRASH, FROM_EVERY_STATE, IN_MEMORY_ONLY, TRANSITIONS, Actor, Phase

_NAMES = {phase: "".join(word.title() for word in phase.value.split("_")) for phase in Phase}

_MEANING = {
    Phase.INIT: "waits for a table sync worker",
    Phase.DATA_SYNC: "its rows are being copied",
    Phase.FINISHED_COPY: "the copy is durable; its worker follows its own slot until it is close to the server's position",
    Phase.SYNC_WAIT: "its worker is close to the server's position and waits for the apply worker's answer",
    Phase.CATCHUP: "its worker writes up to the apply worker's position; the apply worker begins no batch",
    Phase.SYNC_DONE: "handed over at a position; the apply worker owns every transaction that commits at or past it",
    Phase.READY: "the apply worker has confirmed past that position and owns the table",
    Phase.ERRORED: "stopped with a reason, a remedy and a retry policy; its changes are not kept meanwhile",
}

_INTRODUCTION = """\
# The states of a table

Made from `headwater.states` by `python -m headwater.states_diagram docs/table-states.md`; a test fails when it is stale.

Besides the transitions in the diagram, every state can lead back to `Init`, which is a new copy: when the user asks for it
(`headwater resync`), and when a look at the catalog finds a change that needs one."""


def page() -> str:
    """The whole document."""
    return "\n".join([_INTRODUCTION, "", *_diagram(), "", *_phases(), "", *_actors(), ""])


def _diagram() -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {_NAMES[Phase.INIT]}"
    for source in Phase:
        for target in Phase:
            actors = _who(source, target)
            if actors:
                yield f"    {_NAMES[source]} --> {_NAMES[target]}: {', '.join(actors)}"
    for phase in Phase:
        if phase in IN_MEMORY_ONLY:
            yield f"    class {_NAMES[phase]} memory"
    yield "    classDef memory stroke-dasharray: 4 4"
    yield "```"
    yield ""
    yield "States with a dashed border are kept in memory only."


def _who(source: Phase, target: Phase) -> list[str]:
    """Who may make this transition; transitions that start from every state are given once, in words."""
    actors = (actor for actor in Actor if actor not in FROM_EVERY_STATE)
    return [actor.value for actor in actors if target in TRANSITIONS.get((source, actor), frozenset())]


def _phases() -> Iterator[str]:
    yield "## What each means, and what a crash in it leads to"
    yield ""
    yield "| state | the table | recorded | after a crash |"
    yield "|---|---|---|---|"
    for phase in Phase:
        recorded = "in memory only" if phase in IN_MEMORY_ONLY else "yes"
        yield f"| `{_NAMES[phase]}` | {_MEANING[phase]} | {recorded} | {_after_crash(phase)} |"


def _after_crash(phase: Phase) -> str:
    after = AFTER_CRASH[phase]
    if after is not phase:
        return f"`{_NAMES[after]}`: copied again"
    if phase is Phase.INIT:
        return f"`{_NAMES[after]}`: copied"
    return f"stays `{_NAMES[after]}`"


def _actors() -> Iterator[str]:
    yield "## Who may do what"
    yield ""
    yield "| who | from | to |"
    yield "|---|---|---|"
    for actor in Actor:
        if actor in FROM_EVERY_STATE:
            yield f"| {actor.value} | every state | {_targets_everywhere(actor)} |"
            continue
        for source in Phase:
            targets = TRANSITIONS.get((source, actor))
            if targets:
                names = ", ".join(f"`{_NAMES[phase]}`" for phase in Phase if phase in targets)
                yield f"| {actor.value} | `{_NAMES[source]}` | {names} |"


def _targets_everywhere(actor: Actor) -> str:
    """One cell for who may do the same in every state; a table of states that says otherwise needs another page."""
    targets = {TRANSITIONS[phase, actor] for phase in Phase}
    (same,) = targets
    return ", ".join(f"`{_NAMES[phase]}`" for phase in Phase if phase in same)


def main() -> None:
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
