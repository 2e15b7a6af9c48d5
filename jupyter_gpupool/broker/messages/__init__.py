# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Handles the messages to the broker. Most modules are for the messages of one kind of sender."""
