"""What is known of built-in losses without importing their module, which takes SymPy and 0.3 to 0.6 s."""

import ast
import functools
from pathlib import Path

_RECORDS = Path(__file__).resolve().parent.parent / "losses" / "builtin.py"


@functools.cache
def builtin_positives() -> dict[str, str]:
    """The `positives` of each built-in loss by its name, read from the records as text."""
    found = {}
    for node in ast.walk(ast.parse(_RECORDS.read_bytes())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LossSpec":
            given = {each.arg: each.value for each in node.keywords}
            found[ast.literal_eval(given["name"])] = ast.literal_eval(given["positives"])
    return found
