# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Inbound messages, by who sends them, and the answers to them."""
