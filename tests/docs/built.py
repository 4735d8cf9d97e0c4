"""Reads pages of the built manual."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

# Elements that make a browser fetch something by itself, and the attribute that names it.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}


@dataclass
class BuiltPage(HTMLParser):
    """One page.

    Attributes:
        ids: What links can lead to.
        links: Where its links lead.
        fetched: What a browser fetches for it.
        code: The texts of code within lines.
    """

    html: str
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    code: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._code: str | None = None
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("id", "name"):
            if given.get(name) and (name == "id" or tag == "a"):
                self.ids.add(str(given[name]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in FETCHED and given.get(FETCHED[tag]):
            self.fetched.append(str(given[FETCHED[tag]]))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.fetched.append(str(given.get("href")))
        if tag == "code":
            self._code = ""

    def handle_data(self, data: str) -> None:
        if self._code is not None:
            self._code += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "code" and self._code is not None:
            self.code.add(self._code)
            self._code = None


@cache
def read_page(path: Path) -> BuiltPage:
    return BuiltPage(path.read_text(encoding="utf-8"))


def page_of(site: Path, name: str) -> BuiltPage:
    """A page by its name in the navigation's file, without `.md`."""
    folder = site if name == "index" else site / name.removesuffix("/index")
    return read_page(folder / "index.html")


def pages_in(folder: Path) -> dict[Path, BuiltPage]:
    return {path: read_page(path) for path in sorted(folder.rglob("*.html"))}
