"""What is known of a loss below its formula: the planner, kernels, the runtime and verification read its traits.

Pure data, derived from the formula (`losses.derive`), and stored in a package as SPEC["loss"]["traits"].
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

# When the gradient of a pair's logit is known: before any pair is seen; once its row of pairs is complete; or once all
# pairs are.
Known = Literal["before", "row", "all"]
Domain = Literal["rectangle", "triangle"]
# Of a triangle whose rows are pairs, classes of pairs (i, j): whether i comes before its positive, and whether j does.
SIDES = {
    "first_first": (True, True), "first_second": (True, False), "second_first": (False, True),
    "second_second": (False, False),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of a loss; the default is that of CLIP.

    query_statistics  the kind of each number that is reduced over the pairs of a query: "logsumexp"; beside it
                      "logsumexp_of_multiple", where the logits are multiplied by a constant, or
                      "logsumexp_of_positive", that of the row that is its positive, or "logsumexp_of_column", that of
                      the column of its positive; or of its positives alone, of which there may be any number,
                      "mean_over_positives" or "logsumexp_over_positives"; with one of these they are counted, and a
                      query without adds nothing; or "mean_by_guide", its mean by the softmax of a second similarity, a
                      guide's; of a sum over pairs that is taken query by query "sum_of_terms" alone
    key_statistics    the same of a key. With "mean_by_guide" of both sides these means have constant multiples, and
                      positives may stand beside them; of queries alone that mean stands for a positive
    known             when dL/dx of a pair is known; with "before" the sweep that computes the loss has gradients, too
    positives         "diagonal": key i is the positive of query i; "label": the key that the caller names; "id": the
                      keys of its id, of which there may be none; "none": no key
    combined          whether the term of a query combines its statistic and its positive in another way than by
                      constant multiples, or its statistic leaves out its positive and may be a sum of nothing: a
                      kernel between the sweeps then makes the weight of its row
    even              whether that weight is one number for all rows that have positives, of which there may be several
    per_row           whether a call may take the loss of each query, (m,): its factors are known in backward alone, so
                      that no gradients are made in forward, and each query has a weight
    vectors           the keywords of a call from which a query's own numbers in its term follow: "query_weight",
                      "key_weight" of the key that is its positive, "negatives", whose log-sum-exp is such a number, and
                      last "query_state", and "key_state" of the key that is its positive, which have no gradient:
                      forward makes the next states in their place
    held              numbers in fp64 of each query that torch holds at most while it computes that weight
    classes           classes of pairs that tiles tell apart. "same_id": pairs of one id, but no positive, have a term
                      of their own in a sum over pairs, and are left out of log-sum-exps; with positives "id" they are
                      the positives, which stay in log-sum-exps; "positive": positives are left out of log-sum-exps, too
                      "above": pairs whose similarity exceeds their query's threshold, but no positive, are left out,
                      too; "above_by_guide": the same of a guide's similarities; those of SIDES: pairs of rows that are
                      the first or the second of their pairs, but no positive, are left out, too
    affine            whether the logit is slope * z + shift
    softplus          whether the terms of a tile are one multiple of softplus(x) or softplus(-x)
    strips            tensors that torch holds at most while it computes the terms of a strip of pairs; 0: in place
    means             whether a multiple of the mean of all logits is part of the loss
    weighted          whether keys have weights in that mean, which follow from a guide's similarities; `means` is that
                      of a mean without
    pooled            fp64 numbers of each query that torch holds at most for the log-sum-exp over all positives, and
                      for the slopes by it; 0 of a loss without
    scaled            the keywords of a call by whose numbers rows of features are multiplied first: "query_scale" and
                      "key_scale"
    slabs             widths of the slabs of columns by which one prefix of the features exceeds the one before: each
                      prefix has statistics and a loss of its own, which are added; none where all features are one
    renormalised      whether similarities of a prefix are cosines: products over the norms of both its rows
    domain            "rectangle": queries and keys; "triangle": queries are keys of each other, but not of themselves,
                      and z_ij = z_ji is computed once
    """

    query_statistics: tuple[str, ...] = ("logsumexp",)
    key_statistics: tuple[str, ...] = ("logsumexp",)
    known: Known = "all"
    positives: str = "diagonal"
    combined: bool = False
    even: bool = False
    per_row: bool = False
    vectors: tuple[str, ...] = ()
    held: int = 0
    classes: tuple[str, ...] = ()
    affine: bool = True
    softplus: bool = False
    strips: int = 0
    domain: Domain = "rectangle"
    means: bool = False
    weighted: bool = False
    pooled: int = 0
    scaled: tuple[str, ...] = ()
    slabs: tuple[int, ...] = ()
    renormalised: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "slabs", tuple(self.slabs))  # stored as a list

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Columns of each prefix."""
        return tuple(itertools.accumulate(self.slabs))

    @property
    def has_keys(self) -> bool:
        """Whether keys have statistics."""
        return bool(self.key_statistics)

    @property
    def states(self) -> int:
        """How many of `vectors` are states, which a call replaces: the last ones."""
        return sum(name.endswith("_state") for name in self.vectors)

    @property
    def weighed(self) -> int:
        """How many of `vectors` have gradients: the first ones."""
        return len(self.vectors) - self.states

    @property
    def triangle(self) -> bool:
        """Whether queries are keys of each other: a call has one side, and passes no k."""
        return self.domain == "triangle"

    @property
    def sides(self) -> tuple[str, str]:
        """What messages call queries, and what they are compared with."""
        return ("rows", "rows") if self.triangle else ("queries", "keys")

    def counted(self, queries: int, keys: int, between: str = " and ") -> str:
        """The sizes of a batch as messages say them."""
        return f"{queries} rows" if self.triangle else f"{queries} queries{between}{keys} keys"

    @property
    def both_axes(self) -> bool:
        """Whether a tile is reduced along its rows and its columns."""
        return self.has_keys or self.triangle

    @property
    def labels(self) -> bool:
        """Whether labels may name the positives."""
        return self.positives == "label"

    @property
    def paired(self) -> bool:
        """Whether query i and key i are a pair, so that there are as many keys as queries."""
        return self.positives == "diagonal"

    @property
    def placed(self) -> bool:
        """Whether a query has one positive, which is found by its place."""
        return self.positives in ("diagonal", "label")

    @property
    def ids(self) -> bool:
        """Whether a call gives ids of queries and keys."""
        return "same_id" in self.classes

    @property
    def named(self) -> bool:
        """Whether keys travel with an integer of their own: an id, or of a triangle a label."""
        return self.ids or (self.triangle and self.labels)

    @property
    def several(self) -> bool:
        """Whether a query's term has a statistic in the place of a positive: of any number of these, or by a guide."""
        in_place = self.by_guide and not self.guided_sides
        return in_place or any(kind.endswith("_over_positives") for kind in self.query_statistics)

    @property
    def second(self) -> bool:
        """Whether a query's term has a second log-sum-exp, over the same pairs, of a multiple of their logits."""
        return "logsumexp_of_multiple" in self.query_statistics

    @property
    def partnered(self) -> bool:
        """Whether a row's term has the log-sum-exp of its positive: each is the positive of the other, on one rank."""
        return "logsumexp_of_positive" in self.query_statistics

    @property
    def crossed(self) -> bool:
        """Whether a query's term has the log-sum-exp over queries of its positive, the key of its index on its rank, or
        that of all its positives. These sums make the factor of a key, which is known only once forward has ended."""
        return "logsumexp_of_column" in self.query_statistics

    @property
    def columns_of_ids(self) -> bool:
        """Whether these are of any number of positives, on any rank: ranks tell each other the sums of their keys."""
        return self.crossed and self.several

    @property
    def in_columns(self) -> bool:
        """Whether that sum of one column has its positive, too."""
        return self.crossed and not self.several and not self.without_positives

    @property
    def by_guide(self) -> bool:
        """Whether the similarities of a guide's features weigh the logits of a query."""
        return "mean_by_guide" in self.query_statistics

    @property
    def guided_sides(self) -> bool:
        """Whether they weigh those of a key, too: then both means stand beside positives."""
        return "mean_by_guide" in self.key_statistics

    @property
    def key_numbers(self) -> int:
        """Numbers of each key's statistics: exponent and mantissa of a log-sum-exp, of each prefix; then by the guide
        what the schedule keeps of a mean, and mantissa and exponent of its softmax's sum."""
        return 2 * max(1, len(self.slabs)) + 3 * self.guided_sides

    @property
    def guide(self) -> bool:
        """Whether each tile has the similarities of a guide's features, too."""
        return self.by_guide or "above_by_guide" in self.classes

    @property
    def thresholds(self) -> bool:
        """Whether log-sum-exps leave out pairs above a threshold of their query, which follows from its positive."""
        return "above" in self.classes or "above_by_guide" in self.classes

    @property
    def by_side(self) -> bool:
        """Whether log-sum-exps leave out pairs by whether their rows are the first or the second of their pairs."""
        return not SIDES.keys().isdisjoint(self.classes)

    @property
    def mutual(self) -> bool:
        """Whether rows are pairs, each the positive of the other and both on one rank."""
        return self.partnered or (self.triangle and self.thresholds)

    @property
    def own_references(self) -> bool:
        """Whether log-sum-exps leave out so many pairs that those of a sample say little about the others."""
        return self.thresholds or self.by_side

    @property
    def masks_of_sides(self) -> int:
        """How many masks of a panel torch holds at most where rows have references of their own: of a triangle those of
        both axes, and one in work for sides."""
        return (1 + self.triangle + self.by_side) * self.own_references

    @property
    def own_keys(self) -> bool:
        """Whether each rank has as many keys as queries: what a query has by its own key is made on its rank."""
        return self.thresholds or (self.crossed and not self.several)

    @property
    def keeps_keys(self) -> bool:
        """Whether the keys that a ring's forward ends with may stay for backward, which needs no more of them."""
        return not self.at_once and not self.crossed

    @property
    def two_statistics(self) -> bool:
        """Whether tiles are reduced twice: for a query's log-sum-exp, and for a second one, or by a guide."""
        return self.second or self.by_guide

    @property
    def sorted_ids(self) -> bool:
        """Whether the statistic beside a log-sum-exp is of positives, which kernels find by sorted ids."""
        return self.several and not self.by_guide

    @property
    def guided(self) -> bool:
        """Whether a call gives a guide's features of both sides, for tiles or for the weights of a mean."""
        return self.guide or self.weighted

    @property
    def softmax_of_positives(self) -> bool:
        """Whether that statistic is a log-sum-exp: the gradients of positives are then its shares, else all alike."""
        return "logsumexp_over_positives" in self.query_statistics

    @property
    def without_positives(self) -> bool:
        """Whether log-sum-exps leave out positives."""
        return "positive" in self.classes

    @property
    def masked(self) -> bool:
        """Whether log-sum-exps leave out pairs."""
        return bool(self.classes) and not self.pairs and not self.several

    @property
    def ids_in_tiles(self) -> bool:
        """Whether tiles tell apart pairs of one id: a statistic of positives takes no part of other pairs' terms."""
        return self.ids and not self.sorted_ids

    @property
    def apart(self) -> bool:
        """Whether kernels of their own find the positives, by their places or by their ids."""
        return not self.pairs and (self.placed or self.sorted_ids)

    @property
    def sums_slopes(self) -> bool:
        """Whether the gradients of scale and bias take the sum of dL/dx over all pairs, as it is no constant."""
        return self.combined or self.pairs

    @property
    def pairs(self) -> bool:
        """Whether the loss is a sum of terms of pairs, without log-sum-exps."""
        return self.at_once or "sum_of_terms" in self.query_statistics

    @property
    def small_first(self) -> bool:
        """Whether sweeps compute a strip by the size of its logits, and again where that was too small."""
        return self.softplus and self.at_once

    @property
    def at_once(self) -> bool:
        """Whether the sweep that computes the loss computes its gradients, too."""
        return self.known == "before"
