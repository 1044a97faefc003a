"""`python -m benchmarks`: prints what the control plane and the copies cost on this machine, with the aims beside."""

import argparse
import json
import os
import sys

import jax

from benchmarks import compiled, control, copies, device, observers, overlap, pools, recording, storage, stores


def main() -> None:
    """Run all tables; JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only, under a minute or two")
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    parser.add_argument(
        "--only",
        choices=[
            "control",
            "pools",
            "copies",
            "overlap",
            "storage",
            "stores",
            "recording",
            "observers",
            "device",
            "compiled",
        ],
        help="one of the tables",
    )
    parser.add_argument("--store", nargs="*", default=[], metavar="URL", help="stores for the table of that name")
    parser.add_argument(
        "--async-dispatch",
        action="store_true",
        help="leave JAX's asynchronous CPU dispatch on (a server that runs its model elsewhere switches it off)",
    )
    options = parser.parse_args()
    if not options.async_dispatch:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, jax {jax.__version__}", flush=True)
    found: dict[str, list[dict]] = {}
    if options.only in (None, "control"):
        found["control"] = []
        print("microseconds, minimum and median           page  tokens    nodes       min    median   aim")
        for row in control.rows(options.quick):
            found["control"].append(row)
            aim = control.AIMS.get((row["operation"], row["page"], row["tokens"]), "")
            print(
                f"{row['operation']:42} {row['page']:4} {row['tokens']:7} {row['nodes']:8}"
                f" {row['us_min']:9.1f} {row['us_median']:9.1f}   {aim}",
                flush=True,
            )
        capacity_ratios(found["control"])
    if options.only in (None, "pools"):
        found["pools"] = pools.report(options.quick)
    if options.only in (None, "copies"):
        found["copies"] = copies.report(options.quick)
    if options.only in (None, "overlap"):
        found["overlap"] = overlap.report(options.quick)
    if options.only in (None, "storage"):
        found["storage"] = storage.report()
    if options.only == "stores":
        found["stores"] = stores.report(options.store, options.quick)
    if options.only in (None, "recording"):
        found["recording"] = recording.report(options.quick)
    if options.only in (None, "observers"):
        found["observers"] = observers.report(options.quick)
    if options.only == "device":
        found["device"] = device.report(options.quick)
    if options.only == "compiled":
        found["compiled"] = compiled.report()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    sys.stdout.flush()


def capacity_ratios(rows: list[dict]) -> None:
    """Print cost at the largest capacity over cost at the smallest (aim: 1.5)."""
    names = dict.fromkeys(row["operation"] for row in rows)
    for name in names:
        same = [r for r in rows if r["operation"] == name and (r["page"], r["tokens"]) == (16, 4096)]
        if len({r["nodes"] for r in same}) > 1:
            low, high = min(same, key=lambda r: r["nodes"]), max(same, key=lambda r: r["nodes"])
            ratio = high["us_min"] / low["us_min"]
            print(f"{name}: {high['nodes']} nodes cost {ratio:.2f} times as much as {low['nodes']}", flush=True)


if __name__ == "__main__":
    main()
