"""Let the search find pages by the words that users have for them, beside those of their titles and headings.

`search_words.yaml` has these words; the theme keeps them in the index as a page's tags, and shows them nowhere.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

WORDS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "search_words.yaml").read_text())


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give a page its words."""
    words = WORDS.get(page.file.src_uri.removesuffix(".md"))
    if words:
        page.meta["tags"] = [word.strip() for word in words.split(",")]
    return markdown
