"""This process among others: environment, devices, collectives, seeds, logging."""
