// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { LabIcon } from '@jupyterlab/ui-components';

import logo from '../style/logo.svg';

/** The logo of the Pooled GPU kernel. */
export const logoIcon = new LabIcon({ name: 'gpupool:logo', svgstr: logo });
