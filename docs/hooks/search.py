"""Let the search find pages by the words that users have for them, and arguments, flags and keys by their names.

`search_words.yaml` has the words; the theme keeps them in the index as a page's tags, and shows them nowhere.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from reference import BOOST

WORDS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "search_words.yaml").read_text())

# The search splits names at `_` and leaves out words such as `on` and `every`. Each name of the reference is therefore
# a tag in one piece too, for which search_words.js asks: `valcheckinterval`, and `flagcpu` for `--cpu`.
# Several classes have arguments of the same name: those that users look for most rank first.
ARGUMENT = re.compile(r"#drivetrain\.(?:[\w.]+\.)?(\w+)\(\w+\)$")
BOOSTS = {"Trainer": 2.0, "Accelerator": 1.5, "ModelCheckpoint": 1.2, "EarlyStopping": 1.2}

# Terms of the lists that tables.py writes: `<dt><span id="launch--cpu"></span><code>--cpu</code></dt>`.
TERM = re.compile(r'<dt><span id="([^"]+)"></span>(.*?)</dt>\n((?:<dd>.*?</dd>\n?)+)', re.DOTALL)
_terms: list[dict[str, object]] = []


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give a page its words."""
    words = WORDS.get(page.file.src_uri.removesuffix(".md"))
    if words:
        page.meta["tags"] = [word.strip() for word in words.split(",")]
    return markdown


def whole(name: str) -> str:
    """Return a name in one piece, as search_words.js writes it into queries."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Collect the terms of the page's lists, of which the theme's search has no entries."""
    for anchor, term, meaning in TERM.findall(html):
        text = " ".join(re.sub(r"<[^>]+>", "", meaning).split())
        title = re.sub(r"<[^>]+>", "", term)
        names = [name for name in re.findall(r"[\w-]+", title) if "_" in name or name.startswith("--")]
        tags = [("flag" if name.startswith("--") else "") + whole(name) for name in names]
        boost = BOOST if anchor.startswith("launch--") else BOOST / 2
        _terms.append({"location": f"{page.url}#{anchor}", "title": title, "text": text, "tags": tags, "boost": boost})
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Add the terms and whole names to the index, and rank arguments."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        _, is_described, path_of = entry["location"].partition("#drivetrain.")
        if is_described:
            entry["tags"] = [whole(re.split(r"[.(]", path_of)[-1])]
        if found := ARGUMENT.search(entry["location"]):
            entry["boost"] = BOOSTS.get(found[1], entry.get("boost", 1.0))
    index["docs"] += _terms
    _terms.clear()  # `mkdocs serve` builds again in this process
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
