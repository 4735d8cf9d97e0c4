"""Write the manual for programs that read text: `llms.txt`, a list of the pages, and `llms-full.txt`, all in one.

The format of the list is that of https://llmstxt.org: a heading, a summary, links under the parts of the navigation.
The whole manual holds the written pages and the lists of the reference; classes and functions have their docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from public_api import INTERNAL, inherited, package

DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)

_pages: dict[str, str] = {}
_parts: dict[str, list[Page]] = {}


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Note the pages of each part."""
    _pages.clear()
    _parts.clear()
    for item in nav.items:
        title = str(item.title or "Home")
        _parts[title] = list(pages_of(item))
    return nav


def pages_of(item: object) -> list[Page]:
    """The pages of an entry of the navigation, in order."""
    if isinstance(item, Section):
        return [page for child in item.children for page in pages_of(child)]
    return [item] if isinstance(item, Page) else []


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the Markdown of a page, as the hooks before this one have left it."""
    text = re.sub(r"<!--.*?-->\n?|<(?:a|span) id=\"[^\"]*\"></(?:a|span)>", "", page.markdown or "", flags=re.DOTALL)
    _pages[page.file.src_uri] = DIRECTIVE.sub(lambda match: described(match[1]), text + "\n")
    return html


def described(path: str) -> str:
    """A name of the package as text: its signature, its docstring and, of a class, its members' first lines."""
    found = package()[path.removeprefix("drivetrain.")]
    found = found.final_target if isinstance(found, griffe.Alias) else found
    lines = [
        f"### {path}",
        "",
        f"```python\n{signature(found)}\n```",
        "",
        found.docstring.value if found.docstring else "",
        "",
    ]
    if isinstance(found, griffe.Class):
        left_out = INTERNAL.get(found.name, ())
        for name in [*found.members, *inherited(path)]:
            member = found.all_members[name]
            member = member.final_target if isinstance(member, griffe.Alias) else member
            if not name.startswith("_") and member.docstring and name not in left_out:
                lines.append(f"- `{signature(member)}`: {member.docstring.value.splitlines()[0]}")
        lines.append("")
    return "\n".join(lines)


def signature(found: griffe.Object) -> str:
    """How a function or class is called; the name of anything else."""
    function = found.all_members.get("__init__") if isinstance(found, griffe.Class) else found
    function = function.final_target if isinstance(function, griffe.Alias) else function
    if not isinstance(function, griffe.Function):
        return found.name
    taken = [str(each) for each in function.parameters if each.name not in ("self", "cls")]
    return f"{found.name}({', '.join(taken)})"


def summary(markdown: str) -> str:
    """The first sentence of a page."""
    paragraphs = re.split(r"\n\s*\n", markdown)
    for paragraph in paragraphs:
        if re.match(r"[A-Za-z`\[*]", paragraph):
            text = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.])\s", text)[0].rstrip(":")
    return ""


def on_post_build(config: MkDocsConfig) -> None:
    """Write both files."""
    base = config.site_url or ""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    whole = [f"# {config.site_name}", "", f"{config.site_description}", ""]
    for title, pages in _parts.items():
        lines += [f"## {title}", ""]
        for page in pages:
            markdown = _pages[page.file.src_uri]
            lines.append(f"- [{page.title}]({base}{page.url or './'}): {summary(markdown)}")
            whole += [f"<!-- page: {page.url or './'} -->", "", markdown.strip(), ""]
        lines.append("")
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")
