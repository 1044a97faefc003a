"""`purecache doctor`: what this machine has for the data plane, how fast its paths are, and what to choose."""
