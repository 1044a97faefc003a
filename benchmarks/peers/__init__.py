"""`python -m benchmarks.peers`: this project's control plane beside the prefix caches of other projects."""
