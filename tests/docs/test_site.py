"""The built manual as files: links lead somewhere, nothing is asked of other hosts, programs can read it whole."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.built import page_of, pages_in, read_page


def outside(links: list[str]) -> list[str]:
    return [link for link in links if urlsplit(link).scheme or link.startswith("//")]


def fault(link: str) -> str | None:
    """What is wrong with the shape of a link to another host; no host is asked."""
    parts = urlsplit(link)
    if parts.scheme in ("mailto", "data"):
        return None
    if parts.scheme != "https":
        return "is not https"
    host = parts.hostname or ""
    if "." not in host or re.fullmatch(r"[\d.]+", host) or host.endswith((".local", ".internal", ".example")):
        return "names no public host"
    if re.search(r"[\s<>`]|[.,;]$", link):
        return "holds what belongs to the text around it"
    return None


def test_links_to_other_hosts_have_a_sound_shape(site: Path) -> None:
    faults = {
        link: f"{path.relative_to(site)}: {fault(link)}"
        for path, page in pages_in(site).items()
        for link in outside(page.links)
        if fault(link)
    }
    assert faults == {}


@pytest.mark.parametrize(
    "link", ["http://pytorch.org", "https://localhost/x", "https://10.0.0.1/", "https://pytorch.org/docs.", "ftp://a.b"]
)
def test_an_unsound_link_is_found(link: str) -> None:
    assert fault(link)


def test_links_within_the_manual_lead_to_a_page_and_a_place_on_it(site: Path) -> None:
    broken = []
    for path, page in pages_in(site).items():
        if path.name == "404.html":  # its links are absolute, from wherever the site is served
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target.suffix == ".html":
                places = read_page(target).ids
                if unquote(parts.fragment) not in places and not parts.fragment.startswith("__"):
                    broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_pages_fetch_nothing_from_other_hosts(site: Path) -> None:
    fetched = {
        address: str(path.relative_to(site))
        for path, page in pages_in(site).items()
        for address in page.fetched
        if urlsplit(address).netloc
    }
    assert fetched == {}


def test_styles_fetch_nothing_from_other_hosts(site: Path) -> None:
    addresses = {
        address
        for path in site.rglob("*.css")
        for address in re.findall(r"url\(\s*['\"]?([^'\")]+)", path.read_text(encoding="utf-8"))
    }
    assert [address for address in addresses if urlsplit(address).netloc] == []


def test_every_page_leads_to_the_next(site: Path) -> None:
    pages = {path: page for path, page in pages_in(site).items() if path.name == "index.html"}
    last = [path for path, page in pages.items() if "md-footer__link--next" not in page.html]
    assert len(last) == 1, last


# for programs that read text


def test_llms_txt_lists_every_page_with_a_summary(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# drivetrain\n\n> ")
    listed = dict(re.findall(r"^- \[[^\]]+\]\(([^)]*)\): (.+)$", text, re.MULTILINE))
    built = {f"{path.parent.relative_to(site)}/" for path in site.rglob("index.html")}
    assert {"./" if address == "./" else address for address in listed} == built


def test_llms_full_txt_holds_every_page(site: Path) -> None:
    text = (site / "llms-full.txt").read_text(encoding="utf-8")
    pages = re.findall(r"^<!-- page: (\S+) -->$", text, re.MULTILINE)
    assert len(pages) == len(set(pages)) == len(list(site.rglob("index.html")))
    assert "--num_processes" in text  # lists that are made of the code are in it too
    assert "on_train_batch_start" in text
    assert ":::" not in text, "classes and functions are to be there with their docstrings"


def test_the_page_of_every_name_leads_to_its_entry(site: Path) -> None:
    links = page_of(site, "reference/index").links
    assert "trainer/#drivetrain.Trainer" in [link.removeprefix("../reference/") for link in links]
