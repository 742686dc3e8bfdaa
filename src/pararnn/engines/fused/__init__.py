"""Engines whose whole solve is one generated kernel."""
