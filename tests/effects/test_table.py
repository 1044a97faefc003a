"""Which programs a pool gets, and which it may ask for."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from purecache.effects import Interpreter
from purecache.effects.pools import describe
from purecache.effects.table import ROUTES, STAGED, choose, trouble


def layout(platform, *, shards=(), dtype=jnp.bfloat16, shape=(16, 8, 256)):
    found = describe(jnp.zeros(shape, dtype), 0, shape[0])
    return replace(found, platform=platform, shards=shards)


@pytest.mark.parametrize(
    ("platform", "shards", "form", "programs"),
    [
        ("cpu", (), "slots", "loop"),
        ("cpu", ("data",), "slots", "loop"),
        ("tpu", (), "arrays", "dma"),
        ("tpu", ("data",), "slots", "loop"),
        ("cuda", (), "arrays", "fused"),
        ("rocm", (), "arrays", "fused"),
        ("gpu", ("data",), "slots", "loop"),
        ("another", (), "slots", "loop"),
    ],
)
def test_every_platform_has_a_default(platform, shards, form, programs):
    route = choose(layout(platform, shards=shards))
    assert (route.form, route.programs) == (form, programs)
    assert route.staged == (programs in STAGED)


def test_programs_can_be_chosen():
    assert choose(layout("tpu"), form="slots").programs == "loop"
    assert choose(layout("tpu"), programs="fused").form == "arrays"
    assert choose(layout("cpu"), form="arrays").programs == "unrolled"
    assert choose(layout("tpu", dtype=jnp.int32), programs="host_dma").form == "slots"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"form": "shared"}, "host_form is 'shared', expected one of slots, arrays"),
        ({"programs": "dma"}, "no programs for host_form any and copies dma on cpu: there are slots by loop"),
        ({"form": "slots", "programs": "fused"}, "host_form slots and copies fused on cpu"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(asked, message):
    with pytest.raises(ValueError, match=message):
        choose(layout("cpu"), **asked)


def test_shapes_that_a_kernel_copies_whole_get_other_programs_or_a_warning(monkeypatch):
    turned, hopeless = layout("tpu", shape=(512, 128, 64)), layout("tpu", shape=(512, 16, 8, 64))
    dma = next(row for row in ROUTES if (row.platform, row.programs) == ("tpu", "dma"))
    assert "allocate it as [pages, " in trouble(turned, dma)
    assert choose(turned).programs == "fused"
    assert choose(turned, programs="dma") is dma
    assert choose(hopeless) is dma
    assert "allocate it as [pages, " in trouble(hopeless, dma)
    assert trouble(layout("cuda", shape=(512, 16, 8, 64)), dma) is None
    monkeypatch.setattr("purecache.effects.interpreter.trouble", lambda layout, route: "it copies the whole pool")
    with pytest.warns(RuntimeWarning, match="it copies the whole pool"):
        Interpreter(jnp.zeros((8, 4)), host_pages=4, device_pages=8)


def test_rows_that_do_not_fit_a_pool_are_marked():
    with pytest.raises(ValueError, match=r"arrays by fused \(not for this pool\)"):
        choose(layout("cpu", shards=("data",)), programs="fused")


def test_an_interpreter_takes_the_row_that_it_is_told():
    plane = Interpreter(jnp.zeros((8, 4)), host_pages=4, device_pages=8, copies="fused")
    assert (plane.route.form, plane.route.programs) == ("arrays", "fused")


def test_no_row_is_unreachable_or_claims_to_have_run_elsewhere():
    for row in ROUTES:
        assert (row.platform == "cpu") == (row.standing == "measured")
        assert (
            len([r for r in ROUTES if (r.platform, r.form, r.programs) == (row.platform, row.form, row.programs)]) == 1
        )
