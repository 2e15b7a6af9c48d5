// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// What browsers have, JupyterLab's modules use when loaded, and jsdom lacks.
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
