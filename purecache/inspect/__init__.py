"""`purecache inspect`: what is in a snapshot, or in the cache of a running process."""
