"""Tuning records are of kernels as they were: what a family computes does not change under one revision."""

import json

from tests.emission import revisions

KERNEL = '''
@triton.jit
def scaled(x, n):
    """x, scaled."""
    value = helper(x){comment}
    tl.store(x, {result})
def helper(x):
    return x * {factor}
'''


def test_kernels_are_those_of_their_revision() -> None:
    known, current = json.loads(revisions.FILE.read_text()), revisions.current()
    changed = [name for name in current if current[name]["digest"] != known.get(name, {}).get("digest")]
    kept = [name for name in changed if current[name]["revision"] == known.get(name, {}).get("revision")]
    assert not kept, (
        f"kernels of {', '.join(kept)} have changed: if other blocks may be the fastest, raise the revision in "
        "infcl_gen/kernels; then python -m tests.emission.revisions"
    )
    assert current == known, "a revision was raised; then python -m tests.emission.revisions"


def test_a_kernel_is_what_it_and_its_helpers_compute() -> None:
    def code(comment: str = "", result: str = "value", factor: str = "2.0") -> str:
        return revisions.code_of("scaled", KERNEL.format(comment=comment, result=result, factor=factor))

    assert code(comment="  # twice") == code()
    assert (
        revisions.code_of("scaled", KERNEL.format(comment="", result="value", factor=2.0).replace("value", "y"))
        == code()
    )
    assert code(result="value + n") != code() and code(factor="3.0") != code()
