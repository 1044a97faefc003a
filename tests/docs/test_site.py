"""The site builds without a warning, links lead somewhere, and pictures are what their script draws."""

import os
import re
import runpy
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from pages import DOCS, PAGES, ROOT

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_site_builds_strictly(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr[-4000:]
    reference = (site / "reference" / "cache" / "index.html").read_text()
    for name in ("purecache.PrefixCache.admit", "purecache.Match.host_length", "purecache.CacheError"):
        assert f'id="{name}"' in reference
    assert "--load-back-threshold" in (site / "reference" / "commands" / "index.html").read_text()
    assert "0.1.0" in (site / "changelog" / "index.html").read_text()
    assert not list(site.rglob("draw.py"))


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name):
    links = [link for link in LINK.findall(PAGES[name].read_text()) if "://" not in link]
    assert [link for link in links if not (PAGES[name].parent / link).exists()] == []


def test_pictures_are_what_their_script_draws():
    for draw in runpy.run_path(str(DOCS / "pictures" / "draw.py"))["PICTURES"]:
        picture = draw()
        text = (DOCS / "pictures" / f"{picture.name}.svg").read_text()
        assert text == picture.svg()
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_every_picture_is_shown_with_words_for_who_cannot_see_it():
    shown = dict(
        re.findall(r"!\[([^\]]*)\]\(\S*?([\w-]+\.svg)\)", "\n".join(page.read_text() for page in PAGES.values()))
    )
    pictures = {path.name for path in (DOCS / "pictures").glob("*.svg")}
    assert set(shown.values()) == pictures
    assert all(shown)


@pytest.mark.parametrize("name", PAGES)
def test_a_list_begins_after_an_empty_line(name):
    """GitHub shows it as a list either way; the site makes it a part of the paragraph before."""
    inside, before, wrong = False, "", []
    for number, line in enumerate(PAGES[name].read_text().splitlines(), 1):
        inside ^= line.startswith("```")
        item = re.match(r"(-|\d+\.) ", line)
        if item and not inside and before and not re.match(r"\s*(-|\d+\.) |  ", before):
            wrong.append(number)
        before = line
    assert wrong == []
