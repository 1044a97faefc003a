"""Pins: leases, bounds, and that they end."""

import pytest
from controlled import AB, ABC, A, D, plain_cache, run

from purecache.control import PinError, Pins


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def pinned(*prompts, share=0.5, **options):
    cache, clock = plain_cache(*prompts), Clock()
    return cache, Pins(cache, share=share, clock=clock, **options), clock


def test_a_pinned_prefix_stays_until_its_lease_is_over():
    cache, pins, clock = pinned(AB, D)
    pin = pins.pin(AB, 10, name="system prompt")
    assert (pin.pages, pin.device_pages, pin.seconds_left) == (2, 2, 10)
    assert cache.evict(9) == 1
    assert cache.peek(AB).device_length == 4
    clock.now += 9
    cache.tick()
    assert [each.seconds_left for each in pins.pins()] == [1]
    clock.now += 1
    cache.tick()
    assert pins.pins() == []
    assert cache.evict(9) == 2


def test_a_lease_is_renewed_or_ended_before_its_time():
    cache, pins, clock = pinned(AB)
    name = pins.pin(AB, 10).name
    assert pins.renew(name, 60).seconds_left == 60
    clock.now += 59
    cache.tick()
    pins.release(name)
    assert cache.protected_pages() == 0
    for call in (lambda: pins.release(name), lambda: pins.renew(name, 1)):
        with pytest.raises(PinError, match="there is no pin 'pin-1'"):
            call()


def test_a_pin_of_the_same_name_moves():
    cache, pins, _ = pinned(AB, D)
    pins.pin(D, 10, name="x")
    pins.pin(A, 10, name="x")
    assert cache.protected_pages() == 1
    assert [pin.name for pin in pins.pins()] == ["x"]


def test_pins_have_bounds():
    cache, pins, _ = pinned(ABC, D, share=0.4, most=2)  # three pages of eight
    pins.pin(ABC, 10)
    pins.pin(AB, 10)  # the same pages once more
    with pytest.raises(PinError, match="there are 2 pins"):
        pins.pin(D, 10)
    pins.release("pin-2")
    with pytest.raises(PinError, match="3 pages of rank 0 on device, with this one they would hold 4"):
        pins.pin(D, 10)
    for seconds in (0, -1, 1e9, float("nan")):
        with pytest.raises(PinError, match="a lease is"):
            pins.pin(AB, seconds)
    with pytest.raises(PinError, match="nothing of this prompt"):
        pins.pin([9, 9], 10)
    cache.resize(device_pages=4)
    with pytest.raises(PinError, match="1 pages of rank 0"):
        pins.pin(ABC, 10, name="pin-1")
    assert cache.protected_pages() == 3


def test_what_only_host_has_is_held_there():
    cache, pins, _ = pinned(AB, D)
    cache.evict(9)
    pins.pin(AB, 10)
    assert cache.evict_host(9) == 1
    assert cache.peek(AB).length == 4


def test_a_reset_ends_all_pins():
    cache, pins, _ = pinned(AB)
    pins.pin(AB, 10, name="x")
    cache.reset()
    run(cache, D)
    assert pins.pins() == []
    pins.pin(D, 10, name="x")
    assert cache.protected_pages() == 1


def test_closing_ends_them_too():
    cache, pins, _ = pinned(AB)
    pins.pin(AB, 10)
    pins.close()
    cache.tick()
    assert cache.protected_pages() == 0


@pytest.mark.parametrize("options", [{"share": 0}, {"share": 2}, {"longest": 0}, {"most": 0}])
def test_bounds_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="share must be"):
        Pins(plain_cache(), **options)
