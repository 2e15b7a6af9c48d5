# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Every text that the product shows to a user, in one file for people who check the texts.

``python -m tests.texts`` writes ``all.txt``; ``test_texts.py`` fails if the file and the product
differ. Nobody copies text into the file by hand. The first part of the file comes from the
functions that make the texts, with plausible values. The second part has the other sentences of
the source, with a name in angle brackets in place of each value.
"""
