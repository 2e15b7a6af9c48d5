# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pure decisions: events in, actions out, time as data. No clock, no I/O, no configuration."""
