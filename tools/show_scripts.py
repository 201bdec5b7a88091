"""Put the scripts of `examples/` into the pages that show them whole.

    python tools/show_scripts.py

A page says which one where a block begins: ```python examples/from_cleanrl.py. `tests/test_guides.py` compares.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```python (examples/\w+\.py)\n.*?^```$", re.DOTALL | re.MULTILINE)


def shown_in(text: str) -> list[str]:
    """The files that a page shows."""
    return _BLOCK.findall(text)


def with_scripts(text: str) -> str:
    """The page with its scripts as they are in the files now."""
    return _BLOCK.sub(lambda block: f"```python {block[1]}\n{(ROOT / block[1]).read_text()}```", text)


def main() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        if (new := with_scripts(text)) != text:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)}: {', '.join(shown_in(text))}")


if __name__ == "__main__":
    main()
