"""Commands for plans and packages: plan, generate, inspect, verify, tune."""

from pathlib import Path
from typing import Any

from infcl_gen.cli import options, pages, text
from infcl_gen.cli.group import show
from infcl_gen.cli.options import COUNT, NAMES, NUMBER, command, option
from infcl_gen.errors import InputError, VerificationError
from infcl_gen.inputs.text import check_text
from infcl_gen.kernels import FAMILIES


@command(*options.problem, options.html)
def plan(flags: dict[str, Any]) -> None:
    """Print the plan: tiles with reasons, memory by buffer, time by phase, the largest batch for the budget."""
    import infcl_gen

    problem, file = options.problem_of(flags), options.result_file(flags, "html")
    result = infcl_gen.plan(problem)
    if file is not None:
        pages.write_plan(file, problem, options.command_line("plan", flags, options.PROBLEM))
    lines = (f"{text.plan_text(result)}\n", text.record_text(problem), *text.wrote(file))
    show(flags, {"plan": result.as_dict()}, lambda: "\n".join(lines))


@command(
    *options.problem,
    option("-o --output", "DIR", "Folder for the package."),
    option("--force", None, "Replace a package that is there.", bool),
)
def generate(flags: dict[str, Any]) -> None:
    """Plan a problem and write its loss package; byte-identical for identical inputs."""
    import infcl_gen

    if flags["output"] is None:
        raise InputError("--output: is required; give the folder to write the package to")
    output = check_text("--output", flags["output"])
    path = infcl_gen.generate(options.problem_of(flags), output, force=flags["force"])
    show(flags, {"path": str(path)}, lambda: f"wrote {path}")


@command(options.directory, option("--latex", None, "The loss in LaTeX instead: formulas and gradient.", bool))
def inspect(flags: dict[str, Any]) -> None:
    """Show a package: SPEC, plan, derived formulas, kernels. Parses the files, never imports them."""
    from infcl_gen.emission.package import kernels_of, read_package

    package = read_package(options.directory_name(flags["directory"]), partial=True)
    if flags["latex"]:
        from infcl_gen.losses import aligned, derive, latex_of, spec_from_dict

        formulas = latex_of(derive(spec_from_dict(package.spec["loss"])))
        return show(flags, {"latex": formulas}, lambda: aligned(formulas.values()))
    files = (package.files.get(name, b"").decode() for name in dict.fromkeys(family.file for family in FAMILIES))
    kernels = [kernel for file in files for kernel in kernels_of(file)]
    sizes = {path: len(content) for path, content in sorted(package.files.items())}
    missing = list(package.missing)
    result = {"spec": package.spec, "kernels": kernels, "files": sizes, "partial": bool(missing), "missing": missing}
    show(flags, result, lambda: text.package_text(package.spec, kernels, sizes, missing))


@command(
    options.directory,
    option("--ranks", "N", "Check on a ring of N processes as well, in the order of nodes if N is planned.", COUNT),
    option("--aot", "ARCH,...", "Compile every kernel for these targets: sm_90,gfx942,...", NAMES),
    option("--edited", None, "Check the code of an edited package, too; the package fails all the same.", bool),
)
def verify(flags: dict[str, Any]) -> None:
    """Re-render a package and compare bytes, then check its numbers on this machine against fp64."""
    ranks = None if flags["ranks"] is None else options.count(flags, "ranks", 1, 1, options.MAX_RANKS)
    named = [] if flags["aot"] is None else options.parts(flags["aot"])
    targets = list(dict.fromkeys(str(name).strip() for name in named))
    folder = options.directory_name(flags["directory"])
    from infcl_gen.verification.verify import verify_package

    with options.progress(flags) as progress:
        rows = verify_package(folder, ranks=ranks, aot=targets, edited=flags["edited"], progress=progress)
    names = [row["check"] + " (edited)" * ("edited" in row) for row in rows]
    lines = [("ok" if row["passed"] else "FAILED", name, row["detail"]) for name, row in zip(names, rows, strict=True)]
    failed = [name for name, row in zip(names, rows, strict=True) if not row["passed"]]
    result = {"package": str(Path(folder)), "passed": not failed, "rows": rows}
    show(flags, result, lambda: text.table_text(("", "check", "detail"), lines))
    if failed:
        raise VerificationError(f"{len(failed)} of {len(rows)} checks failed: {', '.join(failed)}")


@command(
    options.directory,
    option("--minutes", "N", "Time to spend [20]; one family of kernels is finished in any case.", NUMBER),
    option("--records", "DIR", "Folder of the record [the user's data folder]."),
)
def tune(flags: dict[str, Any]) -> None:
    """Measure candidates on this machine, write a record, and the package again with the winner.

    May be interrupted at any moment: another run goes on from the last finished family of kernels.
    """
    minutes = options.number(flags, "minutes", 20.0, 1440, "number of minutes")
    folder = options.directory_name(flags["directory"])
    from infcl_gen.tuning.family import Limits
    from infcl_gen.tuning.search import tune

    records = None if flags["records"] is None else Path(check_text("--records", flags["records"]))
    with options.progress(flags) as progress:
        outcome = tune(folder, records, Limits(minutes=minutes), progress=progress)
    show(flags, outcome.as_dict(), lambda: text.tuning_text(outcome))
