"""The tests' own dense losses, and a stand-in for a generated package: its loss.py alone, with chosen results."""

import dataclasses
import functools
import math
import sys
import types
from typing import Any

import jinja2
import torch
from torch import Tensor

from infcl_gen.emission.lower import loss_template
from infcl_gen.files import template_folder
from infcl_gen.losses import LossSpec, derive, loss_context
from infcl_gen.verification.oracle import LossAndGrads

# What multiplies the cross-entropies of queries and of keys against a teacher, and CLIP's loss.
DISTILLED = {
    "distill": (1.0, 0.0, 0.0), "distill_both": (0.5, 0.5, 0.0), "distill_clip": (0.5, 0.5, 1.0),
    "distill_apart": (0.25, 0.75, 0.1),
}  # fmt: skip


def dense_loss(
    name: str,
    q: Tensor,
    k: Tensor | None,
    scale: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
    labels: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    negatives: Tensor | None = None,
    query_state: Tensor | None = None,
    key_state: Tensor | None = None,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    guide_queries: Tensor | None = None,
    guide_keys: Tensor | None = None,
) -> Tensor:
    """A loss as its definition says it, over all pairs, differentiable, in the dtype of its arguments.

    Nothing here comes from the generator: neither formulas nor code. "soft" is clip with logits capped at 20. "siglip"
    is algorithm 1 of arXiv 2303.15343; "siglip_multi" is the same with labels 1 for all pairs of one id. "clip_ids" and
    "infonce_ids" leave out keys of the query's id but its positive, and queries of the key's id but its own. "rince" is
    the pseudo code of arXiv 2201.04309 with q = 0.5 and lam = 0.01. "margin" is infonce with 0.3 taken from the logit
    of each positive. "decoupled" has no positives in its sums, as DCL of arXiv 2110.06848 between two modalities;
    "decoupled_clip" is the mean of that and of the other direction; "decoupled_ids" is log(1 + e^(r - p)) of that r,
    without keys of the query's id. "angular" is infonce with 0.3 added to the angle of each positive and logits capped
    at 20; "debiased_keys" takes a tenth of the keys for positives. "ntxent" is equation 1 of arXiv 2002.05709: rows
    against all other rows, of which half the batch on is the other view. "weighted" is infonce with a weight for each
    query; "hard" is the same with further keys of each query in its sum; "gemini" is the equation of arXiv 2503.07891
    with the positive in its sum. "smooth" is infonce with torch's label_smoothing of 0.1, "smooth_clip" clip with that
    of both sides; "smooth_rince" is rince less a fifth of the mean logit. "weighed_sides_ids" is the mean of both
    directions of infonce_ids, with a weight for each query and each key.
    "hard_keys" has the negatives' sums of e^(5x/2) and e^x; "squared_weights" weighs infonce, and adds log(1 +
    the fourth root of the sum of e^(x/2) over that of e^x). "weighed_by_all" weighs r + r2/2 - 2p, of the sums of e^x
    and e^(2x), by the caller's weight, times 2 - e^(z + p/3) over the mean of these of all positives, and adds r.
    "distill" is the first cross-entropy of OpenCLIP's `DistillClipLoss.dist_loss`, with the guide's similarities as the
    teacher's logits; "distill_both" is the mean of both, and "distill_clip" adds that class's contrastive loss.
    "distill_apart" is a quarter of the first, three quarters of the second, and a tenth of CLIP's loss. "sogclr" is one
    direction of arXiv 2407.01445 with gamma = 0.9: g / (u + eps) of each query, times the temperature; "sogclr_clip" is
    the sum of both. Losses of one side follow in `_dense_of_rows`, those with any number of positives in
    `_dense_of_ids`. "tempered_" before a name: the similarities of each query, and of each key, are multiplied by
    numbers of their own. "cwcl" is the loss of arXiv 2309.14580 in one direction, "cwcl_both" the mean of that and
    infonce of keys; "cwcl_rince" is rince with 0.6 of the mean that cwcl has, whose weights are 0.7 - 0.2 u_i . v_j.
    "mil_nce" is the objective of arXiv 1912.06430 with one candidate of each clip: its pair, and its negatives, which
    are the other captions of its clip and the other clips of its caption. "mil_nce_multi" is the same with any number
    of candidates of a clip, the captions of its id. "weighed_by_column" weighs log(1 + e^(r - p)), r of a query's other
    keys, by the logistic function of c - p, c of its key's other queries, and adds a quarter of log(1 + e^(c - p)).
    "spectral" is L(f) of arXiv 2106.04156 with its mu, over M - 1, where `scale` is mu / (M - 1).
    "gist" is the loss of arXiv 2402.16829 of queries against keys alone, query by query, with the margin 0 of sentence-
    transformers.
    """
    if query_scale is not None:
        q, name = query_scale.to(q)[:, None] * q, name.removeprefix("tempered_")
    if key_scale is not None and k is not None:
        k = k * key_scale.to(k)[:, None]
    if name.startswith("supcon"):
        assert k is None and key_ids is None and labels is None and query_ids is not None
        itself = torch.eye(len(q), dtype=torch.bool, device=q.device)
        return _dense_of_ids(name[-3:], scale * (q @ q.T) + bias, query_ids[:, None] == query_ids, ~itself)
    if name in ("infonce_out", "infonce_in"):
        assert k is not None and query_ids is not None and key_ids is not None and labels is None
        same_id = query_ids[:, None] == key_ids
        return _dense_of_ids(name[-3:], scale * (q @ k.T) + bias, same_id, torch.ones_like(same_id))
    if k is None:
        further = None if negatives is None else further_of_pairs(q, negatives, labels)
        return _dense_of_rows(name, q @ q.T, scale, bias, labels, further)
    if name.startswith("distill"):
        assert guide_queries is not None and guide_keys is not None
        teacher, student = guide_queries.to(q) @ guide_keys.to(q).T, scale * (q @ k.T) + bias
        of_queries, of_keys, clip = DISTILLED[name]
        of_sides = ((of_queries, teacher, student), (of_keys, teacher.T, student.T))
        total: Any = 0.0
        for weight, t, s in of_sides[: 1 + (of_keys > 0)]:
            total = total - weight * (t.softmax(dim=1) * s.log_softmax(dim=1)).sum(dim=1).mean(dim=0)
            if clip:
                total = total + clip * torch.nn.functional.cross_entropy(s, torch.arange(len(s), device=s.device)) / 2
        return total
    if name == "gist":
        assert guide_queries is not None and guide_keys is not None
        terms = []
        for place, (query, u) in enumerate(zip(q, guide_queries.to(q), strict=True)):
            similar = guide_keys.to(q) @ u
            counts = similar <= similar[place]  # of which the positive is one
            terms.append((scale * (k[counts] @ query)).logsumexp(0) - scale * (k[place] @ query))
        return torch.stack(terms).mean()
    if name == "mil_nce":
        terms = []
        for place in range(len(q)):
            others = [each for each in range(len(q)) if each != place]
            of_clip, of_caption = scale * (k[others] @ q[place]) + bias, scale * (q[others] @ k[place]) + bias
            pair = scale * (q[place] @ k[place])[None] + bias
            terms.append(torch.cat((pair, of_clip, of_caption)).logsumexp(0) - pair[0])
        return torch.stack(terms).mean()
    if name == "mil_nce_multi":
        assert query_ids is not None and key_ids is not None
        terms = []
        for place, own_id in enumerate(query_ids.tolist()):
            candidates = [each for each, one in enumerate(key_ids.tolist()) if one == own_id]
            clips = [each for each in range(len(q)) if each != place]
            if not candidates:
                terms.append(0.0 * scale * q[place].sum())
                continue
            of_clip = scale * (k @ q[place]) + bias
            of_candidates = (scale * (q[clips] @ k[candidates].T) + bias).flatten()
            terms.append(torch.cat((of_clip, of_candidates)).logsumexp(0) - of_clip[candidates].logsumexp(0))
        return torch.stack(terms).mean()
    if name == "weighed_by_column":
        x = scale * (q @ k.T) + bias
        of_row, of_column = (
            [torch.log1p((torch.cat((line[:i], line[i + 1 :])) - line[i]).exp().sum()) for i, line in enumerate(each)]
            for each in (x, x.T)
        )
        r, c = torch.stack(of_row), torch.stack(of_column)
        return (-torch.expm1(-c) * r + c / 4).mean()  # the logistic function of log(e^c - 1)
    own = torch.arange(len(q), device=q.device) if labels is None else labels
    logits = scale * (q @ k.T)
    logits = (20.0 * torch.tanh(logits / 20.0) if name == "soft" else logits) + bias
    if name == "siglip":
        labels = 2.0 * torch.eye(len(q), dtype=logits.dtype, device=q.device) - 1.0
        return -torch.nn.functional.logsigmoid(labels * logits).sum() / len(q)
    if name == "spectral":
        z, mu = q @ k.T, scale * (len(q) - 1)
        others = mu * z[~torch.eye(len(q), dtype=torch.bool, device=q.device)]
        return ((others**2).mean() - 2 * mu * z.diagonal().mean()) / (len(q) - 1)
    if name.startswith("cwcl") and guide_queries is not None and guide_keys is not None:
        similar = guide_queries.to(q) @ guide_keys.to(q).T
        w = 0.7 - 0.2 * similar if name == "cwcl_rince" else 0.5 + 0.5 * similar
        if name == "cwcl_rince":
            rince = (-(logits.gather(1, own[:, None]).exp() ** 0.5) / 0.5).mean() + (
                (0.01 * logits.exp().sum(1)) ** 0.5 / 0.5
            ).mean()
            return rince - 0.6 * ((w * logits).sum(1) / w.sum(1)).mean()
        cwcl = -((w * logits.log_softmax(1)).sum(1) / w.sum(1)).mean()
        return cwcl if name == "cwcl" else (cwcl + torch.nn.functional.cross_entropy(logits.T, own)) / 2
    if query_ids is not None and key_ids is not None:
        same = query_ids[:, None] == key_ids[None, :]
        if name == "siglip_multi":
            return -torch.nn.functional.logsigmoid(torch.where(same, logits, -logits)).sum() / len(q)
        others = torch.arange(len(k), device=q.device) != own[:, None]
        name, logits = name.removesuffix("_ids"), torch.where(same & others, -torch.inf, logits)
    p = logits.gather(1, own[:, None])[:, 0]
    if name == "weighed_sides":
        assert query_weight is not None and key_weight is not None and labels is None
        of_queries = -(query_weight.to(q) * logits.log_softmax(1).diagonal()).sum() / len(q)
        return (of_queries - (key_weight.to(q) * logits.log_softmax(0).diagonal()).sum() / len(k)) / 2
    if name == "angular":  # of arXiv 1801.07698: cos(theta + 0.3) in place of cos(theta), before the cap
        z = q @ k.T
        angle = torch.cos(torch.arccos(z.gather(1, own[:, None]).clamp(-1 + 1e-12, 1 - 1e-12)) + 0.3)
        return torch.nn.functional.cross_entropy(20 * torch.tanh(scale * z.scatter(1, own[:, None], angle) / 20), own)
    if name == "debiased_keys":  # of arXiv 2007.00224, with the other keys of the query as its negatives
        count, tau = len(k) - 1, 0.1
        negatives = logits.exp().scatter(1, own[:, None], 0.0).sum(1)
        rest = torch.maximum((negatives - tau * count * p.exp()) / (1 - tau), count * torch.exp(-scale))
        return -torch.log(p.exp() / (p.exp() + rest)).mean()
    if name == "weighed_by_all":
        similar = ((q @ k.T).gather(1, own[:, None])[:, 0] + p / 3).exp()
        assert query_weight is not None
        weight = query_weight.to(q) * (2 - similar / similar.mean())
        r, r2 = logits.logsumexp(1), (2 * logits).logsumexp(1)
        return (r + weight * (r + r2 / 2 - 2 * p)).mean()
    if name == "hard_keys":
        negatives = logits.scatter(1, own[:, None], -torch.inf)
        return torch.logaddexp((2.5 * negatives).logsumexp(1) - negatives.logsumexp(1) - p, 0.0 * p).mean()
    if name == "squared_weights":
        ratio = (logits / 2).logsumexp(1) - logits.logsumexp(1)
        assert query_weight is not None
        return (query_weight.to(q) * (logits.logsumexp(1) - p) + torch.log1p((ratio / 4).exp())).mean()
    if name in ("rince", "smooth_rince"):
        rince = (-(p.exp() ** 0.5) / 0.5 + (0.01 * logits.exp().sum(1)) ** 0.5 / 0.5).mean()
        return rince - logits.mean() / 5 if name == "smooth_rince" else rince
    if name == "margin":
        return torch.nn.functional.cross_entropy(logits.scatter_add(1, own[:, None], -0.3 + 0 * p[:, None]), own)
    if name in ("weighted", "hard", "gemini"):
        if negatives is not None:  # in the row of their query alone
            further = scale * torch.stack([n @ row for n, row in zip(negatives.to(q), q, strict=True)]) + bias
            logits = torch.cat((logits, further), 1)
        terms = logits.logsumexp(1) - p
        return (terms if query_weight is None else query_weight.to(q) * terms).mean()
    if name == "sogclr":
        assert query_state is not None and bias is not None
        log_g, log_u = moving_average(q @ k.T, scale, own, query_state)
        return (log_g - torch.logaddexp(log_u, torch.tensor(1e-14).to(log_u).log())).exp().mean() / torch.as_tensor(
            scale
        ).detach()
    if name == "sogclr_clip":  # both directions; a key's positive is its own query
        assert query_state is not None and key_state is not None and labels is None
        sides, eps = zip((q @ k.T, k @ q.T), (query_state, key_state), strict=True), torch.tensor(1e-14).to(q).log()
        logs = [moving_average(z, scale, own, state) for z, state in sides]
        terms = [(log_g - torch.logaddexp(log_u, eps)).exp() for log_g, log_u in logs]
        return (terms[0].mean() + terms[1].mean()) / torch.as_tensor(scale).detach()
    if name == "decoupled_clip":
        negatives = logits.masked_fill(torch.eye(len(q), dtype=torch.bool, device=q.device), -torch.inf)
        return (negatives.logsumexp(1) + negatives.logsumexp(0) - 2 * p).mean() / 2
    if name == "decoupled":
        negatives = logits.scatter(1, own[:, None], -torch.inf).logsumexp(1)
        return (torch.logaddexp(negatives, p) - p if query_ids is not None else negatives - p).mean()
    smoothing = 0.1 if name.startswith("smooth") else 0.0
    by_query = torch.nn.functional.cross_entropy(logits, own, label_smoothing=smoothing)
    if name in ("infonce", "smooth"):
        return by_query
    assert name in ("clip", "soft", "smooth_clip"), f"no definition of {name} in dense_loss"
    assert labels is None
    return (by_query + torch.nn.functional.cross_entropy(logits.T, own, label_smoothing=smoothing)) / 2.0


def moving_average(z: Tensor, scale: Tensor, own: Tensor, state: Tensor, gamma: float = 0.9) -> tuple[Tensor, Tensor]:
    """Of each query, from similarities (M, N), the logarithms of g = mean over j != i of e^((z_ij - z_ii) / tau), and
    of u after the update, which has no gradient: u = g where it was never visited, its logarithm -inf."""
    differences = scale * (z - z.gather(1, own[:, None]))
    log_g = differences.scatter(1, own[:, None], -torch.inf).logsumexp(1) - math.log(z.shape[1] - 1)
    log_u = torch.logaddexp(state.to(z) + math.log(1 - gamma), log_g + math.log(gamma))
    return log_g, torch.where(state == -torch.inf, log_g, log_u).detach()


def _dense_of_ids(form: str, x: Tensor, same_id: Tensor, compared: Tensor) -> Tensor:
    """Equations 2 ("out") and 3 ("_in") of arXiv 2004.11362 with a mean over the rows, row by row, from the logits, and
    which pairs are of one id, and which are compared. A row without positives has a term of 0."""
    terms = []
    for logits, same, others in zip(x, same_id, compared, strict=True):
        of_positives = logits[others].log_softmax(0)[same[others]]
        if not len(of_positives):
            terms.append(0.0 * x.sum())
        elif form == "out":
            terms.append(-of_positives.sum() / len(of_positives))
        else:
            terms.append(-(of_positives.logsumexp(0) - torch.tensor(float(len(of_positives))).to(x).log()))
    return torch.stack(terms).mean()


def further_of_pairs(q: Tensor, negatives: Tensor, labels: Tensor | None) -> dict[int, Tensor]:
    """By the row of each query, which comes before its document, its similarities with its hard negatives."""
    own = [(i + len(q) // 2) % len(q) for i in range(len(q))] if labels is None else labels.tolist()
    queries = [i for i, other in enumerate(own) if i < other]
    return {i: each.to(q) @ q[i] for i, each in zip(queries, negatives, strict=True)}


def _dense_of_rows(
    name: str,
    z: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    labels: Tensor | None,
    further: dict[int, Tensor] | None,
) -> Tensor:
    """A loss of one side from its similarities (M, M), and those of hard negatives.

    "dcl" is equation 6 of arXiv 2110.06848, with a mean, and "dclw" the same with the weights of DCLW: that of a
    positive is 2 - e^(z / 0.5) over the mean of these of all rows. "debiased" is `criterion` of the authors' code of
    arXiv 2007.00224 with tau_plus = 0.1, each row's exponentials over that of its largest logit. "hard_negative" is
    `criterion` of the authors' code of arXiv 2010.04592 with beta = 1, likewise. "weighed_of_rows" has the sum of e^x
    and that of e^(x / 3), of all other rows. "rince_of_rows" has
    the square roots of the sum and of the positive; "margin_of_rows" is ntxent with 0.3 taken from each positive.
    "capped_of_rows" caps the logits of negatives at 20, and takes the positive's similarity as it is. "four_block" is
    the partition function of arXiv 2308.03281 over samples, with all its terms as they are printed; labels say which
    rows are pairs. "weighed_by_partner" weighs each row's softplus by how wrong the other row of its pair is, and adds
    a quarter of that row's.
    """
    count, rows = len(z), torch.arange(len(z), device=z.device)
    own = rows.roll(count // 2) if labels is None else labels
    x = scale * z + bias
    p = x[rows, own]
    not_itself = rows[:, None] != rows
    is_negative = not_itself & (own[:, None] != rows)
    others, negatives = x[not_itself].view(count, count - 1), x[is_negative].view(count, count - 2)  # 1 where k != i
    if name == "ntxent":
        return (others.logsumexp(1) - p).mean()
    if name == "dcl":
        return (negatives.logsumexp(1) - p).mean()
    if name == "four_block":
        query, document = rows[rows < own], own[rows < own]
        of_both, of_queries, of_documents = x[query][:, document], x[query][:, query], x[document][:, document]
        itself = torch.eye(len(query), dtype=torch.bool, device=z.device)
        blocks = (
            of_both, of_queries.masked_fill(itself, -torch.inf), of_both.T, of_documents.masked_fill(itself, -torch.inf)
        )  # fmt: skip
        return (torch.cat(blocks, 1).logsumexp(1) - of_both.diagonal()).mean()
    if name in ("three_block", "three_block_hard", "four_block_apart", "of_queries_alone", "near_rows"):
        hard = {row: (each, scale * each + bias) for row, each in (further or {}).items()}
        return _dense_of_pairs(name.removesuffix("_hard"), z, x, own, hard)
    if name == "weighed_by_partner":
        wrong = negatives.logsumexp(1) - p
        cost = torch.nn.functional.softplus(wrong, threshold=100)
        return (torch.sigmoid(wrong[own]) * cost + cost[own] / 4).mean()
    if name == "dclw":
        similar = (z[rows, own] / 0.5).exp()
        return (negatives.logsumexp(1) - bias - (2 - similar / similar.mean()) * (p - bias)).mean()
    if name == "weighed_of_rows":
        of_all = (others / 3).exp().sum(1).sqrt() / 2
        return (others.logsumexp(1) + of_all - 3 * p).mean()
    if name == "hard_negative":
        if count == 2:  # there are no negatives
            return 0.0 * x.sum()
        n, tau_plus = count - 2, 0.1
        neg, pos = negatives - bias, p - bias
        # imp is e^x over that of the row's largest negative, which leaves imp * neg / imp.mean() as it is
        imp = (neg - neg.detach().amax(1, keepdim=True)).exp()
        largest = torch.maximum(neg.detach().amax(1), pos.detach())
        weighed = (imp * (neg - largest[:, None]).exp()).sum(1) / imp.mean(1)
        pos = (pos - largest).exp()
        ng = (-tau_plus * n * pos + weighed) / (1 - tau_plus)
        ng = torch.maximum(ng, n * torch.exp(-scale - largest))
        return (torch.log(pos + ng) - (p - bias - largest)).mean()
    if name == "rince_of_rows":
        return (others.exp().sum(1).sqrt() / 5 - 2 * p.exp().sqrt()).mean()
    if name == "margin_of_rows":
        return torch.log(1 + (negatives - p[:, None] + 0.3).exp().sum(1)).mean()
    if name == "capped_of_rows":
        capped = 20 * torch.tanh(scale * z / 20) + bias
        return torch.log(
            1 + (capped[is_negative].view(count, count - 2) - scale * z[rows, own, None]).exp().sum(1)
        ).mean()
    assert name == "debiased", f"no definition of {name} in dense_loss"
    largest, tau_plus, n = (others - bias).detach().amax(1), 0.1, count - 2
    pos, neg = (p - bias - largest).exp(), (negatives - bias - largest[:, None]).exp().sum(1)
    ng = torch.maximum((-tau_plus * n * pos + neg) / (1 - tau_plus), n * torch.exp(-scale - largest))
    return (torch.log(pos + ng) - (p - bias - largest)).mean()


def _dense_of_pairs(name: str, z: Tensor, x: Tensor, own: Tensor, hard: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Losses of rows in pairs that leave pairs out, sample by sample, and term by term.

    "three_block" is equation 1 of arXiv 2506.05176, with hard negatives if there are any: m of j is 0 where s_ij or its
    like exceeds the similarity of query i and its document by more than 0.1, and Z has e^x of the pair itself once.
    "four_block_apart" has the fourth block, too, with m, and the pair once. "of_queries_alone" has of each query all
    other documents and queries. "near_rows" is NT-Xent of all rows with m of each row, whose margin is 1/8.
    """
    first = [int(i) for i in torch.arange(len(x)) if i < own[i]]
    pairs, terms = [(i, int(own[i])) for i in first], []
    for i, document in pairs if name != "near_rows" else [(i, int(own[i])) for i in range(len(x))]:
        most, p = float(z[i, document].detach()) + (0.125 if name == "near_rows" else 0.1), x[i, document]
        total = [p]
        for j, other in pairs:
            if j in (i, document):
                continue
            blocks = {(i, other), (i, j), (document, other)}
            if name != "three_block":
                blocks = {"of_queries_alone": {(i, other), (i, j)}, "near_rows": {(i, j), (i, other)}}.get(
                    name, blocks | {(document, j)}
                )
            total += [x[at] for at in sorted(blocks) if name == "of_queries_alone" or float(z[at].detach()) <= most]
        for similar, logit in zip(*hard.get(i, ((), ())), strict=True):
            total += [logit] if float(similar.detach()) <= most else []
        terms.append(torch.stack(total).logsumexp(0) - p)
    return torch.stack(terms).mean()


def dense(
    name: str,
    q: Tensor,
    k: Tensor | None,
    scale: float = 1.0,
    bias: float | None = None,
    labels: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    negatives: Tensor | None = None,
    query_state: Tensor | None = None,
    key_state: Tensor | None = None,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    guide_queries: Tensor | None = None,
    guide_keys: Tensor | None = None,
    factor: float = 1.0,
) -> LossAndGrads:
    """`dense_loss` in fp64 for features of any dtype, and the gradients of `factor` times it."""
    leaves: list[Any] = [None if x is None else x.detach().double().requires_grad_() for x in (q, k)]
    leaves += [torch.tensor(x or 0.0, dtype=torch.float64, device=q.device, requires_grad=True) for x in (scale, bias)]
    own = query_weight, key_weight, negatives, query_state, key_state, query_scale, key_scale, guide_queries, guide_keys
    loss = dense_loss(name, *leaves, labels, query_ids, key_ids, *own)
    given = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(factor * loss, given, materialize_grads=True))
    gradients: list[Any] = [x if x is None else next(found) for x in leaves]
    return LossAndGrads(loss.detach(), *gradients)


@functools.cache
def _environment() -> jinja2.Environment:
    """One for all packages: it keeps compiled templates, of which one takes 0.1 s."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@functools.cache
def _loss(spec: LossSpec) -> tuple[str, types.CodeType]:
    """The name of its package, and its loss.py, compiled: 15 ms, of which examples of one loss need one."""
    derivation = derive(spec)
    text = _environment().get_template(loss_template(derivation.traits)).render(loss_context(derivation))
    name = f"dense_package_{spec.name}_{abs(hash(text))}"
    return name, compile(text, f"{name}/loss.py", "exec")


def dense_package(spec: LossSpec) -> types.ModuleType:
    """A module with `loss`, `reference` and SPEC of a package for `spec`, importable like one."""
    name, code = _loss(spec)
    package, loss = types.ModuleType(name), types.ModuleType(f"{name}.loss")
    exec(code, loss.__dict__)
    package.loss, package.reference = loss, loss.reference  # type: ignore[attr-defined]
    package.__path__ = []
    package.SPEC = {  # type: ignore[attr-defined]
        "positives": spec.positives,
        "loss": {"traits": dataclasses.asdict(derive(spec).traits)},
        "problem": {"precision": "default", "frozen": "none"},
        "plan": {"strategy": "torch", "split": False, "stash_rows": 0},
    }
    sys.modules |= {name: package, f"{name}.loss": loss}
    return package


def by_shares(
    package: types.ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    bias: float | None = None,
    labels: torch.Tensor | None = None,
    query_ids: torch.Tensor | None = None,
    key_ids: torch.Tensor | None = None,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    negatives: torch.Tensor | None = None,
    query_state: torch.Tensor | None = None,
    key_state: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    guide_queries: torch.Tensor | None = None,
    guide_keys: torch.Tensor | None = None,
    positive_share: float | None = None,
) -> LossAndGrads:
    """What a correct kernel computes: the derived gradient in the statistics' dtype, g rounded to the features'."""
    loss = package.loss
    statistics = torch.promote_types(q.dtype, torch.float32)
    number = {"dtype": statistics}
    scale, bias = torch.tensor(scale, **number), torch.tensor(bias or 0.0, **number)
    upcast_q, upcast_k = q.to(statistics), k.to(statistics)
    z = upcast_q @ upcast_k.T
    x = loss.logit(z, scale, bias)
    rows = torch.arange(len(q))
    at = rows, torch.arange(len(q)) if labels is None else labels
    own = query_weight, key_weight, negatives, query_state, key_state, query_scale, key_scale, guide_queries, guide_keys
    assert (query_ids, key_ids, *own) == (None,) * 11
    terms = _of_pairs if hasattr(loss, "pair_term") else _of_softmaxes
    value, g = terms(loss, x, at, positive_share)
    rest, dbias = torch.tensor(0.0, **number), torch.tensor(getattr(loss, "DBIAS", 0.0), **number)
    if terms is _of_pairs:
        rest, dbias = loss.dscale_rest(scale, bias) * g.sum(), loss.dbias_factor(scale, bias) * g.sum() / len(q)
    g = g * loss.dlogit_dz(z, scale, bias)
    exponent = 14 if q.dtype == torch.float16 else 0
    rounded = (g * 2**exponent).to(q.dtype).to(statistics) / 2**exponent
    acc_q, acc_k = rounded @ upcast_k, rounded.T @ upcast_q
    factor = loss.gradient_factor(scale, bias) / len(q)
    dscale = (loss.dscale_factor(scale, bias) * (upcast_q * acc_q).sum() + rest) / len(q)
    return LossAndGrads(value / len(q), (acc_q * factor).to(q.dtype), (acc_k * factor).to(q.dtype), dscale, dbias)


def _of_softmaxes(
    loss: Any, x: Tensor, at: tuple[Tensor, Tensor], positive_share: float | None
) -> tuple[Tensor, Tensor]:
    """M * L and M * dL/dx."""
    r, c, p = x.logsumexp(1), x.logsumexp(0), x[at]
    value = loss.query_term(r, p).sum()
    g = loss.QUERY_SHARE * (x - r[:, None]).exp()
    if loss.HAS_KEYS:
        value = value + loss.key_term(c, p).sum()
        g = g + loss.KEY_SHARE * (x - c).exp()
    g[at] += loss.POSITIVE_SHARE if positive_share is None else positive_share
    return value, g


def _of_pairs(loss: Any, x: Tensor, at: tuple[Tensor, Tensor], positive_share: float | None) -> tuple[Tensor, Tensor]:
    """The same of a sum over pairs; `positive_share` takes the place of the slope of positives."""
    positive = loss.positive_slope(x[at]) if positive_share is None else torch.full_like(x[at], positive_share)
    value = loss.pair_term(x).index_put(at, loss.positive_term(x[at])).sum()
    return value, loss.pair_slope(x).index_put(at, positive)
