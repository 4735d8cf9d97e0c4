"""Definitions of the launch settings and their sources."""
