"""A testbed to play with: ``python -m tests.testbed up --hosts 2 --rate 1gbit``, and ``down`` when done."""

from __future__ import annotations

import argparse
import sys

from benchmarks.devices.testbed import RATES, Testbed, TestbedError, remove, unavailable

NAME = "bed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description=__doc__)
    parser.add_argument("what", choices=["up", "down"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", choices=list(RATES), default="1gbit")
    options = parser.parse_args(arguments)
    why = unavailable()
    if why:
        sys.stderr.write(f"no testbed: {why}\n")
        return 1
    if options.what == "down":
        remove(f"halopipe-{NAME}")
        return 0
    try:
        testbed = Testbed.build(options.hosts, RATES[options.rate], NAME)
    except TestbedError as error:
        sys.stderr.write(f"no testbed: {error}\n")
        return 1
    for host in testbed.hosts:
        sys.stdout.write(f"{host.name}  {host.address}  ip netns exec {host.name} COMMAND\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
