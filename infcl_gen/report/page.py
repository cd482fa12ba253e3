"""Records -> the text of a page, through templates/report; the text depends on the records only."""

from pathlib import Path

import jinja2

from infcl_gen.files import template_folder, write_file
from infcl_gen.report.figures import WIDTH, Page
from infcl_gen.version import __version__


def write_page(path: Path, page: Page) -> None:
    """Write the page atomically. Raises OSError."""
    write_file(path, html(page).encode())


def html(page: Page) -> str:
    """One HTML file that refers to nothing else. All text of the records is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder() / "report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    return environment.get_template("page.html.jinja").render(page=page, width=WIDTH, version=__version__)
