"""Kernels by themselves, on what the small batches of `checks` do not reach; as there, what is wrong raises."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch

from infcl_gen.runtime.package import Block
from infcl_gen.runtime.statistics import Statistics
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.properties import Case, inputs_of, tensors
from tests.kernels import checks
from tests.kernels.packages import Made, module
from tests.tiers import LONG

BIG = 2.0**40


def long_strips(made: Made, device: str = "cpu") -> None:
    """Strips of several row blocks, as where few programs run at once: in small batches each has one.

    Under "exact" each strip has references of its own, which are orders apart here: those of another one overflow.
    """
    schedule: Any = module(made)._schedule
    names = [name for name in ("FORWARD_PROGRAMS", "GRADIENT_PROGRAMS") if hasattr(schedule, name)]
    exact = made.precision == "exact"
    case = Case(130, 130, 0, "", *((1000.0, None, "unnormalised") if exact else (14.3,)), seed=1)
    with mock.patch.multiple(schedule, **dict.fromkeys(names, 4 if exact else 1)):  # 4: two strips of a panel
        checks.numerics(made, case, device)


def sums_of_many_parts(made: Made, device: str = "cpu") -> None:
    """Statistics of more than MERGE_PARTS parts, and sums of more numbers than one block of a program has."""
    schedule: Any = module(made)._schedule
    kernels = schedule.kernels
    parts, rows = 2 * kernels.MERGE_PARTS.value + 5, 3
    exponents = torch.arange(parts, dtype=torch.float32, device=device)[:, None].expand(parts, rows).contiguous()
    sums = torch.full((parts, rows), 1.5, device=device)
    found = Statistics(*(torch.full((rows,), math.nan, device=device) for _ in range(2)))
    names = kernels.merge.arg_names  # partial sums, statistics and sizes of the queries
    given = (exponents, sums, *found, rows, parts, rows, 0)
    schedule.launch(kernels.merge, (1,), **dict(zip(names, given, strict=True)), num_warps=4)
    true = (exponents.double() + sums.double().log2()).mul(math.log(2)).logsumexp(0) / math.log(2)
    error = float((found.exponent.double() + found.mantissa.double().log2() - true).abs().max())
    assert error < 1e-6, f"statistics of {parts} parts are off by {error}"

    numbers = torch.ones(2500, dtype=torch.float64, device=device)
    numbers[[3, 2200]] = torch.tensor([BIG, -BIG], dtype=torch.float64, device=device)  # which cancel in fp64 only
    numbers[7] = 0.0
    expected = float(numbers.sum())
    loss = torch.full((), math.nan, device=device)
    sizes = {"parts": len(numbers), "BLOCK": 1024}
    schedule.launch(kernels.total_loss, (1,), part_sums=numbers, loss=loss, **sizes, num_warps=4)
    assert float(loss) == expected, f"{len(numbers)} parts of a loss add up to {loss}, not {expected}"
    one, zero = (torch.tensor(number, device=device) for number in (1.0, 0.0))
    dscale, _ = schedule.scalar_gradients(numbers.float(), one, zero, one, 2.0**schedule.GRADIENT_EXPONENT, 1)
    assert float(dscale) == expected, f"{len(numbers)} parts of dscale add up to {dscale}, not {expected}"


def slopes_of_all_sizes(made: Made, device: str = "cpu") -> None:
    """Slopes of logits from -95 to 85, one by one: dk is g, as queries are rows of the unit matrix. Four logits
    of 85 that a thread adds up let their strip be computed as one of large logits; a tile alone does not tell that."""
    package, rows = module(made), 64  # as many as columns of features
    generator = torch.Generator().manual_seed(6)
    for columns in ((7,), (7, 15, 23, 31)):
        x = -95.0 * torch.rand(rows, rows, generator=generator)
        for column in columns:
            x[torch.arange(rows), (torch.arange(rows) + column) % rows] = torch.linspace(0.0, 85.0, rows)
        q, k = torch.eye(rows, device=device), x.T.contiguous().to(device)
        dk = package.loss_and_grads(q, k, 1.0, 0.0)[2].cpu().T.double() * rows
        slopes = x.double().sigmoid() - torch.eye(rows, dtype=torch.float64)
        # Of x log2(e) two roundings, of a power of 2 two, of a slope four.
        allowed = (1.5 * x.abs().double() + 8) * 2.0**-24 * slopes.abs() + torch.finfo(torch.float32).smallest_normal
        wrong = ((dk - slopes).abs() / allowed).max()
        assert float(wrong) <= 1, f"a slope is off by {wrong:.2f} of what is allowed, large logits in columns {columns}"


def sizes_of_logits(made: Made, device: str = "cpu") -> None:
    """Logits near the bound of tiny ones, and a larger one at the end of a strip: terms and slopes.

    Queries are rows of a diagonal matrix, so dk is g times a number; positives of 40 have no part in it.
    """
    package, rows = module(made), made.dim
    schedule: Any = package._schedule
    generator, make = torch.Generator().manual_seed(7), schedule.term_sums
    sides = {"PANEL_ROWS": rows, "PANEL_KEYS": rows // 2, "GRADIENT_PROGRAMS": 1}  # one program for a block of keys
    factors = (1 + 0.1 * torch.rand(rows, generator=generator)).bfloat16()
    tiny = (-8.5 + 0.5 * torch.rand(rows, rows, generator=generator)).bfloat16().fill_diagonal_(40.0)
    columns = {"first": 5, "last": rows - 9}  # of the panels of a call
    others, kept = ~torch.eye(rows, dtype=torch.bool), []

    def seen(*of: Any) -> torch.Tensor:
        kept.append(make(*of))
        kept[-1][3] = 1.0  # what the first launch reads: it begins with tiny logits
        return kept[-1]

    cases = [(panel, x, size, ()) for panel in columns for x, size in ((-7.5, 1), (-5.5, 2), (-4.0, 2), (100.0, 3))]
    cases += [("first", -4.0, 3, 13), ("first", 100.0, 3, 13)]  # a NaN whose column the same thread adds up
    for panel, largest, size, missing in cases:
        k = tiny.clone()
        k[-1, columns[panel]] = largest
        k[:, missing] = math.nan
        x = factors[:, None].double() * k.double()
        with mock.patch.object(schedule, "term_sums", seen), mock.patch.multiple(schedule, **sides):
            call = package.loss_and_grads(factors.diag().to(device), k.T.contiguous().to(device), 1.0, 0.0)
        found = [each.cpu().double() for each in call]
        terms, slopes = torch.nn.functional.softplus(x) * others, x.sigmoid() * others
        rounded = (slopes.bfloat16() * factors[:, None]).double()
        off = (found[2].T * rows != rounded)[others & ~k.isnan()].double().mean()
        where = f"a logit of {largest} in the {panel} panel"
        met = float(kept[-1][2:].max())
        assert met == size, f"{where}: a size of {met:g}"
        for name, value, true in (("loss", found[0], terms.sum()), ("dbias", found[4], slopes.sum())):
            error = abs(float(value * rows / true) - 1)
            assert missing or error < 7e-7, f"{where}: {name} is off by {error:.1e}"
        assert float(off) < 2e-3, f"{where}: {off:.1%} of the slopes are off by a rounding"


def sizes_handed_on(made: Made, device: str = "cpu") -> None:
    """The size of logits that a launch begins with, and what it hands on. What it writes it does not read."""
    schedule: Any = module(made)._schedule
    kernels = schedule.kernels
    rows, keys = kernels.LONG_STRIP.value * kernels.GRADIENT_ROWS.value, kernels.GRADIENT_KEYS.value
    q, k = (torch.zeros(n, made.dim, dtype=schedule.OPERAND_DTYPE, device=device) for n in (rows, keys))
    one, long, short = torch.ones((), device=device), {"GRADIENT_PROGRAMS": 1}, {"GRADIENT_PROGRAMS": rows}
    cases = [(0, -9, 1), (0, -5, 2), (1, -9, 1), (1, -5, 2), (2, -9, 2), (3, -9, 3)]
    for strips, before, logit, expected in (*((long, *case) for case in cases), (short, 0, -9, 2)):
        with mock.patch.multiple(schedule, PANEL_ROWS=rows, PANEL_KEYS=keys, **strips):
            sums, scratch = schedule.term_sums(q, keys), schedule.backward_scratch(rows, keys, device)
            sums[2], sums[3] = 3.0, float(before)  # the first launch reads row 3 and writes row 2
            block = Block(q, k, one, one * logit, -2 * rows, 0, None, None, sums[:0], sums=sums)  # without positives
            schedule._gradient_panel(block, scratch)
        met = float(sums[2, 0])
        assert met == expected, f"{logit} after {before}: {met:g}, not {expected}"
        terms, slopes = (float(each.sum()) / (rows * keys) for each in sums[:2])
        true = math.log1p(math.exp(logit)), 1 / (1 + math.exp(-logit))
        for found, wanted in zip((terms, slopes), true, strict=True):
            assert abs(found / wanted - 1) < 1e-6, f"{logit} after {before}: {found}, not {wanted}"


def thresholds_of_the_forward(made: Made, device: str = "cpu") -> None:
    """A strip is computed again from a row's sum of 2^-80 down and of 2^100 up on, and not before."""
    schedule: Any = module(made)._schedule
    keys, rows = 64, 96  # 64 rows are sampled: 0, 1, 3, 4, 6, ...
    scale, zero = torch.tensor(math.log(2.0), device=device), torch.zeros((), device=device)

    def flagged(row: int, value: float) -> bool:
        """Whether a row of y = `value` among rows of y = 0, of which each key adds 2^10 to a sum, is flagged."""
        q, k = (torch.zeros(n, made.dim, dtype=schedule.OPERAND_DTYPE, device=device) for n in (rows, keys))
        k[:, 0], q[row, 0] = 1.0, value
        scratch = schedule.forward_scratch(q, keys)
        schedule._forward_panel(Block(q, k, scale, zero, 0, 0, None, None, None), scratch)
        return bool(scratch.flags.any())

    for row, value, expected in ((3, -96, False), (3, -97, True), (2, 84, False), (2, 85, True)):
        found = flagged(row, value)
        assert found == expected, f"a row's sum of 2^{value + 16} is {'' if found else 'not '}flagged"


def threshold_of_the_backward(made: Made, device: str = "cpu") -> None:
    """A strip is computed again where a row lies more than SPREAD = 80 orders below the reference of its keys."""
    schedule: Any = module(made)._schedule
    count = 32
    q, k = (torch.zeros(count, made.dim, dtype=schedule.OPERAND_DTYPE, device=device) for _ in range(2))
    one, zero = (torch.tensor(number, device=device) for number in (1.0, 0.0))
    dq, dk = (torch.zeros(count, made.dim, device=device) for _ in range(2))
    positive = torch.zeros(schedule.POSITIVE_PARTS, count, device=device)

    def statistics(lowest: float) -> Statistics:
        exponents = torch.zeros(count, device=device)
        exponents[5] = lowest
        return Statistics(exponents, torch.ones(count, device=device))

    for lowest, expected in ((-90.0, False), (-91.0, True)):  # references lie 10 below the largest
        scratch = schedule.backward_scratch(count, count, q.device)
        block = Block(q, k, one, zero, 0, 0, statistics(lowest), statistics(0.0), positive)
        schedule.backward_block(block, dq, dk, scratch, fresh_dq=True, fresh_dk=True)
        programs = 1 if made.strategy == "fused" else scratch.flags.numel()
        assert bool(scratch.flags[:programs].any()) == expected, (
            f"a row {-lowest - 10:g} orders below: flags {scratch.flags}"
        )


def lines_without_a_term(made: Made) -> None:
    """Plain torch: a panel whose logits are all -inf leaves its rows' sums as they are."""
    schedule: Any = module(made)._schedule
    dtype = schedule.STATISTICS_DTYPE
    found = Statistics(torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype))
    for value, expected in ((-math.inf, -math.inf), (3.0, 5.0), (-math.inf, 5.0)):
        x2 = torch.full((2, 4), value, dtype=dtype)
        schedule.add_(found, x2, torch.empty_like(x2), 1)
        assert (found.exponent + found.mantissa.log2() == expected).all() or not found.mantissa.any(), found


def cancelling_products(made: Made) -> None:
    """Plain torch: products for dscale cancel in a strip of rows and across strips; fp32 sums would lose the rest."""
    schedule: Any = module(made)._schedule
    rows = 3 * schedule.STRIP_ROWS
    x = torch.ones(rows, made.dim, dtype=schedule.FEATURE_DTYPE)
    number: dict[str, Any] = {"dtype": schedule.STATISTICS_DTYPE}
    for first, last in ((0, 2), (0, rows - 1)):
        total = torch.zeros(rows, made.dim, **number)
        total[first, 0], total[first + 1, 0], total[last, 0] = 2.0**40, 1.0, -(2.0**40)
        dots = torch.empty(1, **number)
        with mock.patch.object(schedule, "FINISH_ROWS", rows):
            schedule.finish(
                total, x, *(torch.ones((), **number) for _ in range(3)), 1.0, torch.empty_like(x), dots=dots
            )
        assert float(dots) == 1.0, f"products in rows {first} and {last} cancel to {float(dots)}, not 1"


def rehearsal(made: Made, device: str = "cpu") -> None:
    """Before its first step a package compiles what that step launches: the same kernels with the same constants."""
    package: Any = module(made)
    schedule, runtime = package._schedule, importlib.import_module(f"{package.__name__}._runtime.warmup")
    # Of rows that are keys of each other, and of pairs, 64 are rehearsed, which lie in one panel, on the diagonal.
    several = package._package.traits.triangle or package._package.traits.pairs
    rows = 128 + 64 if several else 70
    case = Case(rows, rows, made.dim, made.dtype, 14.3, seed=1)
    inputs = inputs_of(package, case, device)
    one, zero = (torch.tensor(number, device=device) for number in (14.3, 0.0))
    labels = inputs.labels

    def described(launches: Iterable[Any]) -> set[Any]:
        return {
            (kernel.fn.__name__, *((name, x) for name, x in given.items() if name.isupper() or name.startswith("num")),
             *((name, x.dtype) for name, x in given.items() if isinstance(x, torch.Tensor)))
            for kernel, _, given in launches if kernel.fn.__name__ != "copy_inputs"
        }  # fmt: skip

    call, made_launches = runtime.Call(inputs.q, inputs.others, one, zero, labels=labels), []
    launched = schedule.launch

    def launch(kernel: Any, grid: Any, **given: Any) -> None:
        made_launches.append((kernel, grid, given))
        launched(kernel, grid, **given)

    given = [inputs.q, inputs.k, one, zero]
    wanted = (0b1111, 0b1110, 0b1101, 0b1100, 0b0011, 0) if LONG else (0b1111, 0b1101, 0b0011, 0)
    for gradients in sorted({bits & package._package.gradients for bits in wanted}):
        with mock.patch.multiple(runtime, **({"ROWS": 0, "LARGEST_TILE": 128} if several else {"ROWS": runtime.ROWS})):
            noted = runtime.rehearsed(package._package, call, gradients)
        made_launches.clear()
        leaves = [
            x if x is None else x.detach().requires_grad_(bool(gradients >> bit & 1)) for bit, x in enumerate(given)
        ]
        panels = {"launch": launch} | ({"PANEL_ROWS": 64} if several else {})  # of whole tiles
        with mock.patch.multiple(schedule, **panels):
            loss = package.contrastive_loss(*leaves, labels=labels)
            if gradients:
                loss.backward()
        assert made_launches and described(made_launches) <= described(noted), f"gradients {gradients:04b}"
        if gradients == package._package.gradients:
            assert described(made_launches) == described(noted)


def a_later_strip_of_wide_range(made: Made, device: str = "cpu") -> None:
    """A stash of several strips for each block of keys, of which only a later one is computed again: where its
    rows lie orders below those of the first."""
    package: Any = module(made)
    schedule = package._schedule
    case = Case(130, 130, made.dim, made.dtype, 14.3, seed=2)
    inputs = tensors(case, package.SPEC["positives"], device)
    inputs.k[:, 0], inputs.q[48:64] = 0.5, 0.0
    inputs.q[48:64, 0] = -20.0  # 200 binary orders below the other rows
    flags: list[Any] = []
    launched = schedule.launch

    def launch(kernel: Any, grid: Any, **given: Any) -> None:
        launched(kernel, grid, **given)
        if kernel.fn.__name__ == "forward":
            blocks = -(-given["keys"] // schedule.kernels.FORWARD_KEYS.value)
            flags.append(given["flags"][: grid[0]].view(blocks, -1).bool())  # (blocks of keys, strips)

    with mock.patch.multiple(schedule, FORWARD_PROGRAMS=4, launch=launch):
        result = package.loss_and_grads(*inputs[:4], labels=inputs.labels)
    judged = gate(result, truth_of(package, inputs))
    assert not failures(judged), failures(judged)
    assert any(each[:, 1:].any() and not each[:, 0].any() for each in flags), flags


def sums_of_visitors(made: Made, device: str = "cpu") -> None:
    """Of a triangle's rows over ranks: sums of no pair change no number, however small; others are added up."""
    package: Any = module(made)
    schedule, traits = package._schedule, package._package.traits
    triangle: Any = importlib.import_module(f"{package.__name__}._runtime.triangle")
    numbers = {"dtype": schedule.STATISTICS_DTYPE, "device": device}
    total = torch.ones(2 + schedule.POSITIVE_PARTS, 70, **numbers)
    pairs = [0, *[2 + schedule.POSITIVE_PARTS - 2] * traits.second]  # rows that are exponents, before mantissas
    for row in pairs:
        total[row] = torch.linspace(-900, 900, 70, device=device).floor()
        total[row + 1, :3] = 0.0
    sums = torch.full_like(total, math.nan)
    triangle.begin(sums, traits)
    found = total.clone()
    triangle.add(found, sums, traits, schedule.add_statistics)
    for row in pairs:
        assert torch.equal(found[row : row + 2, 3:], total[row : row + 2, 3:]), "sums of no pair change sums"
        assert not found[row + 1, :3].any(), "sums of no pair are something"
    assert torch.equal(found[2:4], total[2:4]), "sums of no pair change positives"
    triangle.add(found, found.clone(), traits, schedule.add_statistics)
    for row in pairs:
        assert torch.equal(found[row, 3:], total[row, 3:] + 1), "equal sums do not add up to twice one"
        assert torch.equal(found[row + 1], total[row + 1])
