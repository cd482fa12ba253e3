"""A stand-in for a generated package: its loss.py alone, with the results of a chosen dense computation."""

import sys
import types

import jinja2
import torch

from infcl_gen.emission.render import template_folder
from infcl_gen.losses import LossSpec, derive, loss_template_context
from infcl_gen.verification.oracle import LossAndGrads


def dense_package(spec: LossSpec) -> types.ModuleType:
    """A module with `loss`, `reference` and SPEC of a package for `spec`, importable like one."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template("torch/loss.py.jinja").render(loss_template_context(derive(spec)))
    name = f"dense_package_{spec.name}_{abs(hash(text))}"
    package, loss = types.ModuleType(name), types.ModuleType(f"{name}.loss")
    exec(compile(text, f"{name}/loss.py", "exec"), loss.__dict__)
    package.loss, package.reference = loss, loss.reference  # type: ignore[attr-defined]
    package.__path__ = []
    package.SPEC = {"positives": spec.positives, "problem": {"precision": "default"}}  # type: ignore[attr-defined]
    sys.modules |= {name: package, f"{name}.loss": loss}
    return package


def by_shares(
    package: types.ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    bias: float | None = None,
    labels: torch.Tensor | None = None,
    positive_share: float | None = None,
) -> LossAndGrads:
    """What a correct kernel computes: the derived gradient in the statistics' dtype, g rounded to the features'."""
    loss = package.loss
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    number = {"dtype": statistics}
    scale, bias = torch.tensor(scale, **number), torch.tensor(bias or 0.0, **number)
    upcast_q, upcast_k = q.to(statistics), k.to(statistics)
    z = upcast_q @ upcast_k.T
    x = loss.logit(z, scale, bias)
    rows = torch.arange(len(q))
    positives = rows if labels is None else labels
    r, c, p = x.logsumexp(1), x.logsumexp(0), x[rows, positives]
    value = loss.query_term(r, p).sum()
    g = loss.QUERY_SHARE * (x - r[:, None]).exp()
    if loss.HAS_KEYS:
        value = value + loss.key_term(c, p).sum()
        g = g + loss.KEY_SHARE * (x - c).exp()
    g[rows, positives] += loss.POSITIVE_SHARE if positive_share is None else positive_share
    g = g * loss.dlogit_dz(z, scale, bias)
    exponent = 14 if q.dtype == torch.float16 else 0
    rounded = (g * 2**exponent).to(q.dtype).to(statistics) / 2**exponent
    acc_q, acc_k = rounded @ upcast_k, rounded.T @ upcast_q
    factor = loss.gradient_factor(scale, bias) / len(q)
    dscale = loss.dscale_factor(scale, bias) * (upcast_q * acc_q).sum() / len(q)
    dbias = torch.tensor(loss.DBIAS, **number)
    return LossAndGrads(
        value / len(q), (acc_q * factor).to(q.dtype), (acc_k * factor).to(q.dtype), dscale, dbias
    )
