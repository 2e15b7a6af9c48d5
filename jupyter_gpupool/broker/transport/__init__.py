# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Accepts connections, reads requests, sends messages, and serves users in a fair order."""
