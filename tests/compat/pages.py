"""What is generated into the pages of the documentation."""

from __future__ import annotations


def written(page: str, content: str, name: str = "table") -> str:
    """A page with one part of it as it is now.

    Args:
        page: The page.
        content: The part.
        name: What the comments before and after the part call it.
    """
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{content}\n\n{end}{after}"
