"""What CI leaves to the nightly tier (HYPOTHESIS_PROFILE=long): repetitions of a property, and sizes that take long.

A property holds in CI for each template, schedule, kernel, trait of losses and transport. Over further losses, dtypes,
sizes and ranks the nightly tier repeats it. `nightly` names what CI takes, beside the list of all. Of `combined` lists
CI takes each value at least once, of lists `in_pairs` any two values together; the nightly tier all combinations.

Beyond that the nightly tier alone
- draws features of ten dimensions up to 1 152 and up to 170 rows under the interpreter (5 s each instead of 0.5 s); CI
  four dimensions up to 100, and up to 100 rows,
- has the gate judge kernels of each loss of the tests, on one device and over each way of sending; CI of each built-in
  loss, between guard bands alone where it is judged there, and of others where no other test of kernels does; over
  ranks one for each trait,
- runs every ragged size of `panel` and `fused` between guard bands, CI every eighth of `fused`,
- runs thirteen sizes of each other package and every one of the CPU target; CI two, and four of four packages,
- runs the check of every planted bug; CI of one of kernels by each check, and of three of the runtime,
- compiles every kernel ahead of time (2 minutes); CI, of one or two dimensions of a loss, those of which
  tests/compiled.json does not know what they take,
- judges the legality of all that the tuner proposes; CI of seven for each family,
- takes all forty combinations of options, also over one to four ranks; CI takes ten on the CPU and over three ranks,
  and the kernels of four,
- draws rings in one process of up to 64 ranks (5 s each) and features of nine widths; CI up to 16 ranks and two
  widths, beside one fixed ring of 32,
- plans for 65 536 ranks, simulates 4 096 and measures what one of them allocates (30 s); CI goes up to 512. One rank of
  4 096 goes through the whole runtime; in CI one of 128,
- compiles what the tuner drops for spills of ragged sizes alone (20 s); CI drops what spills on all,
- repeats calls 5 times under the interpreter, 100 times on the CPU; CI once and ten times, and 100 times one package;
  these, far rows and what is not finite of ten packages of kernels, CI of six,
- judges wrong factors, missed positives and lost rows over all dtypes, scales and sizes; CI any two values together,
- judges tf32 at 1 000 rows, too, and the CPU target in ten widths; CI at 128 rows and in four widths,
- runs the first example of the README as a process of its own (8 s); CI forks it,
- sends each loss of one side, of partners, means and prefixes in each way between ranks, and steps of means in each
  size of micro-batches; CI each loss in one way, and each way,
- takes all orders of backwards, large rings and scales of partners for each loss; CI each of them once,
- compares every row of long files of measurements with simulations, and frees a side of each plan; CI every third row,
  and of five of seven plans one side,
- combines losses and dtypes of the CPU target in solved batches, and changes of towers with all treatments; CI takes
  each value once, and any two values together,
- puts NaN and both infinities into both sides' features of each package; CI of one, in others NaN into one side and
  an infinity into the other,
- puts all three into scale and bias of each package; CI into those of one, of the others infinity into the scale or
  NaN into the bias,
- judges six packages at five scales that are not positive; CI one of them at three, the others at one,
- judges solved batches of seven packages, smoothed ones of five and tiles computed twice in eleven; CI six, three and
  eight,
- gives kernels for Hopper prefixes of products, and draws twelve inputs of prefixes; CI prefixes of cosines, and two,
- rehearses steps with six choices of gradients and freezes sides in five; CI with four and in three,
- multiplies 16 columns by the matrix library in bf16, too; CI in halves and in prefixes,
- finds infinities as Triton's own interpreter does; CI NaN,
- calls rings of kernels again, of the same sizes and of others; CI those of three packages,
- checks operators under no_grad and with each side frozen for every loss; CI for clip, and of others one case,
- meets five distributions of rows in every half ring; CI in those of one loss, and one for each of the others,
- plants each bug of a half ring in every way of sending; CI in one,
- runs losses of one side, of several positives and of means over four to seven distributions of rows; CI over two
  or three,
- meets each ragged size on the CPU with three losses; CI with one,
- lays each package out over gloo processes in every way; CI each package and each way once,
- refuses each mismatch on two ranks and on four; CI on either,
- draws 50 to 3 000 examples of a property where CI draws 1 to 30,
- judges eight planned packages under the interpreter by seven examples each, CI seven by two, and runs 27 self-tests of
  planned tiles; CI six of other kernels,
- runs kernels of prefixes at five ragged sizes and over ranks in two batches; CI at two and in one, and two of four
  where rows are computed twice,
- takes kernels of single queries over prefixes, and sends them, in four packages; CI in two, and one of kernels,
- runs `rows` over one to three ranks in five batches, at five ragged sizes and in six wide ranges; CI over two and
  three in one each, at two sizes and in three ranges,
- plans under three further hash seeds and generates the golden packages under four, CI under one; prints the
  formulas of all losses under another hash seed, CI of a third,
- compiles four candidates of the tuner for the target (4 s each), CI two,
- interrupts tuning runs at twenty random moments (4 s each), CI one run, forked, as it runs candidates,
- measures torch.compile by Inductor (20 s of g++) and trains under torchrun; CI by aot_eager, in forked processes,
- trains in fp32 and compares accuracies with the spread of seeds (18 s); CI tests single steps in fp32,
- trains for 300 steps in fp64 with the losses and the accuracy of whole batches, CI for 30,
- has ranks plan together, and average a scale in no module, under DDP and FSDP2; CI under FSDP2,
- takes each of two dropouts with each of two micro-batches for what second passes must meet; CI each in one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import hypothesis

from infcl_gen.verification.properties import DIMS

T = TypeVar("T")

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
DRAWN_RANKS, DRAWN_NODES = (64, 8) if LONG else (16, 4)
INTERPRETED_DIMS = DIMS if LONG else (1, 3, 64, 100)


def examples(ci: int, long: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=long if LONG else ci)


def nightly(values: Iterable[T], ci: Iterable[T]) -> list[T]:
    """In the nightly tier all values, in CI those that `ci` names."""
    every, few = list(values), list(ci)
    unknown = [each for each in few if each not in every]
    if unknown:
        raise ValueError(f"CI takes {unknown}, which the nightly tier does not have")
    return every if LONG else [each for each in every if each in few]


def some(bugs: Iterable[T], ci: int = 3) -> list[T]:
    """In the nightly tier all of the planted bugs that one check must notice, in CI at most so many, from first to
    last."""
    every = list(bugs)
    return every if LONG else every[:: -(-len(every) // ci)]


def combined(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """In the nightly tier every combination of these lists' values, in CI as many as the longest list has."""
    every: Sequence[Sequence[Any]] = [list(each) for each in lists]
    if LONG:
        return list(itertools.product(*every))
    return [tuple(each[n % len(each)] for each in every) for n in range(max(map(len, every)))]


def in_pairs(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """In the nightly tier every combination of these lists' values, in CI so many that any two values meet in one."""
    every = list(itertools.product(*map(list, lists)))
    if LONG:
        return every
    few: list[tuple[Any, ...]] = []
    apart = set().union(*map(_pairs, every))
    while apart:
        few.append(max(every, key=lambda case: len(apart & _pairs(case))))
        apart -= _pairs(few[-1])
    return few


def _pairs(case: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
