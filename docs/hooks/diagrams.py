"""Draw Mermaid diagrams while the documentation is built, so that pages need no script from another host.

mermaidx runs Mermaid itself in a small JavaScript engine. Where it is not installed, the theme draws the diagrams in
the reader's browser, with a Mermaid that it fetches from unpkg.com.
"""

from __future__ import annotations

import base64
import html
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from pymdownx.superfences import SuperFencesException, fence_code_format

# The theme of Mermaid's for each of the site's two palettes; the site shows the picture of the palette in use.
THEMES = {"only-light": "default", "only-dark": "dark"}


def draw(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **more: Any) -> str:
    """Turn a fence into pictures, one for each palette. Its first `accDescr:` line describes them."""
    try:
        import mermaidx
    except ModuleNotFoundError:
        return str(fence_code_format(source, language, css_class, options, md, **more))
    described = next((line.partition(":")[2].strip() for line in source.splitlines() if "accDescr:" in line), "Diagram")
    pictures = []
    for shown, theme in THEMES.items():
        try:
            picture = mermaidx.render(f'%%{{init: {{"theme": "{theme}"}}}}%%\n{source}').svg()
        except RuntimeError as error:
            raise SuperFencesException(f"A diagram cannot be drawn: {error}\n{source}") from error
        encoded = base64.b64encode(picture.encode()).decode()
        address = f"data:image/svg+xml;base64,{encoded}#{shown}"
        pictures.append(f'<img alt="{html.escape(described)}" src="{address}">')
    return f"<p>{''.join(pictures)}</p>"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let fences of `mermaid` be drawn."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "mermaid", "class": "mermaid", "format": draw})
    return config
