"""The kernels of a row of panels, whose tiles become gradients of logits by one factor for each query."""

from infcl_gen.kernels.arguments import Argument, Kernel, arguments, gradient_of_positive, places, statistics
from infcl_gen.kernels.choice import Choice
from infcl_gen.kernels.family import Family
from infcl_gen.kernels.gradient import Q


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    noted = "positive_g" if choice.traits.combined else "positive_z"
    of_strips = arguments(statistics(choice), noted, "own_reference share flags queries keys strip")
    positives = arguments(places(choice), gradient_of_positive(choice), "share g queries keys g_stride")
    features = arguments(Argument("q", Q.type), "share out rows q_row_stride q_depth_stride")
    return (
        Kernel("shares", of_strips),
        Kernel("row_positives", positives),
        Kernel("weighted_queries", features, "finish"),
    )


FAMILY = Family("rows", kernels, ("rows",), revision=2)
