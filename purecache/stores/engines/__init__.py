"""Stores in engines that several machines share. Each module needs a package of its own: see docs/stores.md.

A module has a class that is a `Store`, and `open_url(address, object_bytes, options)`, which makes one from a URL.
"""
