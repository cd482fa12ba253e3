"""A kernel variant as a contributor adds it: what stands in a module of infcl_gen/kernels, and its template."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import jinja2

import infcl_gen.kernels
from infcl_gen.emission.render import _environment
from infcl_gen.files import template_folder
from infcl_gen.kernels.choice import Choice
from infcl_gen.kernels.elementwise import product_kernels
from infcl_gen.kernels.family import Family


def wanted(choice: Choice) -> bool:
    return choice.product_by == "triton" and choice.blocks["product"].rows <= 64


FAMILY = Family(
    "narrow",
    lambda choice: (dataclasses.replace(*product_kernels(choice), name="product_narrow", replaces="product"),),
    ("panel",),
    wanted=wanted,
    revision=1,
    file="narrow.py",
    arch="sm_100",
    values=lambda choice: {"most_rows": choice.blocks["product"].rows},
)
OPENING = '''"""The product of {{ name }} for small blocks, of {{ most_rows }} rows."""

import triton
import triton.language as tl

{% for constant, value, _ in constants %}
{{ constant }} = tl.constexpr({{ value }})
{% endfor %}
'''


def register(folder: Path) -> None:
    """The family among the others; its template, the ordinary one's kernel, in a folder beside that of the others."""
    text = (template_folder() / "triton" / "product.py.jinja").read_text()
    text = OPENING + text.replace('kernel("product")', 'kernel("product_narrow")')
    (folder / "triton").mkdir(parents=True, exist_ok=True)
    (folder / "triton" / "narrow.py.jinja").write_text(text)
    _environment().loader = jinja2.FileSystemLoader([folder, template_folder()])
    infcl_gen.kernels.FAMILIES = (*infcl_gen.kernels.FAMILIES, FAMILY)


def main(package: str, folder: str, target: str) -> None:
    """Prints the products that a target runs, and what the variant spills, compiled ahead of time."""
    from infcl_gen.verification.aot import Kernels

    register(Path(folder))
    kernels = Kernels(Path(package))
    print([name for name in kernels.names(target) if name.startswith("product")])
    if target == FAMILY.arch:
        ways = kernels.variants("product_narrow", target)
        print([kernels.compiled("product_narrow", target, inputs).spill_bytes for inputs in ways])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    main(*sys.argv[1:])
