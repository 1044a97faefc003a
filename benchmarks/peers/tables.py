"""Tables of what was measured."""

from typing import Any

from benchmarks.peers.replay import PHASES


def workload_table(about: dict[str, Any], found: dict[str, dict[str, Any]], exact: float | None, ours: str) -> None:
    """Print one workload: microseconds per request by peer, the ratio of ours to each, phases, hit rate."""
    print(
        f"\n{about['workload']}: {about['requests']} requests of {about['mean_prompt']:,.0f} prompt tokens"
        f" after {about['filling']} that fill; {about['capacity']:,} tokens; {about['origin']}"
    )
    phases = "".join(f"{phase:>9}" for phase in PHASES)
    print(
        f"{'peer':20}{'tokens':>11}{'us/req':>9}{'median':>9}{'ours/it':>9}{phases}{'p50':>9}{'p99':>9}{'max':>9}{'hit':>8}"
    )
    own = found.get(ours)
    for name, row in found.items():
        ratio = f"{own['us'] / row['us']:.2f}" if own else ""
        each = "".join(f"{row['phases'][phase]:9.1f}" for phase in PHASES)
        note = "" if row["complete"] else f"  only {row['requests']} requests"
        print(
            f"{name:20}{row['form']:>11}{row['us']:9.1f}{row['us_median']:9.1f}{ratio:>9}{each}"
            f"{row['p50']:9.1f}{row['p99']:9.0f}{row['max']:9.0f}{row['hit_rate']:8.4f}{note}"
        )
    if exact is not None:
        print(f"{'exact page LRU':20}{'':>11}{'':9}{'':9}{'':>9}{'':{9 * len(PHASES) + 27}}{exact:8.4f}")
    print(flush=True)


def call_table(title: str, found: dict[str, list[list[dict[str, Any]]]], keys: tuple[str, ...], value: str) -> None:
    """Print rows that peers share: one line per row, one column per peer, the least of all rounds."""
    print(f"\n{title}")
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for peer, rounds in found.items():
        for row in (row for rows in rounds for row in rows):
            line = lines.setdefault(tuple(row[key] for key in keys), {})
            line[peer] = min(line.get(peer, float("inf")), row[value])
    print(f"{' / '.join(keys):34}" + "".join(f"{peer:>18}" for peer in found))
    for line, values in lines.items():
        cells = "".join(f"{values[peer]:18.1f}" if peer in values else f"{'':18}" for peer in found)
        print(f"{' / '.join(map(str, line)):34}{cells}")
    print(flush=True)
