"""`make bench`: ratios, measured in one run beside the limit and the peers. Seconds depend on the machine, ratios less so."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from benchmarks import beside_copy, copy, drain, freshness, hand_off, look, memory, ready, wide
from benchmarks.setting import setting

# Memory first: what the others leave behind in this process would count as its own.
BENCHMARKS = {
    "memory": memory.run,
    "ready": ready.run,
    "look": look.run,
    "freshness": freshness.run,
    "beside_copy": beside_copy.run,
    "hand_off": hand_off.run,
    "wide": wide.run,
    "drain": drain.run,
    "copy": copy.run,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"error: no benchmark {', '.join(unknown)}\nhint: choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    table = Table("what", "measured", "ratio", "mark", "", box=None)
    failed = False
    with setting() as stage:
        for name in names or list(BENCHMARKS):
            print(f"running {name} ...", file=sys.stderr, flush=True)
            for figure in BENCHMARKS[name](stage):
                verdict = "" if figure.met is None else "met" if figure.met else "missed"
                failed = failed or figure.met is False
                table.add_row(figure.what, figure.value, figure.ratio, figure.mark, verdict)
    Console(width=max(120, Console().width)).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
