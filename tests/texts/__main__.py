# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m tests.texts``: write ``all.txt``. Read what has changed before you commit it."""

from __future__ import annotations

from .collect import FILE, everything

if __name__ == "__main__":
    text = everything()
    FILE.write_text(text, encoding="utf-8")
    print(f"{text.count(chr(10))} lines in {FILE}")
