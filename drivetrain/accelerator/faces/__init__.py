"""The members of `Accelerator` by topic, one class a file; parts of the engine do the work.

A face has no base class, no constructor and no state: it declares the parts that it forwards to, and each of its
members is one statement to one of them. So a topic may be added as a file and a line in `Accelerator`'s bases.
"""
