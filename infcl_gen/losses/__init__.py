"""Losses as formulas: the language, built-in losses, derivation by SymPy, and printers of source text.

spec = load_loss("clip")            # or "infonce", or "FILE.py:NAME" for your own LossSpec
derivation = derive(spec)           # the gradient of the loss, in a numerically stable form
triton_code(derivation.logit)       # expressions as source text
formulas_of(derivation)             # formulas for people
latex_of(derivation)                # the same in LaTeX
"""

from infcl_gen.losses.builtin import BUILTIN_LOSSES, CLIP, INFONCE, NTXENT, SIGLIP, SIGLIP_MULTI
from infcl_gen.losses.derive import Derivation, derive
from infcl_gen.losses.form import Sides, left_out, others_left_out
from infcl_gen.losses.language import LossError, LossSpec, PrefixesApartError
from infcl_gen.losses.latex import aligned, latex_of
from infcl_gen.losses.load import (
    is_being_read,
    is_builtin,
    load_loss,
    over_prefixes,
    parse_formula,
    spec_as_dict,
    spec_from_dict,
)
from infcl_gen.losses.printers import torch_code, triton_code
from infcl_gen.losses.texts import formulas_of, loss_context

__all__ = [
    "BUILTIN_LOSSES", "CLIP", "INFONCE", "NTXENT", "SIGLIP", "SIGLIP_MULTI", "Derivation", "LossError", "LossSpec",
    "PrefixesApartError", "Sides", "aligned", "derive", "formulas_of", "is_being_read", "is_builtin", "latex_of",
    "left_out", "load_loss", "loss_context", "others_left_out", "over_prefixes", "parse_formula", "spec_as_dict",
    "spec_from_dict", "torch_code", "triton_code",
]  # fmt: skip
