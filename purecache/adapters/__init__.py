"""Adapters: purecache in the place of the prefix caches of other projects' schedulers."""
