# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Every text that the product shows to a user, in one file for a reader.

``python -m tests.texts`` writes ``all.txt``; ``test_texts.py`` fails where the file and the product
differ. Nothing in the file is copied by hand. Its first part comes from the functions that make the
texts, with plausible values. Its second part has the other sentences of the source, with a name in
angle brackets in place of each value.
"""
