"""``swath report``: a page of a dataset, or of a trace; the exit code."""

from __future__ import annotations

from pathlib import Path

from swath.cli.errors import FAILED, USAGE, UsageError
from swath.cli.streams import say
from swath.dataset_format import REPORT

#: By this a page is known that may be replaced.
_OURS = '<meta name="generator" content="swath">'


def report(path: str, out: str | None) -> int:
    """Run the command."""
    try:
        page, default = _page_of(Path(path))
        target = Path(out) if out is not None else default
        _check_replaceable(target)
    except (UsageError, ValueError, FileNotFoundError) as error:
        return _complain(str(error), USAGE)
    except OSError as error:
        return _complain(f"{path} cannot be read: {error.strerror}", FAILED)
    from swath.cli.keeping import write_report

    try:
        write_report(page, target)
    except OSError as error:
        return _complain(f"{target} cannot be written: {error.strerror}; choose another place with --out", FAILED)
    print(f"{target} ({target.stat().st_size / 1000:,.0f} kB)")
    return 0


def _page_of(path: Path) -> tuple[str, Path]:
    """The page, and where it goes if nobody says."""
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder; swath report takes a dataset's folder, or a trace")
    from swath.insight.report import report_page
    from swath.insight.report.opening import run_of_dataset, run_of_trace

    if path.is_dir():
        return report_page(run_of_dataset(path)), path / REPORT
    return report_page(run_of_trace(path)), path.with_suffix(".html")


def _check_replaceable(target: Path) -> None:
    if target.is_dir():
        raise UsageError(f"--out {target}: that is a folder; name a file, such as {target / REPORT}")
    if not target.exists():
        return
    if not target.is_file():
        raise UsageError(f"--out {target}: that is no file")
    with target.open("rb") as file:
        if _OURS.encode() not in file.read(1000) and target.stat().st_size:
            raise UsageError(f"{target} exists, and is no report of swath: choose another file with --out")


def _complain(what: str, code: int) -> int:
    say(f"error: {what}")
    return code
