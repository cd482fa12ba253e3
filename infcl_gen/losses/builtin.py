"""The built-in losses: one record for each, from which its section of docs/losses.md is written, too."""

from sympy import Expr, Rational

from infcl_gen.losses.language import (
    LossSpec,
    bias,
    detach,
    exp,
    guide,
    is_first,
    is_positive,
    is_self,
    key_state,
    keys,
    log,
    logsumexp_over_all_positives,
    logsumexp_over_keys,
    logsumexp_over_negatives,
    logsumexp_over_queries,
    maximum,
    mean_by_softmax,
    mean_by_softmax_over_queries,
    mean_of_keys,
    mean_over_keys,
    mean_over_positives,
    mean_over_queries,
    next_state,
    of_positive,
    positive,
    positives_of_query,
    queries,
    query_state,
    same_id,
    same_side,
    scale,
    similarity,
    softplus,
    step,
    sum_over_pairs,
    z,
)

_x = scale * z + bias

CLIP = LossSpec(
    name="clip",
    formula=mean_over_queries(logsumexp_over_keys(_x) - positive(_x)) / 2
    + mean_over_keys(logsumexp_over_queries(_x) - positive(_x)) / 2,
    positives="diagonal",
    doc="Symmetric cross-entropy of CLIP: each query against all keys and each key against all queries.",
    source="Radford et al., arXiv 2103.00020, figure 3",
    use="""\
For pairs of images and texts, and wherever both sides are to find each other.
`scale` is learned; CLIP begins with 1 / 0.07, and clips it at 100. `bias` changes nothing.""",
)

INFONCE = LossSpec(
    name="infonce",
    formula=mean_over_queries(logsumexp_over_keys(_x) - positive(_x)),
    positives="label",
    doc="One-direction InfoNCE: each query against all keys; `labels` name the positives.",
    source="van den Oord et al., arXiv 1807.03748, equation 4",
    use="""\
For queries that search among keys: retrieval, and hard negatives, which are further keys.
sentence-transformers calls it `MultipleNegativesRankingLoss`. [Training](training.md) shows hard negatives.""",
)

_Q, _DENSITY = Rational(1, 2), Rational(1, 100)

RINCE = LossSpec(
    name="rince",
    formula=mean_over_queries((_DENSITY**_Q * exp(_Q * logsumexp_over_keys(_x)) - exp(_Q * positive(_x))) / _Q),
    positives="label",
    doc="Robust InfoNCE, for positives of which some are wrong: q = 1/2, and the density weight lambda = 1/100.",
    source="Chuang et al., arXiv 2201.04309, pseudo code of the authors",
    use="""\
For pairs of which some do not belong together. A loss of one's own with other `q` and `lambda` is one line.
Terms grow as `exp(q * scale)`: fp32 holds them while `scale` is below 170 for features of norm 1.
The loss may be negative.""",
)

_pair, _others_of_pair = positive(_x), 1 - is_positive
_with_row = _pair + softplus(logsumexp_over_keys(_x, where=_others_of_pair) - _pair)
_column = of_positive(logsumexp_over_queries(_x, where=_others_of_pair))

MIL_NCE = LossSpec(
    name="mil_nce",
    formula=mean_over_queries(_with_row + softplus(_column - _with_row) - _pair),
    positives="diagonal",
    doc="MIL-NCE with one positive: a pair against all others of its query and of its key, in one softmax.",
    source="Miech et al., arXiv 1912.06430, for one candidate of each clip, and a mean for the sum over clips",
    use="""\
For pairs of clips and their captions, both of which are to be far from all others, in one term for each pair.
`clip` has a softmax for each direction. Here both share one: its sum is over the pair, its row and its column.
`scale` is 1 / temperature: 1 in the paper. `bias` changes nothing.

The authors' code adds the pair to both sums, so that it counts twice; here, as in the paper, it counts once.
The sums of row and column of one pair are brought together once all keys were seen.
So each rank has as many keys as queries, query i and its own key on one rank.
Each query has one key: `mil_nce_multi` is of any number of candidates.""",
)

_of_candidates, _row = logsumexp_over_keys(_x, where=is_positive), logsumexp_over_keys(_x)
_both = _row + softplus(of_positive(logsumexp_over_queries(_x)) - _row)  # both sums have the candidates

MIL_NCE_MULTI = LossSpec(
    name="mil_nce_multi",
    formula=mean_over_queries(_both + log(1 - exp(_of_candidates - _both)) - _of_candidates),
    positives="id",
    doc="MIL-NCE: any number of candidates of a clip against all others of the clip and of these candidates.",
    source="Miech et al., arXiv 1912.06430, with a mean for the sum over clips",
    use="""\
For clips with several captions of which some belong to them: those that lie near in time, say.
Queries are clips, and keys are captions. The candidates of a clip are the keys of its id, on any rank.
`scale` is 1 / temperature: 1 in the paper. `bias` changes nothing.

A call passes `query_ids=`, int64 (M,), and `key_ids=`, int64 (N,), both on the device of the features.
For five captions of each clip: `query_ids=clips, key_ids=clips.repeat_interleave(5)`, clips numbered over all ranks.
The sum of a clip is over all captions, and over all other clips of its candidates.
The authors' code adds the candidates twice; here, as in the paper, they count once.

A clip without candidates adds nothing to loss and gradients, and counts in the mean's denominator.
Where two clips have one id each is among the other clips of their candidates.
Ranks tell each other a few numbers of each clip, and of each caption.""",
)

_KEPT = logsumexp_over_keys(_x, where=1 - same_id * (1 - is_positive))

GEMINI = LossSpec(
    name="gemini",
    formula=mean_over_queries(_KEPT + softplus(logsumexp_over_negatives(_x) - _KEPT) - positive(_x)),
    positives="label",
    doc="InfoNCE of Gemini Embedding: the keys of a query's id are left out, and it has hard negatives of its own.",
    source="Lee et al., arXiv 2503.07891, section 3; Schechter Vera et al., arXiv 2509.20354",
    use="""\
For training of text embeddings on triplets: a query, its positive, and hard negatives that no other query sees.
A call passes `negatives=`, (M, H, D), with H at least 1, and `query_ids=` and `key_ids=`, int64 (M,) and (N,).
The sources have H = 1. They leave out a pair where queries or positives are equal.
Here one id says so: number the distinct positives, and give both sides the number of their sample.
Read to the letter, their mask is 0 for the positive, too; here its term stays in the sum, as in InfoNCE.
EmbeddingGemma's hardness weights, its spread-out term and its prefixes of D are not part of this loss.""",
)

CWCL = LossSpec(
    name="cwcl",
    formula=mean_over_queries(logsumexp_over_keys(_x) - mean_of_keys(_x, weight=(1 + guide) / 2)),
    positives="diagonal",
    doc="InfoNCE where each key is a positive, with a weight that grows with its likeness to the query's own key.",
    source="Srinivasa et al., arXiv 2309.14580, from the side of a frozen encoder",
    use="""\
For a new modality beside a frozen encoder: images or texts of which many are alike, as in transfer to speech.
A call passes features of the frozen encoder, of norm 1, as `guide_queries=`, (M, D), and as `guide_keys=`, (N, D).
Pair i has the same row in both, and they have no gradient.
Their products lie between -1 and 1, and weights, (1 + product) / 2, between 0 and 1.

No sweep knows of the weights: means take products of guides and features, 8 N D^2 operations in all.
The other direction is `infonce`, called from the other side, or in one loss as [below](#a-loss-of-your-own).""",
)

_nearer = step(guide - positive(guide)) * (1 - is_positive)

GIST = LossSpec(
    name="gist",
    formula=mean_over_queries(logsumexp_over_keys(_x, where=1 - _nearer) - positive(_x)),
    positives="diagonal",
    doc="InfoNCE without the negatives that a guide takes for positives: those it finds nearer than the positive.",
    source="Solatorio, arXiv 2402.16829, between queries and keys alone; sentence-transformers' "
    "`GISTEmbedLoss` without `contrast_anchors` and `contrast_positives`",
    use="""\
For text embeddings where a batch has further right answers, which a model that is trained already can tell.
A call passes its features as `guide_queries=`, (M, D), and as `guide_keys=`, (N, D). They have no gradient.
Pair i has the same row in both. Pad the narrower of features and guide by zeros: no product changes.
A negative counts unless the guide's similarity of it and the query exceeds that of the query's own pair.

The further sums of the source, of queries with queries and of keys with keys, are not part of this loss.
Nor are hard negatives, which `positives="label"` would need.
Each rank has as many keys as queries.

A similarity that equals the pair's own, as of a document that occurs twice, may count or not: roundings decide.
A loss of one's own has a margin: `step(guide - positive(guide) + margin)` leaves out what is as near, too.
With `z` for `guide` a loss needs none: Qwen3 Embedding, arXiv 2506.05176, has `step(z - positive(z) - 1/10)`.
Its loss is `three_block`.""",
)

INFONCE_OUT = LossSpec(
    name="infonce_out",
    formula=mean_over_queries(logsumexp_over_keys(_x) - mean_over_positives(_x)),
    positives="id",
    doc="InfoNCE where a query has any number of positives, the keys of its id, whose logits are averaged.",
    source="Khosla et al., arXiv 2004.11362, equation 2, between two sides; "
    "one direction of UniCL, Yang et al., arXiv 2204.03610",
    use="""\
For queries with several right answers: documents of one topic, captions of one image, labelled images and texts.
Each positive is to have the same share of the softmax, 1 / n of n.

A call passes `query_ids=`, int64 (M,), and `key_ids=`, int64 (N,), both on the device of the features.
A query without positives adds nothing to loss and gradients, and counts in the mean's denominator.
For both directions call it twice, with the sides exchanged.""",
)

INFONCE_IN = LossSpec(
    name="infonce_in",
    formula=mean_over_queries(
        logsumexp_over_keys(_x) - logsumexp_over_keys(_x, where=is_positive) + log(positives_of_query)
    ),
    positives="id",
    doc="InfoNCE where a query has any number of positives, of which it suffices to find some.",
    source="Khosla et al., arXiv 2004.11362, equation 3, between two sides",
    use="""\
For queries of which one right answer is enough, and for positives of which some are wrong.
Positives that are near already have most of the gradient.
A call is that of `infonce_out`, and so is what a query without positives adds.""",
)

DISTILL = LossSpec(
    name="distill",
    formula=mean_over_queries(logsumexp_over_keys(_x) - mean_by_softmax(_x, guide)),
    positives="none",
    doc="Distillation: cross-entropy of each query's softmax over keys against that of a teacher, its guide.",
    source="Hinton et al., arXiv 1503.02531, section 2",
    use="""\
For a student that is to rank keys as a teacher does, beside a loss of its own.
A call passes `guide_queries=`, (M, D), and `guide_keys=`, (N, D), the teacher's features of both sides.
Their products are the teacher's logits: multiply one side by the teacher's scale, in fp32, and then cast it.
They are of the dtype that the loss computes in, and have no gradients.
Where teacher and student differ in width, pad the narrower features by zeros: no product changes.

The teacher's similarities are computed tile by tile beside the student's, and never stored.
The loss is not 0 where both agree: it is then the entropy of the teacher.
`distill_both` has both directions, and `distill_clip` has CLIP's own loss beside them.""",
)

_of_query = logsumexp_over_keys(_x) - mean_by_softmax(_x, guide)
_of_key = logsumexp_over_queries(_x) - mean_by_softmax_over_queries(_x, guide)
_both_ways = mean_over_queries(_of_query) / 2 + mean_over_keys(_of_key) / 2

DISTILL_BOTH = LossSpec(
    name="distill_both",
    formula=_both_ways,
    positives="diagonal",
    doc="Distillation in both directions: of each query's softmax over keys, and of each key's over queries.",
    source="Hinton et al., arXiv 1503.02531, section 2; the `distill_loss` of OpenCLIP's `DistillClipLoss`",
    use="""\
For a student that is to rank keys and queries as a teacher does, beside a loss of its own.
A call is that of `distill`: the teacher's features of both sides, with its scale in one of them.
There are as many keys as queries over all ranks. Query i and key i need not be a pair.

Both directions share every product: a step takes six of them, where two calls of `distill` take twelve.
The loss is not 0 where both agree: it is then the mean entropy of the teacher.""",
)

DISTILL_CLIP = LossSpec(
    name="distill_clip",
    formula=CLIP.formula + _both_ways,
    positives="diagonal",
    doc="CLIP's loss and distillation in both directions, added: both share the student's log-sum-exps.",
    source="OpenCLIP's `DistillClipLoss`, the sum of what it returns; Hinton et al., arXiv 1503.02531, section 2",
    use="""\
For a CLIP model that learns from its own pairs and from a larger CLIP model at once.
A call is that of `distill`: the teacher's features of both sides, with its scale in one of them.
OpenCLIP's trainer adds up what `DistillClipLoss` returns; here the sum is one loss of one sweep.
Another weight of the distillation is a loss of one's own, as [below](#a-loss-of-your-own).""",
)

SIGLIP = LossSpec(
    name="siglip",
    formula=sum_over_pairs(softplus((1 - 2 * is_positive) * _x)) / queries,
    positives="diagonal",
    doc="Pairwise sigmoid loss of SigLIP: each pair is classified as a positive or not, with `bias` as its prior.",
    source="Zhai et al., arXiv 2303.15343, algorithm 1",
    use="""\
For pairs of images and texts. Each pair is classified on its own, so no rank needs the sums of another.
Forward computes the gradients, too; backward multiplies what forward has kept, and communicates nothing.
`bias` is learned; SigLIP begins with `scale` 10 and `bias` -10.""",
)

SIGLIP_MULTI = LossSpec(
    name="siglip_multi",
    formula=sum_over_pairs(softplus((1 - 2 * is_positive) * _x)) / queries,
    positives="id",
    doc="SigLIP where a query has any number of positives, also none: the keys of its id.",
    source="Zhai et al., arXiv 2303.15343, algorithm 1, with labels from ids",
    use="""\
For several captions of one image, and for batches in which a sample occurs twice.
A query without a positive adds the terms of its negatives. Every positive has the weight of a negative.
The SigLIP+ of `siglip-kernel` divides the weight of a positive by the number of positives instead.

A call passes `query_ids=`, int64 (M,), and `key_ids=`, int64 (N,), both on the device of the features.
Over several ranks each passes the ids of its own rows, and ids travel with their keys.""",
)

_y = scale * z

SPECTRAL = LossSpec(
    name="spectral",
    formula=sum_over_pairs(((1 - is_positive) * _y - 2 * is_positive) * _y) / queries,
    positives="diagonal",
    doc="Spectral contrastive loss: the logit of a pair is to be large, and the squares of all other logits small.",
    source="HaoChen et al., arXiv 2106.04156, section 3.2, of a batch as in the code of the authors, over M - 1",
    use="""\
For two views of each image, in place of a softmax: its minimum is a spectral decomposition of the graph of views.
Each pair has a term of its own, as in `siglip`, so no rank needs the sums of another.

The source's loss is -2 times the mean of positives, and the mean of the squares of all M (M - 1) other pairs.
Its features have a norm of at most sqrt(mu). Divide them by sqrt(mu).
It is then `(M - 1) * contrastive_loss(q, k, mu / (M - 1), loss="spectral")`, of M pairs over all ranks.
`scale` says how much other pairs count. `bias` has no part in it. The loss may be negative.""",
)

_of_rows = scale * similarity("query", "query") + bias

NTXENT = LossSpec(
    name="ntxent",
    formula=mean_over_queries(logsumexp_over_keys(_of_rows, where=1 - is_self) - positive(_of_rows)),
    positives="label",
    doc="NT-Xent of SimCLR: each row against all others, one of which is another view of its sample.",
    source="Chen et al., arXiv 2002.05709, equation 1",
    use="""\
For two views of each image, and wherever the rows of one tensor are to find each other.
`scale` is 1 / temperature: 2 in lightly's default, 10 in SimCLR's for ImageNet. `bias` changes nothing.

A call has one side: `contrastive_loss(q, None, scale)`, where q holds all views of the batch.
Without `labels` rows i and i + M/2 of a rank are views of one sample, as in `torch.cat([first, second])`.
`labels` name the other view of each row by its place in the batch of all ranks. Pairs need not be mutual.

Each similarity is computed once for its two rows, so that a step takes half of CLIP's.
Over ranks, one of two ranks computes the pairs between their rows.
Its sums for rows of the other travel to that rank.""",
)

_of_all = logsumexp_over_keys(_of_rows, where=1 - is_self)

FOUR_BLOCK = LossSpec(
    name="four_block",
    formula=mean_over_queries(of_positive(_of_all) + softplus(_of_all - of_positive(_of_all)) - positive(_of_rows)),
    positives="label",
    doc="GTE's contrastive loss: one softmax over what a query and its document have with all others of both kinds.",
    source="Li et al., arXiv 2308.03281, section 3, the improved contrastive loss",
    use="""\
For text embeddings from pairs of a query and a document, both of which are to be far from all others of either kind.
sentence-transformers writes it `MultipleNegativesRankingLoss(directions=all four, partition_mode="joint")`.
`scale` is 1 / temperature: 100 in the paper. `bias` changes nothing.

A call is that of `ntxent`: `contrastive_loss(torch.cat([queries, documents]), None, scale)`.
The mean over rows is then that over samples, as both rows of a pair have one term: Z of a sample is the sum of theirs.
The paper's Z has the positive in two of its blocks, and so has this one: the loss is at least log 2.

Rows are pairs, each the positive of the other, and the two of a pair are on one rank.
`labels` that say otherwise are refused where they are looked at, as in `ntxent`; unseen ones give NaN.
Hard negatives are not part of this loss.""",
)

_others = (1 - is_self) * (1 - is_positive)
_similar = similarity("query", "query")
_wrong = step(_similar - positive(_similar) - Rational(1, 10))
_documents_to_queries = (1 - is_first) * (1 - same_side)
_right = positive(_of_rows)
_of_kept = logsumexp_over_keys(_of_rows, where=_others * (1 - _wrong) * (1 - _documents_to_queries))
_with_kept = _right + softplus(_of_kept - _right)

THREE_BLOCK = LossSpec(
    name="three_block",
    formula=mean_over_queries(_with_kept + softplus(of_positive(_of_kept) - _with_kept) - _right),
    positives="label",
    doc="Qwen3 Embedding's contrastive loss: `four_block` of three blocks, without pairs that are likely right, too.",
    source="Zhang et al., arXiv 2506.05176, equation 1, without its hard negatives",
    use="""\
For text embeddings from pairs of a query and a document, in batches that may hold further right answers.
A query is compared with all documents and all other queries, and its document with all other documents.
What the document has with other queries is the fourth block of `four_block`, and is not in this loss.
The pair itself counts once.
A pair of any block is left out where its similarity exceeds that of the query and its document by more than 0.1.
The paper takes cosines, so features have norm 1. `scale` is 1 / temperature. `bias` changes nothing.

A call is that of `four_block`: `contrastive_loss(torch.cat([queries, documents]), None, scale)`.
The row of a pair that comes first is the query, also where `labels` name the pairs.
Both rows of a pair are on one rank. Other labels are refused, or give NaN, as in `four_block`.

A sample whose negatives are all left out has a loss of 0. Thresholds have no gradient.
A document that occurs twice is as near as the query's own, and counts; the paper leaves it out.
The paper's hard negatives are those of `three_block_hard`.
[Below](#thresholds) is one of four blocks with a threshold. Another margin is one number there.""",
)

_of_own = logsumexp_over_negatives(_of_rows, where=1 - _wrong)
_with_own = _with_kept + softplus(_of_own - _with_kept)

THREE_BLOCK_HARD = LossSpec(
    name="three_block_hard",
    formula=mean_over_queries(_with_own + softplus(of_positive(_of_kept) - _with_own) - _right),
    positives="label",
    doc="Qwen3 Embedding's contrastive loss with its hard negatives: `three_block` and documents of each query.",
    source="Zhang et al., arXiv 2506.05176, equation 1",
    use="""\
For text embeddings from triplets: a query, its document, and hard negatives that no other query sees.
All else is as in `three_block`: blocks, thresholds, scale, and which row of a pair is the query.
A hard negative is left out, too, where its similarity to the query exceeds the pair's by more than 0.1.

A call is `contrastive_loss(torch.cat([queries, documents]), None, scale, negatives=negatives)`.
`negatives` are (M / 2, H, D), with H at least 1: H documents of each of the M / 2 queries of this rank, in their order.
With `labels` it is the order in which queries stand in the call. They have gradients, and do not travel.
Where a query has fewer, pad with twice its own features: their similarity, 2, is above any threshold.""",
)

DCL = LossSpec(
    name="dcl",
    formula=mean_over_queries(logsumexp_over_keys(_of_rows, where=_others) - positive(_of_rows)),
    positives="label",
    doc="Decoupled contrastive loss: NT-Xent whose sums leave out the positive.",
    source="Yeh et al., arXiv 2110.06848, equation 6, with a mean for the sum over rows",
    use="""\
For two views of each image, above all in small batches: NT-Xent weighs a row by how wrong it is, this one does not.
`scale` is 1 / temperature. `bias` changes nothing. The loss may be negative.

A call is that of `ntxent`. In a batch of two rows neither has a negative: the loss is then -inf, as log 0 is.
Its gradients are those of the positives alone. `dclw` also weighs positives.""",
)

_alike, _SIGMA = scale * similarity("query", "query"), Rational(1, 2)
_near = positive(similarity("query", "query"))
_weight = 2 - queries * exp(_near / _SIGMA - logsumexp_over_all_positives(_near / _SIGMA))

DCLW = LossSpec(
    name="dclw",
    formula=mean_over_queries(logsumexp_over_keys(_alike, where=_others) - _weight * scale * _near),
    positives="label",
    doc="Decoupled contrastive loss whose positives have weights: the less alike the two views are, the more.",
    source="Yeh et al., arXiv 2110.06848, equation 6 with the weights of DCLW for sigma = 0.5, and a mean over rows",
    use="""\
For two views of each image: `dcl` with more to learn from positives that are still far from each other.
The weight of a row is 2 - e^(z / sigma) / the mean of e^(z / sigma), z the similarity to its positive.
The mean is over the rows of all ranks. Weights are at most 2, their mean is 1, and some may be negative.
They are functions of the features, and have gradients.
The weights of lightly's `DCLWLoss` are constants, and their mean is over the rows of a rank.

`scale` is 1 / temperature. `bias` has no part in it. A call is that of `ntxent`.
Features have norm 1. A loss of one's own with another sigma is short.
In a batch of two rows neither has a negative: the loss is then -inf, as that of `dcl` is.""",
)

_TAU = Rational(1, 10)
_p, _s = positive(_alike), logsumexp_over_keys(_alike, where=_others)
_count = maximum(queries - 2, 0)
# tau_plus N e^p over S. Below -40 it is beyond 1 for any N, and e^40 leaves no dtype.
_of_positives = _TAU * _count * exp(-maximum(_s - _p, -40))
_left = _s + log(maximum(1 - _of_positives, 1e-30)) - log(1 - _TAU)

DEBIASED = LossSpec(
    name="debiased",
    formula=mean_over_queries(softplus(maximum(_left, log(_count) - scale) - _p)),
    positives="label",
    doc="Debiased contrastive loss: a tenth of the other rows is taken for positives (tau_plus = 0.1).",
    source="Chuang et al., arXiv 2007.00224, equation 8 with one positive, and the code of the authors",
    use="""\
For two views of each image where other rows may be of its class. A loss of one's own with another `tau_plus` is short.
Of a row with M - 2 = N negatives, S is their sum of e^x, and p the logit of its positive.
The loss is log(e^p + Ng) - p with Ng = max((S - tau_plus N e^p) / (1 - tau_plus), N e^(-scale)).
N and tau_plus are those of the authors' code. The lower bound presumes features of norm 1.

`scale` is 1 / temperature: 2 in the authors' code. `bias` has no part in it. A call is that of `ntxent`.
The formula takes logarithms: neither S nor e^p overflows. Where S - tau_plus N e^p is below 0 the lower bound holds.
In a batch of two rows there are no negatives, and the loss is 0.""",
)

_BETA = 1
_weighed = logsumexp_over_keys((1 + _BETA) * _alike, where=_others)
_weights = maximum(logsumexp_over_keys(_BETA * _alike, where=_others), -1e30)  # of no negatives -inf less -inf is NaN
_hard = _weighed - _weights  # log S / N
_of_hard = _TAU * exp(-maximum(_hard - _p, -40))
_left_of_hard = log(_count) + _hard + log(maximum(1 - _of_hard, 1e-30)) - log(1 - _TAU)

HARD_NEGATIVE = LossSpec(
    name="hard_negative",
    formula=mean_over_queries(softplus(maximum(_left_of_hard, log(_count) - scale) - _p)),
    positives="label",
    doc="Debiased contrastive loss that weighs negatives by how near they are: beta = 1, and tau_plus = 0.1.",
    source="Robinson et al., arXiv 2010.04592, section 3, and the code of the authors",
    use="""\
For two views of each image, where negatives that are hard to tell from positives are to count for more.
The loss is that of `debiased`, log(e^p + Ng) - p with Ng = max((S - tau_plus N e^p) / (1 - tau_plus), N e^(-scale)).
But S = N sum e^((1 + beta) x) / sum e^(beta x) over the negatives of a row: each is weighed by e^(beta x).
With beta = 0 it is `debiased`. A loss of one's own with another `beta` is short.

Both sums of a row are made in one sweep.
`scale`, N, the lower bound and a call are those of `debiased`. `bias` has no part in it.
In a batch of two rows there are no negatives, and the loss is 0.""",
)

_of_positives_alone = logsumexp_over_keys(_of_rows, where=(1 - is_self) * is_positive)

SUPCON_OUT = LossSpec(
    name="supcon_out",
    formula=mean_over_queries(_of_all - mean_over_positives(_of_rows)),
    positives="id",
    doc="Supervised contrastive loss: NT-Xent with any number of positives of a row, whose logits are averaged.",
    source="Khosla et al., arXiv 2004.11362, equation 2, with a mean for the sum over rows",
    use="""\
For rows with classes: two views of labelled images, or sentences of one topic. Its authors prefer it to `supcon_in`.
`scale` is 1 / temperature: 10 in the paper. The authors' code multiplies the loss by temperature / 0.07.
`bias` changes nothing.

A call has one side: `contrastive_loss(q, None, scale, query_ids=classes)`, int64 (M,), on the device of q.
The positives of a row are all other rows of its id, on any rank. Ids of 64 bits travel with their rows.
A row without positives adds nothing to loss and gradients, and counts in the mean's denominator.
pytorch-metric-learning's mean leaves out such rows.

Each similarity is computed once for its two rows, as in `ntxent`.""",
)

SUPCON_IN = LossSpec(
    name="supcon_in",
    formula=mean_over_queries(_of_all - _of_positives_alone + log(positives_of_query)),
    positives="id",
    doc="Supervised contrastive loss with the mean of the positives' exponentials inside the logarithm.",
    source="Khosla et al., arXiv 2004.11362, equation 3, with a mean for the sum over rows",
    use="""\
For rows with classes of which a row need not be near to all. The paper finds `supcon_out` better on ImageNet.
`scale` and a call are those of `supcon_out`, and so is what a row without positives adds.
Positives share one softmax: those that are near already have most of the gradient.""",
)

_GAMMA, _LOG_EPS = Rational(9, 10), -14 * log(10)
_apart = scale * z


def _averaged(sums: Expr, state: Expr) -> Expr:
    """tau * g / (u + eps): `sums` is the log-sum-exp of the negatives, and `state` log u before the update."""
    log_g = maximum(sums - positive(_apart), -10_000) - log(maximum(keys - 1, 1))  # without negatives e^-10000 is 0
    fresh = log_g + step(state + 5000) * log(_GAMMA)  # what was never visited has no part in the average
    log_u = next_state(fresh + softplus(state + log(1 - _GAMMA) - fresh))
    return detach(1 / scale) * exp(log_g - log_u - softplus(_LOG_EPS - log_u))


_of_query = _averaged(logsumexp_over_keys(_apart, where=1 - is_positive), query_state)
_of_key = _averaged(logsumexp_over_queries(_apart, where=1 - is_positive), key_state)

SOGCLR = LossSpec(
    name="sogclr",
    formula=mean_over_queries(_of_query),
    positives="label",
    doc="SogCLR, one direction: a moving average over steps in place of the batch's sum, for small batches.",
    source="Yuan et al., arXiv 2202.12387, algorithm 1; Wei et al., FastCLIP, arXiv 2407.01445, with gamma = 0.9",
    use="""\
For pairs of images and texts in batches that are small: u averages the sums of a sample over the epochs.
`scale` is 1 / temperature. Features have norm 1. `bias` has no part in it.

A call passes `query_state=`, (M,), fp32 or fp64, on the device of the features: the logarithms of u of its queries.
The call writes the next ones into that tensor. It has no gradient, and does not travel between ranks.
Begin with `-torch.inf`, which means that a sample was never visited: then u = g. So does any state below -5000.
Without gradients the state is written, too: pass a copy to keep it. Activation checkpointing of the loss writes twice.

The caller keeps a state for each sample, [as is shown below](#states-of-samples), and calls once for each direction.
`sogclr_clip` has both in one call, of half the products, where query i and key i are a pair.
The temperature that multiplies the sum is a constant: `scale` learns through g alone, as its query's share of g / u.
SogCLR and FastCLIP-v1 do not learn it: pass a number.
FastCLIP-v3 learns it with `rho`: add `((u + v).mean() + 2 * rho) / scale` to the loss, of the states after both calls.
Another gamma is a loss of one's own. A schedule writes `detach(query_weight)` for gamma, and passes it.""",
)

SOGCLR_CLIP = LossSpec(
    name="sogclr_clip",
    formula=mean_over_queries(_of_query) + mean_over_keys(_of_key),
    positives="diagonal",
    doc="SogCLR in both directions: each query and each key has a moving average in place of the batch's sum.",
    source="Yuan et al., arXiv 2202.12387, algorithm 1; Wei et al., FastCLIP, arXiv 2407.01445, with gamma = 0.9",
    use="""\
For pairs of images and texts in batches that are small: what `sogclr` has in two calls, in one call and one sweep.
`scale` is 1 / temperature. Features have norm 1. `bias` has no part in it.

A call passes `query_state=`, (M,), and `key_state=`, (N,), the logarithms of u of its queries and of v of its keys.
Both are fp32 or fp64, on the device of the features, and two tensors. The call writes the next ones into them.
What is said of a state of `sogclr` is true of either.

Each rank has as many keys as queries, query i and its own key on one rank, which passes the states of both.
The caller keeps both states for each sample, [as is shown below](#states-of-samples).
SogCLR and FastCLIP-v1 do not learn the temperature: pass a number.
FastCLIP-v3 learns it with `rho`: add `((u + v).mean() + 2 * rho) / scale` to the loss, of the states after the call.
Another gamma is a loss of one's own. A schedule writes `detach(query_weight)` and `detach(key_weight)`.""",
)

BUILTIN_LOSSES: dict[str, LossSpec] = {
    spec.name: spec
    for spec in (
        CLIP,
        INFONCE,
        INFONCE_OUT,
        INFONCE_IN,
        DISTILL,
        DISTILL_BOTH,
        DISTILL_CLIP,
        RINCE,
        SOGCLR,
        SOGCLR_CLIP,
        MIL_NCE,
        MIL_NCE_MULTI,
        GEMINI,
        GIST,
        CWCL,
        SIGLIP,
        SIGLIP_MULTI,
        SPECTRAL,
        NTXENT,
        FOUR_BLOCK,
        THREE_BLOCK,
        THREE_BLOCK_HARD,
        DCL,
        DCLW,
        DEBIASED,
        HARD_NEGATIVE,
        SUPCON_OUT,
        SUPCON_IN,
    )
}
