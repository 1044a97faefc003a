"""Tokens, salts and credentials: in no log, warning, error or repr."""

import logging
import socket
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from support import new_cache, serve, tiny
from tiers import OBJECT, RECORD, attached, emptied, prefetched, stored

from purecache.answers import CacheError
from purecache.inputs import as_int32
from purecache.namespaces import namespace_digest
from purecache.state import CacheConfig
from purecache.stores.guard import Guard, Kind, Request
from purecache.stores.local import LocalStore
from purecache.stores.registry import open_store

SALT = "salt-of-tenant-seven"
TOKENS = [7654321, 7654322, 7654323, 7654324]
SPACE = (("salt", SALT), ("adapter", "a"))


def texts_of(*values):
    """What a log would have of them: reprs, texts, and those of all causes of an error."""
    found = []
    for value in values:
        while value is not None:
            found += [repr(value), str(value)]
            value = (value.__cause__ or value.__context__) if isinstance(value, BaseException) else None
    return "\n".join(found)


def is_silent(text):
    return SALT not in text and not any(str(token) in text for token in TOKENS)


def test_nothing_of_a_prompt_is_logged(tmp_path, caplog):
    """A whole life with all loggers at DEBUG: storing, prefetching, a store that breaks, errors of the caller."""
    caplog.set_level(logging.DEBUG, "purecache")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        store = LocalStore(tmp_path, OBJECT, 64 * 4096)
        cache, tier, _ = attached(store)
        stored(cache, tier, TOKENS, namespace=SPACE)
        emptied(cache)
        prefetch = tier.prefetch(TOKENS, namespace=SPACE)
        assert prefetched(tier, cache, TOKENS, namespace=SPACE) == 4 or prefetch.loaded == 4
        for path in tmp_path.glob("index-*/data.mdb"):
            path.unlink()
        emptied(cache)
        assert prefetched(tier, cache, TOKENS, namespace=SPACE) == 0
        answers = [cache.match(TOKENS, namespace=SPACE), prefetch, store, tier, tier.guard, tier.guard.last_error]
        answers += [cache, cache._driver, cache._inputs, tier._keys, Request(Kind.EXISTS, 1, ["k"]), RECORD]
        tier.detach()
    text = "\n".join([caplog.text, *(str(each.message) for each in warned), texts_of(*answers)])
    assert "a local store failed" in text  # so that something was logged
    assert is_silent(text)


def test_errors_of_a_caller_tell_nothing_of_its_prompt():
    cache, _ = new_cache(tiny(), check_laws=False)
    done = serve(cache, TOKENS, namespace=SPACE)
    _, receipt = cache.admit(TOKENS, namespace=SPACE)
    cache.abort([], receipt)
    for error, call in (
        (CacheError, lambda: cache.insert(TOKENS, done.pages[:1], namespace=SPACE)),
        (CacheError, lambda: cache.insert(TOKENS, np.array([7, 7]), namespace=SPACE)),
        (CacheError, lambda: cache.match(TOKENS, namespace=SPACE, rank=99)),
        (CacheError, lambda: cache.finish(TOKENS, done.pages, receipt, namespace=SPACE)),
        (ValueError, lambda: as_int32([TOKENS, TOKENS])),
        (ValueError, lambda: as_int32([*TOKENS, 2**40])),
        (TypeError, lambda: namespace_digest(({"salt": SALT},))),
    ):
        with pytest.raises(error) as caught:
            call()
        assert is_silent(texts_of(caught.value))
    emptied(cache)


SECRET = "Jhsecret+key/value"
KEYS = {"access_key_id": "AKIAIDIDID", "secret_access_key": SECRET, "region": "none"}


def test_credentials_of_an_object_store_are_told_nobody(caplog, capfd):
    """With a server that isn't there: all errors, logs and reprs of the store and of the guard around it."""
    caplog.set_level(logging.DEBUG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    store = open_store("s3://bucket/path", 128, endpoint=address, retries=0, **KEYS)
    guard = Guard(store)
    buffer = memoryview(bytearray(128))
    for number, (kind, buffers) in enumerate(((Kind.EXISTS, []), (Kind.GET, [buffer]), (Kind.PUT, [buffer]))):
        assert guard.start(Request(kind, number, ["key"], buffers))
        assert guard.wait(20)
        assert guard.poll()
    store.clear()
    assert guard.close(20)
    text = "\n".join([caplog.text, *capfd.readouterr(), texts_of(guard, store, guard.last_error, store.stats())])
    assert "could not remove all objects" in text
    assert SECRET not in text


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIAIDIDID:{SECRET.replace('/', '')}@bucket/path",
        f"s3://AKIAIDIDID:{SECRET.replace('/', '')}@bucket/path?concurrency=none",
        f"redis://user:{SECRET.replace('/', '')}@host/0",
        f"file://user:{SECRET.replace('/', '')}@host/path?capacity=1MiB",
        f"local://user:{SECRET.replace('/', '')}@/path",
        f"gs://:{SECRET.replace('/', '')}@/",
    ],
)
def test_a_password_in_a_url_is_in_no_error(url):
    with pytest.raises((ValueError, ImportError)) as caught:
        open_store(url, 256)
    assert SECRET.replace("/", "") not in texts_of(caught.value)


def test_a_configuration_does_not_show_its_seed():
    assert "918273645" not in repr(CacheConfig(page_size=1, device_pages=1, seed=918273645))
