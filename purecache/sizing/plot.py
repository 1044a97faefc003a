"""A sweep as a picture. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purecache.sizing.advice import Knee
from purecache.sizing.sweep import TIERS, Sized

COLOURS = {"device": "#1b6ca8", "host": "#5fa55a", "disk": "#c98b2b"}


def write_plot(
    path: str | Path, title: str, capacities: np.ndarray, rates: np.ndarray, rows: Sequence[Sized], knee: Knee,
    page_bytes: float,
) -> None:  # fmt: skip
    """Write a PNG: the curve of LRU with the runs as points, and what every configuration saves, by tier."""
    from matplotlib.figure import Figure  # optional dependency, and slow to import

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    _curve(left, capacities, rates, rows, knee, page_bytes / 1e9)
    _bars(right, rows, page_bytes / 1e9)
    figure.savefig(path, dpi=120)


def _curve(
    axes: Any, capacities: np.ndarray, rates: np.ndarray, rows: Sequence[Sized], knee: Knee, size: float
) -> None:
    axes.plot(capacities * size, rates, color="black", label="LRU, from stack distances")
    for policy in sorted({row.policy for row in rows}):
        points = {(max(row.device_pages, row.host_pages), row.rates["device"] + row.rates["host"]) for row in rows
                  if row.policy == policy}  # fmt: skip
        axes.plot(*np.array([(pages * size, rate) for pages, rate in sorted(points)]).T, "o", label=policy, alpha=0.7)
    axes.axvline(knee.pages * size, color="grey", linestyle=":", label=f"knee: {knee.pages * size:,.0f} GB")
    axes.set(xscale="log", xlabel="GB of device or host, the larger one", ylabel="share of prompt tokens found there")
    axes.set_ylim(bottom=0)
    axes.legend()


def _bars(axes: Any, rows: Sequence[Sized], size: float) -> None:
    names = [
        " / ".join(f"{pages * size:,.0f}" for pages in (row.device_pages, row.host_pages, row.disk_pages) if pages)
        + f" {row.policy}" + ("" if row.write == "write_through" else f" {row.write}")
        for row in rows
    ]  # fmt: skip
    left = np.zeros(len(rows))
    for tier in TIERS:
        saved = np.array([max(row.saved[tier], 0) for row in rows])
        axes.barh(names, saved, left=left, color=COLOURS[tier], label=tier)
        left += saved
    axes.invert_yaxis()
    axes.set(xlabel="seconds of prefill saved (model)", title="GB of device / host / disk, policy")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend()
