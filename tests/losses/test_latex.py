"""Losses in LaTeX: built-in ones as their papers write them, and text that LaTeX can set for all others."""

import re

import pytest

from infcl_gen.losses import aligned, derive, formulas_of, latex_of
from tests.losses.specs import DERIVABLE

X = r"x_{ij} = s z_{ij} + b, \quad z_{ij} = q_i \cdot k_j"
SAME, OTHER = r"\mathrm{id}_j = \mathrm{id}_i", r"\mathrm{id}_j \ne \mathrm{id}_i"
G = r"g_{ij} = \frac{\partial L}{\partial x_{ij}} = \frac{1}{M} "
SIGMOIDS = (
    r"\begin{cases}- \sigma{\left(- x_{ij} \right)} & %s \\ \sigma{\left(x_{ij} \right)} & \text{else}\end{cases}"
)
WRITTEN = {
    "clip": {
        "logit": X,
        "query_statistic": r"r_i = \log \sum_j e^{x_{ij}}",
        "key_statistic": r"c_j = \log \sum_i e^{x_{ij}}",
        "positive": "p_i = x_{ii}",
        "loss": r"L = \frac{1}{M} \Big( \sum_i \frac{r_i - p_i}{2} + \sum_j \frac{c_j - p_j}{2} \Big)",
        "dL/dx": G + r"\Big( \frac{e^{x_{ij} - r_i}}{2} + \frac{e^{x_{ij} - c_j}}{2} - \left[j = i\right] \Big)",
        "dq": r"\frac{\partial L}{\partial q_i} = \sum_j g_{ij}\, s\, k_j",
        "dk": r"\frac{\partial L}{\partial k_j} = \sum_i g_{ij}\, s\, q_i",
        "dscale": r"\frac{\partial L}{\partial s} = \sum_{ij} g_{ij}\, z_{ij}",
        "dbias": r"\frac{\partial L}{\partial b} = 0",
    },
    "not_balanced": {
        "positive": r"p_i = x_{i \ell_i}",
        "loss": r"L = \frac{1}{M} \sum_i \left(r_i - \frac{p_i}{2}\right)",
        "dL/dx": G + r"\Big( e^{x_{ij} - r_i} - \frac{\left[j = \ell_i\right]}{2} \Big)",
        "dbias": r"\frac{\partial L}{\partial b} = \frac{1}{2}",
    },
    "infonce_without_ids": {
        "mask": rf"w_{{ij}} = 0 \text{{ where }} {SAME} \text{{ and }} j \ne \ell_i, \text{{ else }} 1",
        "query_statistic": r"r_i = \log \sum_j w_{ij} e^{x_{ij}}",
        "dL/dx": G + r"\Big( w_{ij} e^{x_{ij} - r_i} - \left[j = \ell_i\right] \Big)",
    },
    "siglip": {
        "loss": r"L = \frac{1}{M} \Big( \sum_i \log{\left(1 + e^{- x_{ii}} \right)}"
        r" + \sum_{j \ne i} \log{\left(1 + e^{x_{ij}} \right)} \Big)",
        "dL/dx": G + SIGMOIDS % "j = i",
        "dbias": r"\frac{\partial L}{\partial b} = \sum_{ij} g_{ij}",
    },
    "siglip_multi": {
        "loss": rf"L = \frac{{1}}{{M}} \Big( \sum_{{{SAME}}} \log{{\left(1 + e^{{- x_{{ij}}}} \right)}}"
        rf" + \sum_{{{OTHER}}} \log{{\left(1 + e^{{x_{{ij}}}} \right)}} \Big)",
        "dL/dx": G + SIGMOIDS % SAME,
    },
    "squares_by_id": {
        "loss": r"L = \frac{1}{M} \Big( \sum_i \left(x_{ii} - 1\right)^{2}"
        rf" + \sum_{{\substack{{j \ne i \\ {SAME}}}}} \left(x_{{ij}} - \frac{{1}}{{2}}\right)^{{2}}"
        rf" + \sum_{{\substack{{j \ne i \\ {OTHER}}}}} x_{{ij}}^{{2}} \Big)",
        "dL/dx": G + rf"\begin{{cases}}2 x_{{ij}} - 2 & j = i \\ 2 x_{{ij}} - 1 & {SAME} \\"
        r" 2 x_{ij} & \text{else}\end{cases}",
    },
    "soft_capped": {
        "logit": r"x_{ij} = 30 \tanh{\left(\frac{s z_{ij}}{30} \right)} + b, \quad z_{ij} = q_i \cdot k_j",
        "dq": r"\frac{\partial L}{\partial q_i} = \sum_j g_{ij}\,"
        r" s \left(1 - \tanh^{2}{\left(\frac{s z_{ij}}{30} \right)}\right)\, k_j",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_loss_as_it_is_written(name: str) -> None:
    formulas = latex_of(derive(DERIVABLE[name]))
    assert WRITTEN[name].items() <= formulas.items()
    assert set(formulas) == set(formulas_of(derive(DERIVABLE[name]))) - (
        {"positive"} if "p_i" not in str(formulas) else set()
    )


@pytest.mark.parametrize("name", DERIVABLE)
def test_groups_are_closed_and_every_line_has_one_alignment(name: str) -> None:
    text = aligned(latex_of(derive(DERIVABLE[name])).values())
    assert text.count("{") == text.count("}") and text.count(r"\left") == text.count(r"\right")
    assert sorted(re.findall(r"\\begin{(.*?)}", text)) == sorted(re.findall(r"\\end{(.*?)}", text))
    outside = re.sub(r"\\begin{cases}.*?\\end{cases}", "", text).splitlines()[1:-1]
    assert all(line.count("&") == 1 for line in outside)
    assert not re.search(r"scale|bias|is_positive|same_id|Symbol|\+ -|\\operatorname", text)
