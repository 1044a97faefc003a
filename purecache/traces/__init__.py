"""Replay of recorded workloads through a cache: `purecache trace`. docs/sizing.md."""
