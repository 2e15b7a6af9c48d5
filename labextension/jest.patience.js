// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// On a busy machine, a page may need more than the default second to change.
const { configure } = require('@testing-library/dom');
configure({ asyncUtilTimeout: 20_000 });
