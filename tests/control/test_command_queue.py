"""Commands of other threads."""

import threading

import pytest
from controlled import plain_cache, ticking

from purecache.control import Commands, TooLateError
from purecache.control.commands import QUEUE


class Clockwork:
    """Stands for a cache: what a queue needs of it."""

    class _driver:
        plane = None

    def __init__(self):
        self.observers = []

    def observe(self, observer):
        self.observers.append(observer)

    def unobserve(self, observer):
        self.observers.remove(observer)

    def tick(self):
        for observer in list(self.observers):
            observer.ticked(self)


def asking(commands, command, timeout=30.0):
    """Ask on another thread; returns a function that waits for the answer."""
    found = []

    def ask():
        try:
            found.append(commands.ask(command, timeout))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not commands._waiting and thread.is_alive():
        pass

    def answer():
        thread.join(60)
        return found[0]

    return answer


def test_a_command_runs_on_the_thread_that_ticks():
    cache = plain_cache()
    commands = Commands(cache)
    with ticking(cache):
        there = commands.ask(lambda cache: threading.get_ident(), 60)
    assert there != threading.get_ident()
    commands.close()


def test_what_a_command_raises_goes_to_who_asked_and_the_next_ones_go_on():
    cache = Clockwork()
    commands = Commands(cache)
    answer = asking(commands, lambda cache: 1 // 0)
    cache.tick()
    assert isinstance(answer(), ZeroDivisionError)
    answer = asking(commands, lambda cache: 7)
    cache.tick()
    assert answer() == 7


def test_a_command_in_parts_takes_a_tick_for_each():
    cache, parts = Clockwork(), []

    def work(cache):
        for part in range(3):
            parts.append(part)
            yield
        return "done"

    commands = Commands(cache)
    answer = asking(commands, work)
    for ticks in range(1, 4):
        cache.tick()
        assert len(parts) == ticks
    cache.tick()
    assert answer() == "done"


def test_a_command_that_nobody_waits_for_any_more_is_not_begun():
    cache, done = Clockwork(), []
    commands = Commands(cache)
    with pytest.raises(TooLateError, match="does it tick"):
        commands.ask(lambda cache: done.append(1), 0.01)
    cache.tick()
    assert done == []


def test_a_command_in_parts_that_nobody_waits_for_any_more_is_broken_off():
    cache, ended = Clockwork(), []

    def work(cache):
        try:
            while True:
                yield
        finally:
            ended.append(1)

    commands = Commands(cache)
    answer = asking(commands, work, timeout=0.2)
    cache.tick()
    assert isinstance(answer(), TooLateError)
    cache.tick()
    assert ended == [1]


def test_no_more_commands_wait_than_the_queue_holds():
    commands = Commands(Clockwork())
    for _ in range(QUEUE):
        with pytest.raises(TooLateError, match="has not answered"):
            commands.ask(lambda cache: None, 0)
    with pytest.raises(TooLateError, match="wait already"):
        commands.ask(lambda cache: None, 0)


def test_after_closing_nothing_is_taken_and_what_waits_is_told():
    cache = Clockwork()
    commands = Commands(cache)
    answer = asking(commands, lambda cache: 7)
    commands.close()
    commands.close()
    assert isinstance(answer(), TooLateError)
    assert cache.observers == []
    with pytest.raises(TooLateError, match="no commands"):
        commands.ask(lambda cache: 7, 1)
