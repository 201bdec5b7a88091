"""Print how many tests passed, failed and were skipped, over all of pytest's result files."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET


def main(files: list[str]) -> int:
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for file in files:
        for suite in ET.parse(file).getroot().iter("testsuite"):
            for name in total:
                total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    print(f"{passed} passed, {failed} failed, {total['skipped']} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
