"""The report of `infcl-gen doctor`: devices, links, versions, what works here, and advice for the rest."""

import dataclasses
import importlib.util
import platform
from collections.abc import Iterator
from typing import Any

from infcl_gen.errors import InfclError
from infcl_gen.hardware.detection import detect, find_device
from infcl_gen.hardware.links import LinkRates, measure
from infcl_gen.inputs.text import one_line
from infcl_gen.version import installed, interpreter_defect, older

_MINIMUM = {"torch": ((2, 11), "runs packages"), "triton": ((3, 6), "compiles kernels for GPUs")}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report. `state` is "ok", "missing", "old" or "broken"; `advice` is empty for "ok" only."""

    subject: str
    state: str
    detail: str
    advice: str = ""


@dataclasses.dataclass
class Report:
    """Findings, the rates between several GPUs, and the name of the device profile that fits the GPUs."""

    findings: list[Finding]
    links: LinkRates | None = None
    profile: str = "FILE.toml"


def examine() -> Report:
    """Findings about this machine. Never raises: what is missing or broken is a finding."""
    python = Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    report = Report([python, *map(_version, _MINIMUM)])
    try:
        for finding in _torch(report):
            report.findings.append(finding)
    except Exception as error:  # a broken installation raises anything, from OSError to AttributeError
        report.findings.append(Finding("torch", "broken", f"{type(error).__name__}: {error}", "reinstall torch"))
    return report


def _version(name: str) -> Finding:
    (major, minor), use = _MINIMUM[name]
    advice, version = f"install {name} {major}.{minor} or newer", installed(name).get(name)
    if version is None:
        return Finding(name, "missing", f"{name} {use}", advice)
    if older(version, major, minor):
        return Finding(name, "old", version, advice)
    return Finding(name, "ok", version)


def _torch(report: Report) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    import torch.distributed as dist

    found, gpus = find_device(), 0
    if found is None:
        advice = "the cpu target works; for GPUs, a driver and its torch build"
        yield Finding("gpu", "missing", "no GPU that torch can use", advice)
    else:
        gpus = torch.cuda.device_count()
        for index in range(gpus):
            gpu: Any = torch.cuda.get_device_properties(index)
            size = f"{gpu.total_memory / 2**30:.1f} GiB, {gpu.multi_processor_count} multiprocessors"
            yield Finding(f"gpu {index}", "ok", f"{gpu.name}, {found.arch}, {size}")
    try:
        profile = detect()
        report.profile = profile.name
        yield Finding("device profile", "ok", f"{profile.name} ({profile.arch}), used for --device-profile auto")
    except InfclError as error:
        yield Finding("device profile", "missing", str(error), "describe the device in a TOML file")
    if gpus > 1:
        yield _links(torch, report)
    gloo = dist.is_available() and dist.is_gloo_available()
    detail = "rings of CPU processes, and the ranks' agreement"
    yield _present("gloo", gloo, detail, "install torch with distributed support")
    if gpus:
        nccl = dist.is_available() and dist.is_nccl_available()
        yield _present("nccl", nccl, "rings of GPUs", "install torch with NCCL")
    yield from _triton(gpus > 0)


def _present(subject: str, is_there: bool, detail: str, advice: str) -> Finding:
    return Finding(subject, "ok", detail) if is_there else Finding(subject, "missing", detail, advice)


def _links(torch: Any, report: Report) -> Finding:
    devices = range(torch.cuda.device_count())
    pairs = [(a, b) for a in devices for b in devices if a != b]
    direct = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    try:
        report.links = links = measure(torch)
    except RuntimeError as error:
        return Finding("links", "broken", one_line(error), "free the GPUs' memory, and try again")
    rate, a, b = links.slowest
    detail = f"{len(direct)} of {len(pairs)} pairs direct; slowest {a} to {b}: {rate:.0f} GB/s"
    detail += f"; each to the next at once: {links.ring:.0f} GB/s"
    advice = "rings work through the host, slower; check the topology"
    return _present("links", len(direct) == len(pairs), detail, advice)


def _triton(gpu: bool) -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is None:
        return
    try:
        from triton.backends import backends
    except Exception as error:
        yield Finding("triton backends", "broken", f"{type(error).__name__}: {error}", "reinstall triton")
        return
    yield Finding("ahead of time", "ok", f"infcl-gen verify --aot can compile for: {', '.join(sorted(backends))}")
    if defect := interpreter_defect():
        reason, advice = defect.split(": ")
        yield Finding("interpreter", "missing", reason, advice)
    elif not gpu:
        yield Finding("interpreter", "ok", "TRITON_INTERPRET=1 runs kernels on the CPU, slowly, for tests")
