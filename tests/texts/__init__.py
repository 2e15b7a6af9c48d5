# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Every text that the product shows to a user, in one file for people who check the texts.

``python -m tests.texts`` writes ``all.txt``; ``test_texts.py`` fails if the file and the product
differ. Nobody edits the file by hand. For the first part of the file, the product's functions make
the texts from plausible values. The second part has all other sentences of the source, with a name
in angle brackets in place of each value.
"""
