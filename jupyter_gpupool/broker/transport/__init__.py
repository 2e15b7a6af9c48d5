# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The socket: who may connect, bytes to messages and back, and a fair order between users."""
