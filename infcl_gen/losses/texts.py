"""A derived loss as text: formulas for people, and what the templates of loss.py read."""

from typing import Any

from sympy import Expr, diff

from infcl_gen.losses.derive import Derivation
from infcl_gen.losses.language import is_positive, scale, z
from infcl_gen.losses.printers import dense_code, display, p, torch_code

_PAIR = {"x": "x_ij", "z": "z_ij", "r": "r_i", "c": "c_j", "p": "p_i"}


def formulas_of(derivation: Derivation) -> dict[str, str]:
    """The derivation for people: ASCII formulas by the name of the quantity."""
    slope = display(diff(derivation.logit, z), _PAIR)
    slope = "" if slope == "1" else f" * {_wrapped(slope)}"
    dx_dscale = display(diff(derivation.logit, scale), _PAIR)
    diagonal = derivation.spec.positives == "diagonal"
    return {
        "logit": f"x_ij = {display(derivation.logit, _PAIR)}, z_ij = q_i . k_j",
        **_statistics(derivation),
        "positive": "p_i = x_ii" if diagonal else "p_i = x_ij where j = labels[i]",
        "loss": f"L = 1/M * ({' + '.join(_terms(derivation))})",
        "dL/dx": f"g_ij = 1/M * ({_gradient(derivation)})",
        "dq": f"dq_i = sum_j g_ij{slope} * k_j",
        "dk": f"dk_j = sum_i g_ij{slope} * q_i",
        "dscale": f"dscale = sum_ij g_ij * {_wrapped(dx_dscale)} = {_dscale(derivation)}",
        "dbias": f"dbias = {_dbias(derivation)}",
    }


def _statistics(derivation: Derivation) -> dict[str, str]:
    found = {}
    if derivation.has_queries:
        found["query_statistic"] = "r_i = logsumexp_j x_ij"
    if derivation.has_keys:
        found["key_statistic"] = "c_j = logsumexp_i x_ij"
    return found


def _terms(derivation: Derivation) -> list[str]:
    terms, pair = [], derivation.form.pair_term
    if derivation.has_queries:
        terms.append(f"sum_i ({display(derivation.query_term, _PAIR)})")
    if derivation.has_keys:
        terms.append(f"sum_j ({display(derivation.key_term, {**_PAIR, 'p': 'p_j'})})")
    if pair and pair.other == pair.positive:
        terms.append(f"sum_ij {display(pair.other, _PAIR)}")
    elif pair:
        other, positive = (display(term, names) for term, names in ((pair.other, _PAIR), (pair.positive, {"x": "p_i"})))
        terms += [f"sum_i ({positive})", f"sum_ij [j != positive(i)] * ({other})"]
    return terms


def _gradient(derivation: Derivation) -> str:
    """M * dL/dx_ij."""
    if derivation.pair_slope:
        slopes = (derivation.pair_slope.other, derivation.pair_slope.positive)
        other, positive = (display(slope, _PAIR) for slope in slopes)
        return other if other == positive else f"{positive} if j = positive(i) else {other}"
    shares = {
        "exp(x_ij - r_i)": derivation.query_share,
        "exp(x_ij - c_j)": derivation.key_share,
        "[j = positive(i)]": derivation.positive_share,
    }
    g = ""
    for text, share in shares.items():
        if share:
            sign = (" - " if share < 0 else " + ") if g else ("-" if share < 0 else "")
            g += sign + text if abs(share) == 1 else f"{sign}{abs(share)!r} * {text}"
    return g


def _dscale(derivation: Derivation) -> str:
    factor, dots = display(derivation.dscale_factor / derivation.gradient_factor), "sum_i q_i . dq_i"
    found = {"0": "0", "1": dots}.get(factor, f"{factor} * {dots}")
    rest = derivation.dscale_rest
    return found if rest == 0 else f"{found} + {_wrapped(display(rest))} * sum_ij g_ij"


def _dbias(derivation: Derivation) -> str:
    if not derivation.pair_slope or derivation.dbias_factor == 0:
        return display(derivation.dbias)
    factor = display(derivation.dbias_factor)
    return "sum_ij g_ij" if factor == "1" else f"{_wrapped(factor)} * sum_ij g_ij"


def loss_context(derivation: Derivation) -> dict[str, Any]:
    """The names in torch/loss*.py.jinja: torch source and literals."""
    form, spec = derivation.form, derivation.spec
    labels = spec.positives == "label"
    dense_classes = "torch.eye(len(x), dtype=x.dtype, device=x.device)"
    if labels:
        dense_classes = "torch.zeros_like(x).scatter_(1, labels[:, None], 1.0)"
    reductions = (
        ("r", derivation.has_queries, "torch.logsumexp(x, dim=1)"),
        ("c", derivation.has_keys, "torch.logsumexp(x, dim=0)"),
        ("is_positive", form.formula.has(is_positive), dense_classes),
        ("p", form.formula.has(p), "x.gather(1, labels[:, None]).squeeze(1)" if labels else "x.diagonal()"),
    )
    literals = ("has_queries", "has_keys", "query_share", "key_share", "positive_share", "positive_rest")
    printed = ("logit", "gradient_factor", "dscale_factor")
    return {
        **{name: getattr(derivation, name) for name in literals},
        **{name: torch_code(getattr(derivation, name)) for name in printed},
        **_pair_context(derivation),
        "name": spec.name,
        "formulas": "\n".join(formulas_of(derivation).values()),
        "positives": spec.positives,
        "labels": labels,
        "dense_arguments": "x: Tensor" + ", labels: Tensor" * labels,
        "with_labels": ", labels" * labels,
        "and_positives": " and the (M,) positives" * labels,
        "labels_type": "Tensor | str | None" if labels else "Tensor | None",
        "dbias": float(derivation.dbias),
        "dlogit_dz": torch_code(derivation.dlogit_dz) if derivation.slope is None else "torch.ones_like(z)",
        "query_term": torch_code(derivation.query_term) if derivation.has_queries else "torch.zeros_like(p)",
        "key_term": torch_code(derivation.key_term) if derivation.has_keys else "torch.zeros_like(c)",
        "reductions": "\n".join(f"{name} = {code}" for name, used, code in reductions if used),
        "loss": dense_code(form.formula, {"queries": "len(x)"}),
    }


def _pair_context(derivation: Derivation) -> dict[str, Any]:
    """What loss.py of a sum over pairs has instead of shares."""
    term, slope = derivation.form.pair_term, derivation.pair_slope
    if term is None or slope is None:
        return {}
    of_x = {"pair_term": term.other, "pair_slope": slope.other}
    of_p = {"positive_term": term.positive, "positive_slope": slope.positive}
    numbers = {name: getattr(derivation, name) for name in ("dscale_rest", "dbias_factor")}
    return {
        **{name: _tensor_code(expression, {}) for name, expression in of_x.items()},
        **{name: _tensor_code(expression, {"x": "p"}) for name, expression in of_p.items()},
        **{name: torch_code(expression) for name, expression in numbers.items()},
    }


def _tensor_code(expression: Expr, names: dict[str, str]) -> str:
    """Torch source whose value is a tensor like x, also where the expression is a constant."""
    code = torch_code(expression, names)
    return f"torch.full_like({names.get('x', 'x')}, {code})" if expression.is_number else code


def _wrapped(text: str) -> str:
    return f"({text})" if any(operator in text for operator in (" + ", " - ", " / ", " * ")) else text
