"""A router in a process of its own: follows the KV events of a publisher, and says on demand what it knows.

Arguments: endpoint, replay endpoint or "". Reads lines: `until N` waits until blocks N batches have been seen, `deaf`
and `hear` go off line and come back, `ask` asks for what there is, `quit`. Answers every line with one of JSON.
"""

import json
import sys
import time

from resident import folded

from purecache.events import Subscriber


def main(endpoint: str, replay: str) -> None:
    follower = Subscriber(endpoint, replay or None)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "quit":
            break
        if word == "deaf":
            follower._sub.disconnect(endpoint)
        elif word == "hear":
            follower._sub.connect(endpoint)
        elif word == "ask":
            follower.catch_up()
        elif word == "until":
            end = time.monotonic() + 30
            while follower._expected < int(rest[0]) and time.monotonic() < end:
                follower.receive(0.05)
        state = [[rank, medium, sorted(blocks.items())] for (rank, medium), blocks in folded(follower.fold).items()]
        print(json.dumps({"counts": follower.counts, "next": follower._expected, "blocks": state}), flush=True)
    follower.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
