// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

declare module '*.svg' {
  const text: string;
  export default text;
}
