"""A small HTTP server for the operator of one process: see docs/control.md. Needs the extra `admin`."""
