from __future__ import annotations

from pathlib import Path

from headwater.states import FROM_EVERY_STATE, TRANSITIONS, Phase
from headwater.states_diagram import page

DOCUMENT = Path(__file__).parents[2] / "docs" / "table-states.md"


def test_the_page_of_table_states_is_what_the_table_says() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == page(), (
        "run: python -m headwater.states_diagram docs/table-states.md"
    )


def test_every_transition_of_a_worker_is_drawn_once() -> None:
    arrows = [line for line in page().splitlines() if " --> " in line and "[*]" not in line]
    workers = {key: targets for key, targets in TRANSITIONS.items() if key[1] not in FROM_EVERY_STATE}
    pairs = {(source, target) for (source, _), targets in workers.items() for target in targets}
    assert len(arrows) == len(pairs)
    assert sum(len(line.split(": ")[1].split(", ")) for line in arrows) == sum(map(len, workers.values()))
    assert all(any(line.split()[0].lower() == phase.value.replace("_", "") for line in arrows) for phase in Phase)
