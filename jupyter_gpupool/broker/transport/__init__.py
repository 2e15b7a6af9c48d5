# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Decides who may connect, reads requests, sends messages, and serves users in a fair order."""
