"""A report of a recording: everything is repeated, and looked at on the way."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from purecache.replay.digests import code_digest
from purecache.replay.player import Player
from purecache.replay.recording import Recording
from purecache.report.model import Report, Transfer
from purecache.report.prefixes import label_of_tokens, prefixes_of
from purecache.report.readings import counters_of, found_of, settings_of, stocks_of
from purecache.report.watch import Watch
from purecache.transitions import Status

SAMPLES = 240
"""Samples of a report, about."""
MOST_TRANSFERS = 100_000
"""Transfers that are kept."""

Progress = Callable[[int], object]


def report_of_recording(
    recording: Recording,
    *,
    samples: int = SAMPLES,
    made: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Replay a recording to its end and report on it. Time is the number of the event.

    samples: how many are taken, about. made: what to say of how it was made. `progress(count)` after events.
    Raises Unusable where the recording makes no sense.
    """
    player, config = Player(recording, kept_bytes=1), recording.config  # it never goes back
    gap = max(1, len(recording) // max(1, samples))
    watch = Watch(config)
    at, books = [0.0], [player.array("books")]
    transfers: list[Transfer] = []
    seen, different = 0, 0
    answers: dict[str, Counter[str]] = {}
    while player.at < len(recording):
        different += not player.forward()
        now = player.array("books")
        for each in watch.look(player.at, now, lambda: player.array("ledger")):
            seen += 1
            if len(transfers) < MOST_TRANSFERS:
                transfers.append(each)
        _count(answers, player)
        if player.at % gap == 0 or player.at == len(recording):
            at.append(float(player.at))
            books.append(now)
        if progress is not None:
            progress(1)
    state = player.state
    return Report(
        source="recording",
        title=Path(recording.path).name,
        axis="event",
        at=tuple(at),
        page_size=config.page_size,
        stocks=stocks_of(config, books),
        found=found_of(config, books),
        counters=counters_of(books),
        transfers=(*transfers, *watch.open()),
        transfers_left_out=seen - len(transfers),
        prefixes=prefixes_of(state, config, label_of_tokens(state, config, hashed=recording.hashed)),
        answers={name: dict(counts) for name, counts in sorted(answers.items())},
        settings=settings_of(config),
        made=dict(made or {}) | {f"recorded with {name}": version for name, version in recording.versions.items()},
        notes=tuple(_notes(recording, different)),
    )


def _count(answers: dict[str, Counter[str]], player: Player) -> None:
    """Take note of what the last event answered."""
    event, answer = player.event, player.answer()
    assert event is not None
    assert answer is not None
    reply = answer[1]
    reply = getattr(reply, "locked", reply)
    status = getattr(reply, "status", None)
    name = "OK" if status is None else Status(int(status)).name
    answers.setdefault(event.name, Counter())[name.lower().replace("_", " ")] += 1


def _notes(recording: Recording, different: int) -> list[str]:
    notes = []
    if recording.damage:
        notes.append(f"The file is damaged: {recording.damage}. What stands before is shown.")
    elif recording.end is None:
        notes.append("The recording has no end: its process died, or goes on.")
    if (recording.end or {}).get("stopped"):
        notes.append(f"The recording stopped early: {(recording.end or {})['stopped']}.")
    if different:
        code = "" if recording.code == code_digest() else ", which is of other code"
        notes.append(f"{different} answers of the replay differ from those of the recording{code}: this is the replay.")
    if recording.hashed:
        notes.append("Prompts were hashed when this was recorded: prefixes have names, not tokens.")
    return notes
