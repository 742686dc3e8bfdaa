"""Engines: what can run a (solver, backend) pair on a device, and the table that says so."""
