"""`purecache replay --step`: a recording step by step, from the keyboard."""

import cmd
from typing import IO

from purecache.replay.player import Player
from purecache.replay.text import event_as_text, event_name, reply_as_text
from purecache.replay.tree import tree_as_text

COMMANDS = ("next", "back", "goto", "tree", "event", "laws", "help", "quit")


class Shell(cmd.Cmd):
    """Moves a player. Every command can be given as its first letters."""

    intro = "next, back, goto N, tree, event, laws, help, quit; an empty line repeats"

    def __init__(self, player: Player, stdin: IO[str] | None = None, stdout: IO[str] | None = None) -> None:
        """Reads from the terminal, or from `stdin`."""
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None
        self._player = player
        self._show_place()

    def _say(self, text: str) -> None:
        print(text, file=self.stdout)

    def _show_place(self) -> None:
        self.prompt = f"after event {self._player.at} of {len(self._player.recording)}> "

    def postcmd(self, stop: bool, line: str) -> bool:
        """Show where the player is."""
        self._show_place()
        return stop

    def precmd(self, line: str) -> str:
        """Take the beginning of a command for it."""
        word, _, rest = line.partition(" ")
        found = [name for name in COMMANDS if name.startswith(word)]
        return f"{found[0]} {rest}" if word and len(found) == 1 else line

    def default(self, line: str) -> None:
        """Not a command."""
        self._say(f"what is {line!r}? {self.intro}")

    def do_EOF(self, line: str) -> bool:
        """End of the input: leave."""
        self._say("")
        return True

    def _number(self, text: str, default: int | None) -> int | None:
        try:
            return int(text) if text.strip() else default
        except ValueError:
            return None

    def _move(self, to: int | None) -> None:
        if to is None or not 0 <= to <= len(self._player.recording):
            self._say(f"there are events 0 to {len(self._player.recording)}")
            return
        self._player.goto(to)
        event = self._player.event
        self._say(event_name(event) if event else "the empty cache")

    def do_next(self, line: str) -> None:
        """next [N]: carry out the next event, or the next N."""
        count = self._number(line, 1)
        self._move(None if count is None else self._player.at + count)

    def do_back(self, line: str) -> None:
        """back [N]: undo the last event, or the last N."""
        count = self._number(line, 1)
        self._move(None if count is None else self._player.at - count)

    def do_goto(self, line: str) -> None:
        """goto N: the state after event N."""
        self._move(self._number(line, None))

    def do_tree(self, line: str) -> None:
        """tree: the tree, the operations and the locks."""
        recording = self._player.recording
        self._say(tree_as_text(self._player.state, recording.config, hashed=recording.hashed))

    def do_event(self, line: str) -> None:
        """event: what the last event was, and what was answered."""
        event = self._player.event
        if event is None:
            self._say("the empty cache")
            return
        self._say(event_as_text(event, self._player.recording))
        self._say(reply_as_text(self._player.answer()))

    def do_laws(self, line: str) -> None:
        """laws: the laws that the state breaks."""
        self._say("\n".join(self._player.violations()) or "no law is broken")

    def do_quit(self, line: str) -> bool:
        """quit: leave."""
        return True
