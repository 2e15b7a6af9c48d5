# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Every text that the product shows to a person, in one file that can be read top to bottom.

``python -m tests.texts`` writes ``all.txt``; ``test_texts.py`` fails where the file and the product
differ. Nothing in the file is a copy: its first part comes from the functions that make the texts,
with plausible values; its second part, the sentences that the first one did not meet, is read from
the source, with a name in angle brackets where a value goes.
"""
