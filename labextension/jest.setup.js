// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// Adds features of browsers that jsdom lacks. JupyterLab's modules use these features
// when they load.
const { TextDecoder, TextEncoder } = require('util');
globalThis.TextDecoder ??= TextDecoder;
globalThis.TextEncoder ??= TextEncoder;
globalThis.ResizeObserver ??= class {
  observe() {}
  unobserve() {}
  disconnect() {}
};
globalThis.DragEvent ??= class extends Event {};
globalThis.fetch ??= () => Promise.reject(new Error('a test reached the network'));
globalThis.Request ??= class {};
globalThis.Response ??= class {};
globalThis.Headers ??= class {};
globalThis.requestIdleCallback ??= told => setTimeout(told);
navigator.clipboard ??= {};
globalThis.matchMedia ??= () => ({
  matches: false,
  addListener() {},
  removeListener() {},
  addEventListener() {},
  removeEventListener() {}
});
