"""Devices that tests simulate: memory of the CPU under the name `sim`, with limits, counted copies and a clock."""
