"""Tracebacks are printed as Python prints them; `rich` is not installed as their printer."""
