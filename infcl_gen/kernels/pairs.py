"""The kernels of a loss that is a sum over pairs: one sweep computes it and its gradients."""

from infcl_gen.kernels.arguments import SCALARS, STRIDES, Kernel, arguments, classes, places
from infcl_gen.kernels.choice import Choice
from infcl_gen.kernels.family import Family
from infcl_gen.kernels.forward import K as FORWARD_K
from infcl_gen.kernels.forward import Q as FORWARD_Q
from infcl_gen.kernels.gradient import K, Q

SWEEPS = (
    {"kernel": "pairs", "positives": "pair_positives", "walked": "GRADIENT", "gradients": True,
     "summary": "Terms, slopes and g of a panel's pairs, whose z is computed once.",
     "of_positives": "Terms, slopes and g of a panel's positives, after `pairs`."},
    {"kernel": "pair_terms", "positives": "pair_positive_terms", "walked": "FORWARD", "gradients": False,
     "summary": "Terms of a panel's pairs.", "of_positives": "Terms of a panel's positives."},
)  # fmt: skip


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    placed, told = places(choice), classes(choice)
    sizes, constants = "queries keys strip", "MASKED DESCRIPTORS WIDEN"
    g = "g" + " g_low" * choice.split
    pairs = arguments(Q, K, told, SCALARS, g, "sums", sizes, "g_stride parts", STRIDES, constants)
    positives = arguments("q k", placed, SCALARS, g, "sums queries keys g_stride parts", STRIDES)
    terms = arguments(FORWARD_Q, FORWARD_K, told, SCALARS, "sums", sizes, STRIDES, constants)
    positive_terms = arguments("q k", placed, SCALARS, "sums queries keys", STRIDES)
    found = (
        Kernel("pairs", pairs, "gradient"),
        Kernel("pair_positives", positives),
        Kernel("pair_terms", terms, "forward"),
        Kernel("pair_positive_terms", positive_terms),
        Kernel("pair_loss", arguments("sums loss weight parts BLOCK")),
    )
    return tuple(each for each in found if choice.traits.placed or "positive" not in each.name)


FAMILY = Family("pairs", kernels, ("panel",), wanted=lambda choice: choice.traits.at_once, revision=2)
