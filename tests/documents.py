"""README and documentation as tests read them: pages, fenced blocks, sentences, links."""

import re
import runpy
from pathlib import Path

from infcl_gen.processes import Answer, Requests

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
}
_FENCE = re.compile(r"^(`{3,}|:{3,})(\{?[\w-]*\}?)[^\n]*\n(.*?)^\1\s*$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block in that language."""
    return [(page, found[3]) for page, text in PAGES.items() for found in _FENCE.finditer(text) if found[2] == language]


def commands() -> list[tuple[str, str]]:
    """(page, line) of every shell line that a page shows."""
    lines = ((page, line.partition("  #")[0].strip()) for page, text in blocks("sh") for line in text.splitlines())
    return [(page, line) for page, line in lines if line]


def without_generated(text: str) -> str:
    return re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)


def sentences(text: str) -> list[str]:
    """Of prose: without code, tables, formulas, headings and generated parts."""
    text = re.sub(r"\$\$.*?\$\$", "", _FENCE.sub("", without_generated(text)), flags=re.DOTALL)
    paragraphs: list[str] = []
    open_ = False
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare[0] in "|#:" or bare.startswith(("![", "<!--", "```")):
            open_ = False
        elif re.match(r"([*-]|\d+\.) ", bare) or not open_:
            paragraphs.append(re.sub(r"^([*-]|\d+\.) ", "", bare))
            open_ = True
        else:
            paragraphs[-1] += f" {bare}"
    return [sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph)]


def links(page: str) -> list[str]:
    """Relative targets of a page's links, without anchors."""
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", _FENCE.sub("", PAGES[page]))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def run_example(requests: Requests, answer: Answer, file: str) -> None:
    """A task of `infcl_gen.processes`."""
    runpy.run_path(file, run_name="__main__")
    answer(done=True)


def build_site(requests: Requests, answer: Answer, folder: str) -> None:
    """A task of `infcl_gen.processes`: `make docs` in the current folder, with the site in another."""
    from sphinx.cmd.build import main

    answer(status=main(["-q", "-W", "--keep-going", "-b", "html", "docs", folder]))
