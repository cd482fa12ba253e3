"""Each bug that a peer has had is noticed: its check passes on the package as generated, and fails on the bug."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest

from tests.kernels.packages import generated
from tests.kernels.planted import BUGS, ON_A_GPU, can_be_planted
from tests.kernels.worker import Interpreter
from tests.tiers import LONG, nightly

# Left to the nightly tier; CI plants them, and does not run their check. It notices another bug by the same check in a
# package of that strategy; by the gate on panels one in two sides, in fp32, in pairs, in a triangle, in its columns, in
# prefixes, in cosines of them, in ids of several positives and with a guide.
REPEATED = (
    "a ring has room for a panel of its own keys only", "a ring's backward has room for a panel of its first keys only",
    "a ring's backward makes its scratch anew at each hop", "statistics are read past the end and dropped",
    "a mask of a store lacks the block's offset", "a mask of a load lacks the block's offset",
    "a panel that begins left of the diagonal is taken to have no positives",
    "zero times what lies beyond the last key", "zero times what lies beyond the embedding",
    "the last block of keys is not launched", "zero padding takes part in the running maximum",
    "zero padding takes part in the running maximum of fp32 features", "the embedding dimension is the row stride",
    "the embedding dimension is the row stride of positives",
    "the embedding dimension is the row stride in the product", "the embedding dimension is the row stride in finish",
    "the mean of all logits has no gradient", "the mean of another part of the embedding",
    "the sum of a query's gradients lacks the mean", "the stride along the embedding is ignored",
    "the stride along the embedding is ignored by positives",
    "the stride along the embedding is ignored by the product", "an expanded row is read as if it had a stride",
    "32-bit offsets in the product", "32-bit offsets in finish", "the second panel's keys are taken for the first's",
    "the reference is fixed at the largest possible logit",
    "tiles with a wide spread are not computed again in the forward",
    "tiles with a wide spread are not computed again in the backward",
    "programs with a wide spread are not computed again", "stashed tiles with a wide spread are used",
    "the positive's logit is rounded to bf16", "a positive's probability is rounded before 1 is taken off",
    "fp32 products cut their operands to 10 bits", "the low half of g is left out",
    "a positive's low half of g is that of its softmax", "products replace what earlier panels added",
    "one half of a kept tile is kept twice", "the incoming gradient is ignored",
    "a positive counts as another key, too", "small terms are logarithms of a rounded sum",
    "ids are compared by their low halves", "a pair of one id has the slope of another pair",
    "ids are those of the first panel", "the positive is left out with its id", "g of a pair that is left out",
    "torch: the sum of slopes is left out", "memory is used before it is written",
    "statistics of keys are added to what memory held", "a recorded backward takes the tiles of another forward",
    "tiles that went with a recording are taken for none", "p of a positive is not put in units of its row",
    "the sums of a row leave out the last keys of a gather",
    "the products of a gather begin with the first keys for each rank",
    "a recording hands out the gradients that it overwrites", "a slab takes the gradient of its own prefix alone",
    "a positive is that of all columns", "a strip computed again leaves out prefixes",
    "the positive of a cosine is a product", "radial sums have the g of a negative for the positive",
    "terms beyond the last key are not cleared", "a row is a key of its own", "a pair counts for one of its rows",
    "tiles that meet the diagonal are left out", "two rows that are each other's positive count as one",
    "a positive that is nobody's but its row's has no gradient of its own",
    "a panel on the diagonal gives its gradients twice", "views of a sample are neighbours",
    "rows of which a tile leaves out all flag it", "rows of other ranks are taken for the first",
    "columns leave out the positives of rows", "columns leave out nothing", "a row is a positive of itself",
    "positives of columns are not counted", "positives of earlier panels are forgotten",
    "positives far below all others are lost", "each of some positives has the slope of one",
    "columns have the slopes of rows", "absent keys have a share of a guide's softmax", "a guide's softmax in base 2",
    "a guide's slope is forgotten", "absent queries have a share of a key's softmax",
    "positives have no share of a key's softmax", "the mean of a key is that of a query",
    "keys of a guide do not travel", "positives above a threshold are left out",
    "what is below a threshold is left out", "thresholds are of the first rows",
    "thresholds beyond the last row are read", "the gradient has what the sum leaves out",
    "keys of a threshold's guide do not travel", "the threshold of a column is that of the row",
    "queries are not compared with documents", "the gradient of a column has what its sum leaves out",
    "thresholds of another rank's rows are the own", "rows of another rank are the first where they stand after",
    "a row and itself have a gradient by their id", "a row without positives has a weight",
    "ids of another rank's rows are the own", "a row has the g of the other at its positive",
    "second sums that are too small are not computed again", "second sums have the reference of the first",
    "second sums of columns of a wide range are lost", "the second sums of earlier panels are forgotten",
    "the second share of columns is that of rows", "the positive of another row lacks its second share",
    "a second sum is not divided by its weight", "second sums of another rank's rows are the own",
    "the partner of a row is the row itself", "the sum of a column is that of the row",
    "a column has the exponent of the row", "a column has the weight of its row", "columns keep their sums",
    "columns of ids have no slope", "positives have no part by their columns",
    "the shift is no part of the sum of columns", "positives are in the sums of columns", "columns have no weights",
    "the weight of a query is taken for its sum over negatives", "the next state is not written",
    "slopes are forgotten", "sums lack what the logit has besides z", "g of a positive is the query's part of the loss",
    "g of a positive lacks its share of the sum", "a sum is not divided by the weight of its row",
    "positives that a sum leaves out keep the g of other keys",
    "the mask of the gradient is that of the forward, inverted", "how a term changes with the scale is left out",
    "the weights of rows have no part in the gradient of the bias", "slopes of weights are those of negatives",
    "the positive's share is added after rounding", "the gradient of the scale is times the rows",
    "a positive has the slope of another key", "what lies beyond the last key counts",
    "the halves of a pair of g change places", "keys of a prefix have the weight of others",
    "radial sums of a strip computed again have those before", "a row and itself have a gradient",
    "g below the diagonal is never turned", "positives below the diagonal are not looked for",
    "a panel above the diagonal gives gradients to its rows alone",
    "columns that are computed again leave out the positives of rows", "a panel has the ids of others",
    "the sums of partners are noted once they have weights",
    "how a term changes with the positive's similarity is left out",
)  # fmt: skip
HERE = [name for name in BUGS if name not in ON_A_GPU]
NOTICED = nightly(HERE, [name for name in HERE if name not in REPEATED])


@pytest.mark.parametrize("name", NOTICED)
def test_a_planted_bug_is_noticed(interpreted: Interpreter, shared_folder: Path, name: str) -> None:
    bug = BUGS[name]
    planted = dataclasses.replace(bug.made, bug=name)
    interpreted(generated, planted)  # or the check would fail for want of the text to edit
    passes = shared_folder / hashlib.sha256(repr((bug.check.__name__, bug.made, bug.arguments)).encode()).hexdigest()
    if not passes.exists():  # several bugs are noticed by the same check
        interpreted(bug.check, bug.made, *bug.arguments)
        passes.touch()
    with pytest.raises(AssertionError) as caught:
        interpreted.apart(bug.check, planted, *bug.arguments)
    assert re.search(bug.says, str(caught.value)), caught.value
    assert "process ended with -9" not in str(caught.value), "killed from outside"  # -6 and -11 are of its own writes


@pytest.mark.parametrize("name", ON_A_GPU if LONG else (*REPEATED, *ON_A_GPU))
def test_a_bug_whose_check_is_not_run_here_can_be_planted(interpreted: Interpreter, name: str) -> None:
    interpreted(can_be_planted, name)


def test_each_check_has_a_bug_in_each_strategy_that_it_has_one_in() -> None:
    assert set(REPEATED) <= set(HERE)
    of_all, of_ci = ({(BUGS[name].check, BUGS[name].made.strategy) for name in names} for names in (HERE, NOTICED))
    assert of_all == of_ci
