"""What an operator may do with a running cache: commands from other threads, pins with leases, sessions, sizes."""

from purecache.control.commands import Commands, TooLateError
from purecache.control.operator import MISTAKES, ControlError, Operator
from purecache.control.pins import Pin, PinError, Pins
from purecache.control.sizes import Sizes
from purecache.control.storages import PlainStorages, Storages

__all__ = [
    "MISTAKES",
    "Commands",
    "ControlError",
    "Operator",
    "Pin",
    "PinError",
    "Pins",
    "PlainStorages",
    "Sizes",
    "Storages",
    "TooLateError",
]
